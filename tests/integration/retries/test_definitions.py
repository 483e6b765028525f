"""However a task is defined, its retries are the same (field reports C50, C53)."""

from __future__ import annotations

import pytest

from integration.retries.crew import PATIENCE_SECONDS, Bank

BASE_SECONDS = 0.4  # of every task here, without jitter
WAYS = ["decorated", "registered", "inherited", "calling", "shared"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_define_a_task_gives_the_same_attempts_and_waits(way: str, bank: Bank) -> None:
    result = bank.send(way, task_id=way)

    death = bank.death(way)

    assert bank.attempts(way) == [0, 1, 2]
    first, second = bank.waits(way)
    assert BASE_SECONDS <= first < 2 * BASE_SECONDS <= second < PATIENCE_SECONDS
    assert (death.reason, death.exception, death.attempts, death.queue) == (
        "exhausted",
        "ConnectionError",
        3,
        "celery",
    )
    assert result.state == "FAILURE"
    assert isinstance(bank.result(way), ConnectionError)


def test_retry_by_hand_waits_as_the_policy_says(bank: Bank) -> None:
    """Celery waits 180 s."""
    bank.send("by_hand", 2, task_id="by-hand")

    assert bank.result("by-hand") == "paid"
    assert bank.attempts("by-hand") == [0, 1, 2]
    first, second = bank.waits("by-hand")
    assert BASE_SECONDS <= first < 2 * BASE_SECONDS <= second


def test_retry_by_hand_waits_the_fixed_delay_that_the_task_declares(bank: Bank) -> None:
    bank.send("by_hand_fixed", 2, task_id="by-hand-fixed")

    assert bank.result("by-hand-fixed") == "paid"
    assert min(bank.waits("by-hand-fixed")) >= 0.6


@pytest.mark.parametrize(("with_error", "exception"), [(True, "KeyError"), (False, "MaxRetriesExceededError")])
def test_retry_by_hand_that_finds_none_left_is_exhausted_whatever_the_task_lists(
    with_error: bool, exception: str, bank: Bank
) -> None:
    """The main process hears of it from the pool process: the task lists neither of these errors."""
    task_id = f"until-{exception}"
    bank.send("by_hand_until", 1, with_error, task_id=task_id)

    death = bank.death(task_id)

    assert (death.reason, death.exception, death.attempts) == ("exhausted", exception, 2)
    assert bank.attempts(task_id) == [0, 1]
    assert bank.state(task_id) == "FAILURE"
    assert type(bank.result(task_id)).__name__ == exception


def test_error_after_the_retries_were_used_up_is_not_retried_once_more(bank: Bank) -> None:
    bank.send("exhausted_by_catching", task_id="catching")

    death = bank.death("catching")

    assert (death.reason, death.exception, death.attempts) == ("exhausted", "OSError", 2)
    assert bank.attempts("catching") == [0, 1]


def test_task_without_a_limit_is_retried_until_it_succeeds(bank: Bank) -> None:
    bank.send("for_ever", 7, task_id="for-ever")

    assert bank.result("for-ever") == "paid"
    assert bank.attempts("for-ever") == list(range(8))


def test_retry_kwargs_go_with_every_retry(bank: Bank) -> None:
    bank.send("with_kwargs", task_id="kwargs")

    death = bank.death("kwargs")

    assert (death.reason, death.attempts, death.queue) == ("exhausted", 8, "slow")
    assert [entry.queue for entry in bank.entries("start", "kwargs")] == ["celery"] + ["slow"] * 7


@pytest.mark.parametrize("by_hand", [False, True], ids=["raised", "by hand"])
def test_no_retry_is_sent_for_what_is_too_old(by_hand: bool, bank: Bank) -> None:
    task_id = f"too-old-{by_hand}"
    bank.send("too_old", by_hand, task_id=task_id)

    death = bank.death(task_id)

    lived = bank.entries("start", task_id)[-1].at - bank.entries("start", task_id)[0].at
    assert (death.reason, death.exception) == ("exhausted", "KeyError" if by_hand else "ConnectionError")
    assert len(bank.attempts(task_id)) > 3
    # Its clock began a little before its first start; the cap of the wait is 0.5 s, and the machine is slow.
    assert 1 < lived < 2 + 0.5 + 3


@pytest.mark.parametrize("swallow", [False, True], ids=["throw=False", "swallowed"])
def test_retry_that_the_body_outlives_is_sent_when_it_has_ended(swallow: bool, bank: Bank) -> None:
    task_id = f"outlived-{swallow}"
    bank.send("without_throw", swallow, task_id=task_id)

    bank.wait("the last attempt ends", lambda: len(bank.entries("end", task_id)) == 3)

    starts, ends = bank.entries("start", task_id), bank.entries("end", task_id)
    assert [entry.retries for entry in starts] == [entry.retries for entry in ends] == [0, 1, 2]
    assert all(end.at < start.at for end, start in zip(ends, starts[1:], strict=False))
    # A result that is stored as a success stays, in Celery's backends.
    assert bank.result(task_id) == 0
    assert bank.dead(task_id) == []
