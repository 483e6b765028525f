"""``autoretry_for=(Exception,)`` retries failures, and nothing that is none (field report C49)."""

from __future__ import annotations

import pytest

from integration.retries.crew import Bank


@pytest.mark.parametrize(
    ("how", "state", "reason"),
    [
        ("reject", "FAILURE", "rejected"),
        ("unrecoverable", "FAILURE", "unrecoverable"),
        ("ignore", "PENDING", ""),
        ("retry", "RETRY", ""),
        ("return", "SUCCESS", ""),
    ],
)
def test_each_way_to_leave_a_body_runs_it_once_and_takes_its_own_route(
    how: str, state: str, reason: str, bank: Bank
) -> None:
    bank.send("leave", how, task_id=how)
    bank.wait(f"{how} starts", lambda: bank.attempts(how))
    if reason:
        assert bank.death(how).reason == reason
    bank.wait("its delivery is settled", lambda: how not in str(bank.redis.hgetall("unacked")))
    bank.wait("its result is there", lambda: bank.state(how) == state)

    # A retry would come within a tenth of a second; a second start is what must not happen.
    bank.send("tell", task_id=f"after-{how}", countdown=0.5)
    bank.wait("a later task has started", lambda: bank.attempts(f"after-{how}"))
    assert bank.attempts(how) == [0]
    assert bank.state(how) == state
    assert [death.reason for death, _ in bank.dead(how)] == ([reason] if reason else [])


def test_message_that_is_requeued_runs_again_as_the_same_attempt(bank: Bank) -> None:
    bank.send("leave", "requeue", task_id="requeue")

    assert bank.result("requeue") == "requeue"
    assert bank.attempts("requeue") == [0, 0]
    assert bank.dead("requeue") == []
