from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_selfheal.errors import SettingsError
from celery_selfheal.retry_budget import WINDOW_SECONDS, Bucket, RetryBudget, Turn

BUDGET = RetryBudget(share=0.5, per_second=0.1)  # six retries at once, then one in ten seconds
NOON = 43_200.0  # a whole number of windows


class Fleet:
    """Takes from one bucket, at instants that the test names."""

    def __init__(self, budget: RetryBudget = BUDGET) -> None:
        self.budget = budget
        self.bucket: Bucket | None = None

    def take(self, turn: Turn, now: float = NOON, *, times: int = 1) -> list[float]:
        waits = []
        for _ in range(times):
            self.bucket, wait = self.budget.take(self.bucket, turn, now=now)
            waits.append(wait)
        return waits

    def started_at_once(self, now: float, *, times: int = 100) -> int:
        return self.take("retry", now, times=times).count(0.0)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20% + 10/s", RetryBudget(0.2, 10)),
        ("20%+10/s", RetryBudget(0.2, 10)),
        ("  0 % + 0.5 / s ", RetryBudget(0, 0.5)),
        ("12.5% + 3/s", RetryBudget(0.125, 3)),
        ("150% + 1/s", RetryBudget(1.5, 1)),
    ],
)
def test_budget_is_read_as_written(text: str, budget: RetryBudget) -> None:
    assert RetryBudget.parse(text) == budget


@pytest.mark.parametrize(
    "text",
    ["", "20%", "10/s", "20% + 10", "20 + 10/s", "-5% + 10/s", "20% + -1/s", "20% + 10/m", "nan% + 1/s", "1e3% + 1/s"],
)
def test_another_form_is_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RetryBudget.parse(text)

    assert caught.value.setting == "selfheal_retry_budget"
    assert "'20% + 10/s'" in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["20% + 0/s", "20% + 0.0/s", f"20% + {'9' * 400}/s", f"{'9' * 400}% + 1/s"])
def test_budget_by_which_a_retry_could_wait_for_ever_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="a rate above 0/s"):
        RetryBudget.parse(text)


def test_first_attempts_and_paid_retries_never_wait() -> None:
    fleet = Fleet()
    fleet.take("retry", times=50)

    assert fleet.take("first", times=50) == [0.0] * 50
    assert fleet.take("paid", times=50) == [0.0] * 50


def test_each_retry_above_the_budget_has_a_place_of_its_own() -> None:
    assert Fleet().take("retry", times=9) == pytest.approx([0, 0, 0, 0, 0, 0, 10, 20, 30])


def test_two_first_attempts_earn_one_retry() -> None:
    fleet = Fleet()
    fleet.take("retry", times=6)
    fleet.take("first", times=4)

    assert fleet.started_at_once(NOON) == 2


def test_time_earns_a_window_of_retries_at_most() -> None:
    fleet = Fleet()
    fleet.take("retry", times=6)

    assert fleet.started_at_once(NOON + 25) == 2

    fleet = Fleet()
    fleet.take("retry", times=6)

    assert fleet.started_at_once(NOON + 3600) == 6


def test_shares_are_gone_with_the_window_after_the_one_that_earned_them() -> None:
    """A quiet day of a million first attempts must not let two hundred thousand retries through at night."""
    for seconds, started in [(0, 56), (59, 56), (90, 6 + 25), (2 * WINDOW_SECONDS, 6), (86_400, 6)]:
        fleet = Fleet()
        fleet.take("first", times=100)

        assert fleet.started_at_once(NOON + seconds) == started, seconds


def test_steady_flow_earns_no_more_than_its_last_window() -> None:
    fleet = Fleet()
    for second in range(3600):
        fleet.take("first", NOON + second)

    assert 6 + 30 <= fleet.started_at_once(NOON + 3599) <= 6 + 60


def test_clock_that_goes_back_earns_nothing() -> None:
    fleet = Fleet()
    fleet.take("retry", times=6)

    assert fleet.started_at_once(NOON - 3600) == 0


@given(
    firsts=st.integers(0, 300),
    retries=st.lists(st.floats(0, WINDOW_SECONDS), max_size=300),
    share=st.floats(0, 2),
    per_second=st.floats(0.01, 5),
)
def test_no_minute_starts_more_retries_at_once_than_burst_shares_and_rate(
    firsts: int, retries: list[float], share: float, per_second: float
) -> None:
    budget = RetryBudget(share=share, per_second=per_second)
    fleet = Fleet(budget)
    fleet.take("first", times=firsts)

    at_once = sum(fleet.take("retry", NOON + at) == [0.0] for at in sorted(retries))

    assert at_once <= budget.burst + share * firsts + per_second * WINDOW_SECONDS + 1e-6


@given(retries=st.integers(0, 200), per_second=st.floats(0.01, 5))
def test_places_are_one_token_apart_and_in_order(retries: int, per_second: float) -> None:
    waits = [wait for wait in Fleet(RetryBudget(0, per_second)).take("retry", times=retries) if wait]

    gaps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert gaps == pytest.approx([1 / per_second] * len(gaps))
