"""Two tasks under one lock key never both commit overlapping work, whatever is paused."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from integration.effects.office import Office


@pytest.fixture
def bank(redis_office: Office) -> Office:
    redis_office.settings.update(selfheal_lease_ttl=3, selfheal_heartbeat_interval=1)
    return redis_office


def test_paused_holder_cannot_commit_when_another_task_had_the_key(bank: Office) -> None:
    sleeper = bank.start("sleeper")
    gate = bank.gate("first")
    first = bank.ledger.book_to.apply_async(("account", 1), task_id="first")
    bank.wait("it has written", lambda: bank.diary("written", "first"))
    bank.start("other", concurrency=2)
    second = bank.ledger.book_to.apply_async(("account", 2), task_id="second")

    sleeper.pause()
    gate.unlink()
    assert bank.results([first, second]) == [1, 2]
    assert bank.entries() == Counter(["first", "second"])
    sleeper.resume()

    bank.wait("it has woken", lambda: "session lost" in bank.log("sleeper"))
    bank.wait("its body has ended", lambda: len(bank.diary("end", "first")) == 2 or bank.is_idle())
    assert bank.entries() == Counter(["first", "second"])
    assert "ended the connection of an earlier start that is gone" in bank.log("other")


def test_tasks_of_one_key_do_not_overlap(bank: Office) -> None:
    bank.start("w1", concurrency=4, prefetch=1)
    bank.start("w2", concurrency=4, prefetch=1)

    sent = [bank.ledger.book_to.delay("account", n) for n in range(12)]

    assert bank.results(sent) == list(range(12))
    spans = sorted(
        (begin["at"], end["at"])
        for begin in bank.diary("start")
        for end in bank.diary("end")
        if begin["id"] == end["id"] and begin["pid"] == end["pid"]
    )
    assert len(spans) == 12
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans))
