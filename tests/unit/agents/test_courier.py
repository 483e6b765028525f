"""The courier publishes what was left behind, in order, and lets nothing stand in the way of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from celery_selfheal.agents.outbox import ASIDE_SECONDS, FRESH, MAX_PAGES_A_STEP, PAGE_SIZE, Courier, Sent
from celery_selfheal.errors import StoreError
from celery_selfheal.telemetry.events import Event, MessageSetAside

OLD = FRESH * 2


@dataclass(frozen=True)
class FakeRow:
    id: int
    age: timedelta = OLD

    @property
    def message(self) -> str:
        return f"message {self.id}"

    @property
    def task_id(self) -> str:
        return f"task-{self.id}"


@dataclass
class FakeHold:
    rows: Sequence[FakeRow]
    removed: list[int] = field(default_factory=list)

    def remove(self, ids: Sequence[int]) -> None:
        self.removed += ids


class FakeOutbox:
    def __init__(self, rows: Sequence[FakeRow]) -> None:
        self.rows = list(rows)

    @contextmanager
    def hold(self, *, limit: int, older_than: timedelta, but_not: Sequence[int] = ()) -> Iterator[FakeHold]:
        found = [row for row in self.rows if row.age >= older_than and row.id not in but_not]
        held = FakeHold(found[:limit])
        # As a transaction: what raises leaves everything as it was.
        yield held
        self.rows = [row for row in self.rows if row.id not in held.removed]


class Scene:
    """A courier, what it has sent, and what it has told."""

    def __init__(self, *rows: FakeRow) -> None:
        self.outbox = FakeOutbox(rows)
        self.sent: list[str] = []
        self.told: list[Event] = []
        self.refused: dict[str, str] = {}
        self.now = 1000.0
        self.broker_answers = True
        self.courier = Courier(self.outbox, send=self._send, tell=self.told.append, now=lambda: self.now)

    def _send(self, messages: Sequence[str]) -> list[Sent]:
        if not self.broker_answers:
            raise StoreError("the broker", "refused")
        outcomes = [Sent(refusal=self.refused.get(one, ""), task_name="shop.pay") for one in messages]
        self.sent += [one for one, outcome in zip(messages, outcomes, strict=True) if not outcome.refusal]
        return outcomes


def test_what_is_sent_is_removed_oldest_first() -> None:
    scene = Scene(FakeRow(1), FakeRow(2), FakeRow(3))

    report = scene.courier.deliver()

    assert scene.sent == ["message 1", "message 2", "message 3"]
    assert (report.sent, report.set_aside, report.unfinished) == (3, 0, False)
    assert scene.outbox.rows == []


def test_a_fresh_row_is_left_to_whoever_wrote_it() -> None:
    scene = Scene(FakeRow(1, age=FRESH / 2), FakeRow(2))

    scene.courier.deliver()

    assert scene.sent == ["message 2"]
    assert [row.id for row in scene.outbox.rows] == [1]


def test_an_empty_outbox_asks_nothing_of_the_broker() -> None:
    scene = Scene()
    scene.broker_answers = False

    assert scene.courier.deliver().sent == 0


def test_a_poison_row_blocks_nobody_and_is_told_and_kept() -> None:
    scene = Scene(FakeRow(1), FakeRow(2), FakeRow(3))
    scene.refused = {"message 2": "no queue takes it"}

    report = scene.courier.deliver()

    assert scene.sent == ["message 1", "message 3"]
    assert report.set_aside == 1
    assert [row.id for row in scene.outbox.rows] == [2]
    assert scene.told == [
        MessageSetAside(
            task_name="shop.pay",
            task_id="task-2",
            reason="no queue takes it",
            owner="selfheal_outbox row 2",
            age_seconds=OLD.total_seconds(),
        )
    ]


def test_a_poison_row_is_tried_again_only_after_a_minute() -> None:
    scene = Scene(FakeRow(1))
    scene.refused = {"message 1": "no queue takes it"}
    scene.courier.deliver()
    scene.refused = {}

    scene.now += ASIDE_SECONDS / 2
    assert scene.courier.deliver().sent == 0
    scene.now += ASIDE_SECONDS

    assert scene.courier.deliver().sent == 1
    assert len(scene.told) == 1


def test_a_whole_page_of_poison_does_not_hide_the_rows_behind_it() -> None:
    scene = Scene(*(FakeRow(n) for n in range(PAGE_SIZE + 1)))
    scene.refused = {f"message {n}": "no" for n in range(PAGE_SIZE)}

    scene.courier.deliver()

    assert scene.sent == [f"message {PAGE_SIZE}"]


def test_many_rows_are_sent_in_bounded_pages_and_the_rest_is_asked_for_at_once() -> None:
    count = PAGE_SIZE * (MAX_PAGES_A_STEP + 1)
    scene = Scene(*(FakeRow(n) for n in range(count)))

    report = scene.courier.deliver()
    assert report.sent == PAGE_SIZE * MAX_PAGES_A_STEP
    assert report.unfinished

    assert not scene.courier.deliver().unfinished
    assert scene.sent == [f"message {n}" for n in range(count)]


def test_when_the_broker_does_not_answer_all_rows_stay() -> None:
    scene = Scene(FakeRow(1))
    scene.broker_answers = False
    with pytest.raises(StoreError):
        scene.courier.deliver()
    assert [row.id for row in scene.outbox.rows] == [1]
    assert scene.told == []

    scene.broker_answers = True

    assert scene.courier.deliver().sent == 1
