"""Who holds a key is gone, or may be alive: by fence, by lease, and by age where the lease cannot be asked."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from celery_selfheal.dedup.port import Held, Job
from celery_selfheal.dedup.takeover import Decision, Doubt, OnInDoubt, Park, TakeOver, decide
from celery_selfheal.errors import StoreError

TTL = timedelta(seconds=10)
AFTER = timedelta(minutes=10)
SECOND = timedelta(seconds=1)

ME = Job(key="payment:7", task_name="shop.pay", task_id="t1", token="mine", fence=100)


def yes(_task_id: str, _token: str) -> bool:
    return True


def no(_task_id: str, _token: str) -> bool:
    return False


def silent(_task_id: str, _token: str) -> bool:
    raise StoreError("redis://localhost", "is_held: timed out")


def never(_task_id: str, _token: str) -> bool:
    raise AssertionError("the lease store was asked for nothing")


def held(*, age: timedelta, task_id: str = "t2", token: str = "theirs", fence: int = 50) -> Held:
    return Held(task_id=task_id, token=token, fence=fence, age=age)


def judged(one: Held, is_held: Callable[[str, str], bool], on_in_doubt: OnInDoubt = "takeover") -> Decision:
    return decide(one, ME, is_held=is_held, lease_ttl=TTL, takeover_after=AFTER, on_in_doubt=on_in_doubt)


CASES = {
    "an earlier start of this task is gone, since its lease is mine": (held(age=0 * SECOND, task_id="t1"), never, None),
    "a later start of this task has it": (held(age=AFTER * 2, task_id="t1", fence=101), never, TTL),
    "a later start of another task has it": (held(age=AFTER * 2, fence=101), never, TTL),
    "another task's start lives": (held(age=AFTER * 2), yes, TTL),
    "another task's start has lost its lease": (held(age=TTL + SECOND), no, None),
    "a young claim without lease: the store may have been emptied": (held(age=TTL - 3 * SECOND), no, 3 * SECOND),
    "a new claim without lease": (held(age=0 * SECOND), no, TTL),
    "no answer, old enough": (held(age=AFTER + SECOND), silent, None),
    "no answer, and it is soon old enough": (held(age=AFTER - SECOND), silent, SECOND),
    "no answer: ask again soon": (held(age=TTL * 2), silent, TTL),
    "nobody named, old enough": (held(age=AFTER + SECOND, task_id="", token=""), never, None),
    "nobody named": (held(age=TTL * 2, task_id="", token=""), never, TTL),
    "not even visible": (held(age=0 * SECOND, task_id="", token="", fence=0), never, TTL),
}


@pytest.mark.parametrize(("one", "is_held", "wait"), CASES.values(), ids=CASES.keys())
def test_holder_is_judged(one: Held, is_held: Callable[[str, str], bool], wait: timedelta | None) -> None:
    assert judged(one, is_held) == (TakeOver() if wait is None else Park(wait))
    assert judged(one, is_held, "hold") == (Doubt() if wait is None else Park(wait))


def test_holder_itself_is_asked_for() -> None:
    asked = []

    judged(held(age=AFTER), lambda *question: bool(asked.append(question)) or True)

    assert asked == [("t2", "theirs")]
