"""More retries than the budget allows wait longer, and all of them finish."""

from __future__ import annotations

from collections.abc import Callable

from integration.retries.crew import Bank

PER_SECOND = 1
AT_ONCE = 60 * PER_SECOND
OVER = 7
TASKS = [f"pay-{n}" for n in range(AT_ONCE + OVER)]


def test_retries_above_the_budget_wait_longer_but_none_is_lost(new_bank: Callable[[], Bank]) -> None:
    bank = new_bank()
    bank.settings = {"selfheal_retry_budget": f"0% + {PER_SECOND}/s"}
    worker = bank.start(concurrency=4)
    for task_id in TASKS:
        bank.send("fail_later", task_id=task_id)

    bank.wait_ended(TASKS)
    bank.wait_nothing_left()

    assert bank.counts("start") == {(task_id, retries): 1 for task_id in TASKS for retries in (0, 1)}
    over = int(bank.redis.hget(bank.keys.counters, "over_budget|bank.fail_later") or 0)
    # On a slow machine some tokens come back while the first retries are still being made.
    assert 0 < over <= OVER
    assert worker.log_text().count("parked: bank.fail_later") == over
    retried = sorted(entry.at for entry in bank.entries("start") if entry.retries == 1)
    for n in range(AT_ONCE, len(TASKS)):
        assert retried[n] - retried[0] >= (n - AT_ONCE) / PER_SECOND
