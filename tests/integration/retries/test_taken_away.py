"""A worker is taken for dead while a body runs that fails when it comes back."""

from __future__ import annotations

from collections.abc import Callable

from integration.retries.crew import Bank


def test_retry_of_an_attempt_that_was_taken_away_is_left_to_whoever_has_the_message(
    new_bank: Callable[[], Bank],
) -> None:
    """The late failure sends nothing, so it must not leave the word that all is done either."""
    bank = new_bank()
    bank.settings = {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 1, "selfheal_reaper_interval": 0.5}
    # With one process a worker cannot take its own message again before the first body has ended.
    first = bank.start("w1", concurrency=1, queues="celery")
    bank.start("w2", concurrency=1, queues="slow")
    gate = bank.folder / "gate"
    bank.send("pay", 1, str(gate), task_id="pay")
    bank.wait("it runs", lambda: bank.attempts("pay"))

    first.pause()
    bank.wait("the message is back in its queue", lambda: bank.redis.llen("celery"))
    gate.touch()
    first.resume()

    bank.wait_ended(["pay"])
    bank.wait_nothing_left()
    assert bank.attempts("pay") == [0, 0, 1]
    assert bank.result("pay") == "paid"
