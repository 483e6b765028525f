"""A replay keeps its rate, its limits and its promise to settle what it has sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone

import pytest

from celery_selfheal.agents.dead_letters import DeadLetter, Entry, Filters, Outcome
from celery_selfheal.agents.replay import CATCH_UP_SECONDS, Pace, Replayer, ReplayReport, deferred_interrupt

NOW = datetime(2026, 7, 1, tzinfo=timezone.utc)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class ListStore:
    """Dead letters in a list; ``outcomes`` tells for which ids a replay does not go through."""

    def __init__(self, letters: Sequence[DeadLetter], *, page: int = 7) -> None:
        self.letters = list(letters)
        self.sent: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.pages_read = 0
        self._page = page

    def __len__(self) -> int:
        return len(self.letters)

    @contextmanager
    def reading(self) -> Iterator[ListStore]:
        yield self

    def pages(self) -> Iterator[list[Entry]]:
        letters = list(self.letters)
        for first in range(0, len(letters), self._page):
            self.pages_read += 1
            yield [Entry(b"", letter, None) for letter in letters[first : first + self._page]]

    def replay(self, entries: Sequence[Entry]) -> list[Outcome]:
        found = [self.outcomes.get(entry.letter.id, Outcome.MOVED) for entry in entries]
        self.sent += [
            entry.letter.id for entry, outcome in zip(entries, found, strict=True) if outcome is Outcome.MOVED
        ]
        return found

    def drop(self, entries: Sequence[Entry]) -> list[Outcome]:
        raise AssertionError("a replay drops nothing")


def letters(count: int, *, replays: int = 0, queue: str = "orders") -> list[DeadLetter]:
    return [
        DeadLetter(id=f"a{n}", task="shop.charge", reason="exhausted", replays=replays, queue=queue, message={})
        for n in range(count)
    ]


def replayer(store: ListStore, clock: FakeClock | None = None, forgotten: list[str] | None = None) -> Replayer:
    clock = clock or FakeClock()
    return Replayer(
        store,
        max_replays=3,
        forget=(forgotten if forgotten is not None else []).extend,
        by="tester",
        clock=clock,
        sleep=clock.sleep,
    )


@pytest.mark.parametrize("rate", [0.1, 3, 19, 21, 500, 100_000])
def test_entries_go_at_the_rate_and_never_before_they_are_due(rate: float) -> None:
    clock = FakeClock()
    pace = Pace(rate, clock=clock, sleep=clock.sleep)
    sent = 0

    while sent < 1000:
        sent += pace.wait(limit=1000 - sent)
        # The first goes at once, and each of the others when it is due.
        assert sent - 1 <= (clock.now - 100) * rate + 1e-6

    assert clock.now - 100 == pytest.approx(999 / rate, rel=0.02, abs=0.06)


def test_a_slow_broker_is_made_good_for_a_second_at_most() -> None:
    clock = FakeClock()
    pace = Pace(10, clock=clock, sleep=clock.sleep)
    pace.wait(limit=1)

    clock.now += 60

    assert pace.wait(limit=1000) == pytest.approx(10 * CATCH_UP_SECONDS, abs=1)


def test_without_a_rate_everything_goes_at_once() -> None:
    def never(seconds: float) -> None:
        raise AssertionError("it must not wait")

    assert Pace(None, clock=FakeClock(), sleep=never).wait(limit=100) == 100


def test_all_that_is_meant_is_replayed_once_and_in_order() -> None:
    store, forgotten = ListStore(letters(20)), list[str]()

    report = replayer(store, forgotten=forgotten).run(Filters(), now=NOW)

    assert store.sent == forgotten == [f"a{n}" for n in range(20)]
    assert (report.replayed, report.matched, report.is_complete) == (20, 20, True)


def test_a_limit_ends_the_reading_as_well() -> None:
    store = ListStore(letters(100))

    report = replayer(store).run(Filters(), now=NOW, limit=9)

    assert store.sent == [f"a{n}" for n in range(9)]
    assert (report.replayed, store.pages_read) == (9, 2)


def test_what_was_replayed_too_often_needs_force() -> None:
    store = ListStore([*letters(2, replays=3), *letters(1)])

    report = replayer(store).run(Filters(), now=NOW)
    forced = replayer(store).run(Filters(), now=NOW, force=True)

    assert (report.replayed, report.refused, report.is_complete) == (1, 2, False)
    assert (forced.replayed, forced.refused) == (3, 0)


def test_what_cannot_go_back_stays_and_is_told() -> None:
    store = ListStore([*letters(3), *letters(1, queue="")])
    store.outcomes = {"a1": Outcome.UNROUTABLE, "a2": Outcome.GONE}

    report = replayer(store).run(Filters(), now=NOW)

    assert report == ReplayReport(replayed=1, refused=0, unroutable=2, gone=1)
    assert not report.is_complete


def test_a_dry_run_counts_without_waiting_sending_or_forgetting() -> None:
    store, clock, forgotten = ListStore(letters(20)), FakeClock(), list[str]()

    report = replayer(store, clock, forgotten).run(Filters(), now=NOW, rate=1, dry_run=True)

    assert report.replayed == 20
    assert (store.sent, forgotten, clock.now) == ([], [], 100.0)


def test_each_replay_leaves_a_line_that_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    letter = DeadLetter(id="a1\nreplayed by root", task="shop.charge", reason="exhausted", queue="orders", message={})

    with caplog.at_level("INFO", logger="celery_selfheal.dlq"):
        replayer(ListStore([letter])).run(Filters(), now=NOW)

    (line,) = caplog.messages
    assert line.startswith("replayed by tester: shop.charge[a1\\nreplayed by root]")
    assert line.endswith("to orders, replay 1")


def test_ctrl_c_waits_until_what_was_sent_is_settled() -> None:
    settled = False

    def press_and_settle() -> None:
        nonlocal settled
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            settled = True

    with pytest.raises(KeyboardInterrupt):
        press_and_settle()

    assert settled


def test_an_error_is_not_hidden_by_ctrl_c() -> None:
    with pytest.raises(OSError, match="cut"), deferred_interrupt():
        raise OSError("cut")

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
