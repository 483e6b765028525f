"""The reaper restores what the dead held, once, in order, and tells each stall to one observer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from celery_selfheal import clock
from celery_selfheal import headers as names
from celery_selfheal.agents import reaper as reaper_module
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.agents.reaper import BATCH_SIZE, MAX_RESTORES_OF_A_MESSAGE, Reaper, SweepReport
from celery_selfheal.errors import StoreError
from celery_selfheal.leases.port import Outcome, Renewal, Stall, Start
from celery_selfheal.sessions.port import BeatAnswer, Census, Delivery, Peer, Session
from celery_selfheal.telemetry.events import Event, TaskRecovered, TaskStalled
from celery_selfheal.witness import ProcessIdentity

ME = Session(name="me", node="celery@me", identity=None)
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(autouse=True)
def _still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "utc_now", lambda: NOW)


def a_peer(name: str = "w1", *, pid: int | None = 1) -> Peer:
    identity = ProcessIdentity(host="h1", pid=pid, started="7") if pid else None
    return Peer(name=name, about=Session(name=name, node=f"celery@{name}", identity=identity).about())


def a_message(task_id: str, **headers: object) -> bytes:
    return json.dumps({"body": "W10=", "headers": {"id": task_id, "task": "shop.pay", **headers}}).encode()


def a_delivery(n: int, message: bytes | None = None, *, age: float = 5.0) -> Delivery:
    received_us = round((NOW.timestamp() - age) * 1e6) + n
    return Delivery(tag=f"w1/{n}", received_us=received_us, list_key="q", message=message or a_message(f"t{n}"))


def a_stall(task_id: str = "t1") -> Stall:
    return Stall(
        task_id=task_id, task_name="shop.pay", token="x", owner="celery@w1", age_seconds=3.0, unfinished_starts=2
    )


class World:
    """All stores of a fleet, and a log of what was asked of them."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.events: list[Event] = []
        self.lead = True
        self.grace = False
        self.expired: list[Peer] = []
        self.neighbours: list[Peer] = []
        self.gone: dict[int, bool | None] = {}
        self.condemned = True
        self.buried = True
        self.stalls: dict[str | None, list[Stall]] = {}
        self.deliveries: dict[str, list[Delivery]] = {}
        self.refused: set[str] = set()
        self.moved: list[tuple[Delivery, bytes]] = []
        self.overdue: list[tuple[Envelope, str]] = []

    # SessionStore

    def beat(
        self, session: Session, *, join: bool, starts: Sequence[Start] = (), tags: Sequence[str] = ()
    ) -> BeatAnswer:
        raise AssertionError("a reaper does not beat")

    def census(self, *, session: Session | None, lead_ms: int, limit: int) -> Census:
        self.log.append(("census", session.name if session else None, lead_ms, limit))
        return Census(lead=self.lead, grace=self.grace, expired=self.expired, neighbours=self.neighbours)

    def condemn(self, peer: Peer) -> bool:
        self.log.append(("condemn", peer.name))
        return self.condemned

    def bury(self, session: str, *, host: str) -> bool:
        self.log.append(("bury", session, host))
        return self.buried

    def leave(self, session: Session) -> None:
        raise AssertionError("a reaper stays")

    # LeaseStore

    def expire(self, *, session: str | None, limit: int) -> list[Stall]:
        self.log.append(("expire", session))
        stalls = self.stalls.get(session, [])
        page, self.stalls[session] = stalls[:limit], stalls[limit:]
        return page

    def acquire(self, start: Start) -> Outcome:
        raise AssertionError("a reaper starts nothing")

    def release(self, start: Start, **how: object) -> bool:
        raise AssertionError("a reaper starts nothing")

    def renew(self, starts: Sequence[Start]) -> list[Renewal]:
        raise AssertionError("a reaper starts nothing")

    def abandon(self, start: Start) -> int | None:
        raise AssertionError("a reaper has no children")

    # DeliveryStore

    def owned(self, session: str) -> list[Delivery]:
        return self.deliveries.get(session, [])

    def settle(self, delivery: Delivery, *, session: str, message: bytes, dead: bool, front: bool) -> bool:
        return self.settle_all([(delivery, message)], session=session, dead=dead, front=front)[0]

    def settle_all(
        self, moves: Sequence[tuple[Delivery, bytes]], *, session: str, dead: bool, front: bool
    ) -> list[bool]:
        assert dead, "a living session's deliveries are its own"
        assert front, "what was taken first is taken first again"
        self.log.append(("settle", session, len(moves)))
        done = [delivery.tag not in self.refused for delivery, _ in moves]
        self.moved += [move for move, is_moved in zip(moves, done, strict=True) if is_moved]
        return done

    # Unowned

    def restore_overdue(self, *, limit: int) -> list[tuple[Envelope, str]]:
        self.log.append(("unowned", limit))
        return self.overdue

    def steps(self) -> list[object]:
        return [entry[0] for entry in self.log]


class Graves:
    """A graveyard that notes who was buried."""

    def __init__(self) -> None:
        self.buried: list[str] = []

    def bury(self, envelope: Envelope, delivery: Delivery, *, owner: str) -> tuple[Delivery, bytes]:
        self.buried.append(f"{envelope.task_id} of {owner}")
        return replace(delivery, list_key="dlq"), b"dead"


@pytest.fixture
def world() -> World:
    return World()


def sweep(
    world: World,
    *,
    session: Session | None = ME,
    has_broker: bool = True,
    graves: Graves | None = None,
    is_gone: Callable[[ProcessIdentity], bool | None] | None = None,
) -> SweepReport:
    return Reaper(
        world,
        world,
        deliveries=world if has_broker else None,
        unowned=world if has_broker else None,
        graveyard=graves,
        session=lambda: session,
        lead=timedelta(seconds=4),
        tell=world.events.append,
        is_gone=is_gone or (lambda identity: world.gone.get(identity.pid, False)),
    ).sweep()


def test_quiet_fleet_costs_a_census_and_a_look_at_the_index(world: World) -> None:
    report = sweep(world)

    assert world.log == [("census", "me", 4_000, BATCH_SIZE), ("expire", None), ("unowned", BATCH_SIZE)]
    assert not report
    assert (report.led, report.unfinished) == (True, False)
    assert world.events == []


def test_follower_leaves_the_fleet_to_the_leader(world: World) -> None:
    world.lead = False

    report = sweep(world)

    assert world.steps() == ["census"]
    assert not report.led


def test_sweep_on_request_names_no_session(world: World) -> None:
    sweep(world, session=None)

    assert world.log[0] == ("census", None, 4_000, BATCH_SIZE)


def test_dead_session_loses_its_leases_then_its_messages_then_its_name(world: World) -> None:
    """A restored message must not meet the lease of its own dead start."""
    world.expired = [a_peer("w1")]
    world.deliveries = {"w1": [a_delivery(1)]}

    report = sweep(world)

    assert world.log[1:5] == [("expire", "w1"), ("settle", "w1", 1), ("bury", "w1", "h1"), ("expire", None)]
    assert (report.sessions, report.stalls, report.restored) == (1, 0, 1)
    assert report


def test_session_that_cannot_be_buried_is_not_counted(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.buried = False

    assert sweep(world).sessions == 0


def test_broker_that_redelivers_by_itself_has_nothing_restored(world: World) -> None:
    world.expired = [a_peer("w1")]

    report = sweep(world, has_broker=False)

    assert world.steps() == ["census", "expire", "bury", "expire"]
    assert report.sessions == 1


# -- the host's witness


def test_neighbour_whose_process_is_gone_is_healed_by_any_worker(world: World) -> None:
    world.lead = False
    world.neighbours = [a_peer("w1", pid=1), a_peer("w2", pid=2), a_peer("w3", pid=3)]
    world.gone = {1: True, 2: False, 3: None}

    sweep(world)

    assert world.log[1:] == [("condemn", "w1"), ("expire", "w1"), ("bury", "w1", "h1")]


def test_kernel_is_not_asked_about_a_session_without_identity(world: World) -> None:
    world.neighbours = [a_peer("w1", pid=None)]

    sweep(world, is_gone=lambda identity: pytest.fail("nobody to ask for"))

    assert "condemn" not in world.steps()


def test_neighbour_that_is_another_process_by_now_is_spared(world: World) -> None:
    world.neighbours = [a_peer("w1")]
    world.gone = {1: True}
    world.condemned = False

    sweep(world)

    assert ("expire", "w1") not in world.log


def test_dead_that_are_known_in_two_ways_are_healed_once(world: World) -> None:
    world.expired = world.neighbours = [a_peer("w1")]
    world.gone = {1: True}

    assert sweep(world).sessions == 1
    assert world.log.count(("expire", "w1")) == 1
    assert "condemn" not in world.steps()


# -- restores


def test_messages_are_pushed_newest_first_so_that_the_oldest_is_taken_next(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.deliveries = {"w1": [a_delivery(n) for n in range(5)]}

    sweep(world)

    assert [delivery.tag for delivery, _ in world.moved] == [f"w1/{n}" for n in reversed(range(5))]


def test_restores_go_in_pages(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.deliveries = {"w1": [a_delivery(n) for n in range(BATCH_SIZE * 2 + 1)]}

    report = sweep(world)

    assert [entry[2] for entry in world.log if entry[0] == "settle"] == [BATCH_SIZE, BATCH_SIZE, 1]
    assert (report.restored, report.unfinished) == (BATCH_SIZE * 2 + 1, False)


def test_sweep_with_too_much_to_do_asks_for_another_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat of this very thread has its turn in between."""
    monkeypatch.setattr(reaper_module, "MAX_RESTORES_A_SWEEP", 3)
    world.expired = [a_peer("w1")]
    world.deliveries = {"w1": [a_delivery(n) for n in range(5)]}

    report = sweep(world)

    assert (report.restored, report.unfinished) == (3, True)
    assert [delivery.tag for delivery, _ in world.moved] == ["w1/4", "w1/3", "w1/2"]


def test_restored_message_has_one_restore_more_and_keeps_its_expiry(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.deliveries = {"w1": [a_delivery(1, a_message("t1", expires="2026-01-02", **{names.RESTORES: 2}))]}

    sweep(world)

    headers = json.loads(world.moved[0][1])["headers"]
    assert (headers[names.RESTORES], headers["expires"], headers["redelivered"]) == (3, "2026-01-02", True)


def test_message_whose_body_had_begun_does_not_expire_any_more(world: World) -> None:
    """It began in time: an expired copy would write REVOKED over it and fail its chord."""
    world.expired = [a_peer("w1")]
    world.stalls = {"w1": [a_stall("t1")]}
    world.deliveries = {
        "w1": [a_delivery(n, a_message(f"t{n}", expires="2026-01-02")) for n in (1, 2)],
    }

    sweep(world)

    expires = {
        json.loads(message)["headers"]["id"]: json.loads(message)["headers"]["expires"] for _, message in world.moved
    }
    assert expires == {"t1": None, "t2": "2026-01-02"}


def test_recovery_is_told_with_its_age(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.stalls = {"w1": [a_stall("t1")]}
    world.deliveries = {"w1": [a_delivery(0, a_message("t1"), age=7.5), a_delivery(0, b"\xff no message", age=-1.0)]}

    sweep(world)

    recovered = [event for event in world.events if isinstance(event, TaskRecovered)]
    assert recovered[1] == TaskRecovered(
        task_name="shop.pay", task_id="t1", reason="worker gone", owner="celery@w1", age_seconds=7.5, started=True
    )
    assert (recovered[0].task_id, recovered[0].age_seconds, recovered[0].started) == ("", 0.0, False)


def test_message_that_another_sweep_has_restored_is_not_told(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.deliveries = {"w1": [a_delivery(n) for n in range(3)]}
    world.refused = {"w1/1"}

    report = sweep(world)

    assert report.restored == 2
    assert [event.task_id for event in world.events] == ["t2", "t0"]


def test_message_that_kills_every_worker_is_buried_at_last(world: World) -> None:
    graves = Graves()
    world.expired = [a_peer("w1")]
    limit = MAX_RESTORES_OF_A_MESSAGE
    world.deliveries = {
        "w1": [a_delivery(n, a_message(f"t{n}", **{names.RESTORES: limit - 1 + n})) for n in range(2)],
    }

    sweep(world, graves=graves)

    assert graves.buried == ["t1 of celery@w1"]
    assert [delivery.list_key for delivery, _ in world.moved] == ["dlq", "q"]


# -- stalls


def test_stall_is_told_with_its_reason(world: World) -> None:
    world.expired = [a_peer("w1")]
    world.stalls = {"w1": [a_stall("t1")], None: [a_stall("t2")]}

    report = sweep(world)

    assert report.stalls == 2
    assert world.events == [
        TaskStalled(
            task_name="shop.pay",
            task_id=task_id,
            reason=reason,
            owner="celery@w1",
            age_seconds=3.0,
            unfinished_starts=2,
        )
        for task_id, reason in (("t1", "worker gone"), ("t2", "lease ran out"))
    ]


@pytest.mark.parametrize("count", [BATCH_SIZE - 1, BATCH_SIZE, 2 * BATCH_SIZE + 1])
def test_all_pages_of_stalls_are_read(world: World, count: int) -> None:
    world.stalls = {None: [a_stall(f"t{n}") for n in range(count)]}

    assert sweep(world).stalls == count


def test_number_of_stalls_of_a_sweep_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "MAX_STALLS_A_SWEEP", 2 * BATCH_SIZE)
    world.stalls = {None: [a_stall(f"t{n}") for n in range(5 * BATCH_SIZE)]}

    assert sweep(world).stalls == 2 * BATCH_SIZE


def test_leases_that_ran_out_in_an_outage_are_no_stalls(world: World) -> None:
    """Nobody could renew; those who live take them again at their first beat."""
    world.grace = True
    world.stalls = {None: [a_stall()]}

    assert sweep(world).stalls == 0
    assert ("expire", None) not in world.log


# -- deliveries without owner


def test_overdue_deliveries_of_plain_workers_are_told(world: World) -> None:
    world.overdue = [(Envelope.decode(a_message("t1")), "kombu-tag")]

    report = sweep(world)

    assert report.restored == 1
    assert world.events == [
        TaskRecovered(
            task_name="shop.pay",
            task_id="t1",
            reason="visibility timeout",
            owner="kombu-tag",
            age_seconds=0,
            started=False,
        )
    ]


def test_no_answer_ends_the_sweep_and_what_is_done_is_done(world: World) -> None:
    world.expired = [a_peer("w1"), a_peer("w2")]
    world.deliveries = {name: [a_delivery(1)] for name in ("w1", "w2")}
    original = world.owned

    def owned(session: str) -> list[Delivery]:
        if session == "w2":
            raise StoreError("redis://test", "no connection")
        return original(session)

    world.owned = owned  # type: ignore[method-assign]  # a fault
    with pytest.raises(StoreError):
        sweep(world)

    assert len(world.moved) == 1
    assert ("bury", "w1", "h1") in world.log
