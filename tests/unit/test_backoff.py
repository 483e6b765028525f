from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from celery.utils.time import get_exponential_backoff_interval
from hypothesis import given
from hypothesis import strategies as st

from celery_selfheal.backoff import (
    Backoff,
    Jitter,
    RetryPolicy,
    check_backoff,
    check_exception_classes,
    check_jitter,
    check_seconds,
)
from celery_selfheal.errors import SettingsError

SEED = 20_260_702
DRAWS = 5_000
MICROSECOND = 1e-6  # what a timedelta rounds to


def draw(backoff: Backoff, attempt: int, *, count: int = DRAWS, seed: int = SEED) -> list[float]:
    chance = random.Random(seed)
    return [backoff.delay(attempt, chance=chance).total_seconds() for _ in range(count)]


def distance_to_uniform(samples: Sequence[float], low: float, high: float) -> float:
    """Kolmogorov-Smirnov: the largest gap between the samples' distribution and the uniform one."""
    places = [(sample - low) / (high - low) for sample in sorted(samples)]
    count = len(places)
    return max(max((n + 1) / count - place, place - n / count) for n, place in enumerate(places))


def p_value(samples: Sequence[float], low: float, high: float) -> float:
    """How probable so large a gap is if the samples are uniform (Kolmogorov's limit, with Stephens' correction)."""
    root = math.sqrt(len(samples))
    scaled = (root + 0.12 + 0.11 / root) * distance_to_uniform(samples, low, high)
    terms = (2 * (-1) ** (n - 1) * math.exp(-2 * (n * scaled) ** 2) for n in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))


@pytest.mark.parametrize("attempt", [0, 1, 4, 9, 10, 10_000])
def test_full_jitter_is_uniform_from_nothing_to_the_ceiling(
    attempt: int, record_property: Callable[[str, object], None]
) -> None:
    backoff = Backoff(base_seconds=1, cap_seconds=600)
    ceiling = min(600, 2 ** min(attempt, 20))

    p = p_value(draw(backoff, attempt), 0, ceiling)

    record_property("p_value", p)
    assert p > 0.01


def test_the_uniformity_test_tells_whole_seconds_from_continuous_ones() -> None:
    """Celery's own helper draws whole seconds: with it, the test above would fail."""
    state = random.getstate()
    random.seed(SEED)
    try:
        whole = [get_exponential_backoff_interval(1, 4, 600, full_jitter=True) for _ in range(DRAWS)]
    finally:
        random.setstate(state)

    assert p_value(whole, 0, 16) < 1e-9


@pytest.mark.parametrize(
    ("jitter", "low", "high"),
    [(Jitter.FULL, 0, 8), (Jitter.EQUAL, 4, 8), (Jitter.DECORRELATED, 1, 12)],
)
def test_each_jitter_is_uniform_over_its_own_range(jitter: Jitter, low: float, high: float) -> None:
    samples = draw(Backoff(base_seconds=1, cap_seconds=600, jitter=jitter), 3)

    assert low <= min(samples)
    assert max(samples) <= high
    assert p_value(samples, low, high) > 0.01
    assert statistics.mean(samples) == pytest.approx((low + high) / 2, rel=0.03)


def test_without_jitter_the_ceilings_themselves_are_waited() -> None:
    backoff = Backoff(base_seconds=0.3, cap_seconds=5, jitter=Jitter.NONE)

    waits = [draw(backoff, attempt, count=1)[0] for attempt in range(6)]

    assert waits == pytest.approx([0.3, 0.6, 1.2, 2.4, 4.8, 5])


def test_fractions_of_a_second_are_kept() -> None:
    """Celery makes 1.9 a 1, and 0.5 a 1, too."""
    assert max(draw(Backoff(base_seconds=1.9, cap_seconds=600), 0)) == pytest.approx(1.9, rel=0.01)
    assert max(draw(Backoff(base_seconds=0.05, cap_seconds=600), 0)) == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("attempt", [1_023, 1_024, 10_000, 10**9, 10**30])
def test_no_attempt_is_too_late_to_compute(attempt: int) -> None:
    backoff = Backoff(base_seconds=0.1, cap_seconds=600)

    assert backoff.ceiling_seconds(attempt) == 600
    assert max(draw(backoff, attempt, count=100)) <= 600


def test_ceiling_is_exact_just_below_and_at_the_cap() -> None:
    backoff = Backoff(base_seconds=0.1, cap_seconds=0.1 * 2**40)

    assert [backoff.ceiling_seconds(attempt) for attempt in (39, 40, 41)] == [0.1 * 2**39, 0.1 * 2**40, 0.1 * 2**40]


@pytest.mark.parametrize("jitter", [Jitter.FULL, Jitter.EQUAL, Jitter.DECORRELATED])
def test_no_instant_is_favoured(jitter: Jitter) -> None:
    """Where a floor or a cap cuts the range off, what is cut must not pile up at its edge."""
    for floor, attempt in [(0.5, 0), (1, 0), (3, 0), (2, 3), (0, 9), (0, 10_000)]:
        samples = draw(Backoff(base_seconds=1, cap_seconds=60, floor_seconds=floor, jitter=jitter), attempt)
        most_in_a_hundredth = max(
            sum(1 for sample in samples if edge <= sample < edge + 0.01) for edge in (min(samples), max(samples) - 0.01)
        )

        assert most_in_a_hundredth < DRAWS * 0.05, (floor, attempt)


def test_floor_above_the_ceiling_leaves_room_above_itself() -> None:
    samples = draw(Backoff(base_seconds=1, cap_seconds=600, floor_seconds=5), 0)

    assert min(samples) >= 5
    assert max(samples) <= 10
    assert p_value(samples, 5, 10) > 0.01


def test_same_seed_draws_the_same_waits_and_another_seed_others() -> None:
    backoff = Backoff(base_seconds=1, cap_seconds=600)

    assert draw(backoff, 3, count=20) == draw(backoff, 3, count=20)
    assert draw(backoff, 3, count=20) != draw(backoff, 3, count=20, seed=SEED + 1)


@given(
    base=st.floats(1e-3, 1e4),
    above=st.floats(0, 1e5),
    floor_share=st.floats(0, 1),
    jitter=st.sampled_from(Jitter),
    attempt=st.integers(0, 20_000),
    seed=st.integers(),
)
def test_wait_is_never_below_the_floor_nor_above_the_cap(
    base: float, above: float, floor_share: float, jitter: Jitter, attempt: int, seed: int
) -> None:
    cap = base + above
    floor = cap * floor_share
    backoff = Backoff(base_seconds=base, cap_seconds=cap, floor_seconds=floor, jitter=jitter)

    (wait,) = draw(backoff, attempt, count=1, seed=seed)

    assert floor - MICROSECOND <= wait <= cap + MICROSECOND


@given(base=st.floats(1e-3, 100), attempt=st.integers(0, 20_000), seed=st.integers())
def test_full_and_equal_jitter_keep_to_the_ceiling(base: float, attempt: int, seed: int) -> None:
    ceiling = min(600.0, base * 2.0 ** min(attempt, 1_000))
    full = Backoff(base_seconds=base, cap_seconds=600)
    equal = Backoff(base_seconds=base, cap_seconds=600, jitter=Jitter.EQUAL)

    assert full.ceiling_seconds(attempt) == pytest.approx(ceiling)
    assert draw(full, attempt, count=1, seed=seed)[0] <= ceiling + MICROSECOND
    assert ceiling / 2 - MICROSECOND <= draw(equal, attempt, count=1, seed=seed)[0] <= ceiling + MICROSECOND


def policy(**changes: Any) -> RetryPolicy:
    return RetryPolicy(
        **{
            "retry_for": (Exception,),
            "give_up_for": (),
            "max_retries": 3,
            "backoff": Backoff(base_seconds=1, cap_seconds=600),
            "fixed_seconds": 180.0,
            **changes,
        }
    )


def test_policy_allows_as_many_retries_as_it_says() -> None:
    young = timedelta(0)

    assert [policy().allows_retry(attempt, age=young) for attempt in range(5)] == [True, True, True, False, False]
    assert not policy(max_retries=0).allows_retry(0, age=young)
    assert policy(max_retries=None).allows_retry(10_000, age=young)


def test_policy_allows_no_retry_of_what_is_too_old() -> None:
    old = policy(max_retries=None, max_age=timedelta(seconds=3))

    assert old.allows_retry(0, age=timedelta(seconds=2.9))
    assert not old.allows_retry(0, age=timedelta(seconds=3))
    assert policy().allows_retry(0, age=timedelta(days=999))


def test_policy_without_back_off_waits_its_fixed_time() -> None:
    chance = random.Random(SEED)

    assert policy(backoff=None).delay(7, chance=chance) == timedelta(seconds=180)
    assert policy().delay(0, chance=chance) <= timedelta(seconds=1)


@pytest.mark.parametrize(
    ("given_jitter", "expected"),
    [
        (True, Jitter.FULL),
        ("full", Jitter.FULL),
        ("equal", Jitter.EQUAL),
        ("decorrelated", Jitter.DECORRELATED),
        (False, Jitter.NONE),
    ],
)
def test_jitter_is_read_as_celery_and_we_spell_it(given_jitter: object, expected: Jitter) -> None:
    assert check_jitter("task t", given_jitter) is expected


@pytest.mark.parametrize(("base", "seconds"), [(True, 1), (1, 1), (2.5, 2.5), (0.01, 0.01), (600, 600)])
def test_base_is_read_as_celery_spells_it(base: object, seconds: float) -> None:
    backoff = check_backoff("task t", base=base, cap=600, floor=0, jitter=True)

    assert backoff == Backoff(base_seconds=seconds, cap_seconds=600)


@pytest.mark.parametrize("base", [False, 0, 0.0])
def test_back_off_is_off_as_in_celery(base: object) -> None:
    assert check_backoff("task t", base=base, cap=600, floor=0, jitter=True) is None


GOOD: dict[str, object] = {"base": 1, "cap": 600, "floor": 0, "jitter": True}


@pytest.mark.parametrize(
    ("wrong", "option", "shown"),
    [
        ({"base": -1}, "retry_backoff", "-1"),
        ({"base": math.nan}, "retry_backoff", "nan"),
        ({"base": math.inf}, "retry_backoff", "inf"),
        ({"base": "1"}, "retry_backoff", "'1'"),
        ({"base": None}, "retry_backoff", "None"),
        ({"base": timedelta(seconds=1)}, "retry_backoff", "datetime.timedelta(seconds=1)"),
        ({"base": 3600}, "retry_backoff", "3600"),
        ({"base": 600.01}, "retry_backoff", "600.01"),
        ({"base": 10**400, "cap": 10**401}, "retry_backoff_max", "1000"),
        ({"cap": 0}, "retry_backoff_max", "0"),
        ({"cap": -5}, "retry_backoff_max", "-5"),
        ({"cap": math.inf}, "retry_backoff_max", "inf"),
        ({"cap": math.nan}, "retry_backoff_max", "nan"),
        ({"cap": True}, "retry_backoff_max", "True"),
        ({"cap": None}, "retry_backoff_max", "None"),
        ({"floor": -0.1}, "retry_backoff_min", "-0.1"),
        ({"floor": math.nan}, "retry_backoff_min", "nan"),
        ({"floor": 601}, "retry_backoff_min", "601"),
        ({"jitter": "ful"}, "retry_jitter", "'ful'"),
        ({"jitter": "none"}, "retry_jitter", "'none'"),
        ({"jitter": None}, "retry_jitter", "None"),
        ({"jitter": 1}, "retry_jitter", "1"),
    ],
    ids=str,
)
def test_impossible_option_is_named_with_its_task_and_value(wrong: dict[str, object], option: str, shown: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_backoff("task shop.pay", **{**GOOD, **wrong})

    assert caught.value.setting == option
    assert str(caught.value).startswith(f"task shop.pay: {option} ")
    assert shown in str(caught.value)


def test_base_above_the_cap_says_which_of_them_to_raise() -> None:
    with pytest.raises(SettingsError, match=r"above retry_backoff_max of 600 s.*raise retry_backoff_max"):
        check_backoff("task shop.pay", **{**GOOD, "base": 3600})


def test_zero_is_refused_only_where_it_means_nothing() -> None:
    assert check_seconds("task t", "x", 0) == 0

    with pytest.raises(SettingsError, match="above 0"):
        check_seconds("task t", "x", 0, positive=True)


@pytest.mark.parametrize("classes", [(), (OSError,), [OSError, ValueError], {KeyError}, (KeyboardInterrupt,)])
def test_exception_classes_are_taken_from_any_collection(classes: Any) -> None:
    assert check_exception_classes("task t", "autoretry_for", classes) == tuple(classes)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (OSError, "<class 'OSError'>"),
        ("OSError", "'OSError'"),
        (("OSError",), "'OSError'"),
        ((OSError, int), "<class 'int'>"),
        ((OSError("x"),), "OSError('x')"),
        (None, "None"),
        (3, "3"),
    ],
    ids=str,
)
def test_what_is_no_exception_class_is_named_with_its_task_and_value(wrong: object, shown: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_exception_classes("task shop.pay", "autoretry_for", wrong)

    assert caught.value.setting == "autoretry_for"
    assert str(caught.value).startswith("task shop.pay: autoretry_for ")
    assert shown in str(caught.value)
