"""The heartbeat against stores that fail before or after their effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import pytest

from celery_selfheal.agents.heartbeat import Beat, Heartbeat
from celery_selfheal.errors import StoreError
from celery_selfheal.leases.memory import MemoryLeaseStore
from celery_selfheal.leases.port import Acquired, Busy, Renewal, Start
from celery_selfheal.sessions.port import BeatAnswer, Census, Peer, Session, Standing

TTL = timedelta(seconds=10)


class Faults:
    """Says which of the next calls fails, and when."""

    def __init__(self) -> None:
        self.before = 0
        self.after = 0

    def around(self, effect: Callable[[], object]) -> object:
        if self.before:
            self.before -= 1
            raise StoreError("redis://test", "no connection")
        result = effect()
        if self.after:
            self.after -= 1
            raise StoreError("redis://test", "reply lost")
        return result


class FakeSessions:
    """A session store of plain sets."""

    def __init__(self, leases: MemoryLeaseStore | None = None) -> None:
        self.faults = Faults()
        self.leases = leases
        self.alive: set[str] = set()
        self.listed: set[str] = set()
        self.owned: set[str] = set()
        self.epoch = "e1"
        self.calls: list[tuple[str, bool, list[Start], list[str]]] = []

    def beat(
        self, session: Session, *, join: bool, starts: Sequence[Start] = (), tags: Sequence[str] = ()
    ) -> BeatAnswer:
        self.calls.append((session.name, join, list(starts), list(tags)))

        def effect() -> BeatAnswer:
            if session.name in self.alive:
                standing = Standing.KEPT
            elif session.name in self.listed:
                standing = Standing.AGAIN
            else:
                standing = Standing.BEGUN if join else Standing.LOST
            if standing is not Standing.LOST:
                self.alive.add(session.name)
                self.listed.add(session.name)
            return BeatAnswer(
                standing=standing,
                epoch=self.epoch,
                renewals=self.leases.renew(starts) if self.leases else [],
                unknown_tags=sorted(self.owned - set(tags)),
            )

        answer = self.faults.around(effect)
        assert isinstance(answer, BeatAnswer)
        return answer

    def bury_all(self) -> None:
        self.alive.clear()
        self.listed.clear()

    def census(self, *, session: Session | None, lead_ms: int, limit: int) -> Census:
        raise AssertionError("a heartbeat judges nobody")

    def condemn(self, peer: Peer) -> bool:
        raise AssertionError("a heartbeat judges nobody")

    def bury(self, session: str, *, host: str) -> bool:
        raise AssertionError("a heartbeat judges nobody")

    def leave(self, session: Session) -> None:
        self.alive.discard(session.name)


class Holdings:
    """What the worker holds."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.known: list[str] = []

    def running(self) -> Sequence[Start]:
        return self.starts

    def tags(self) -> Iterable[str]:
        return iter(self.known)


class Rig:
    """A heartbeat on fakes."""

    def __init__(self, *, together: bool = True, deliveries: set[str] | None = None) -> None:
        self.leases = self.new_leases(deliveries)
        self.sessions = FakeSessions(self.leases if together else None)
        self.holdings = Holdings()
        self.made = 0
        self.heartbeat = Heartbeat(
            self.sessions, self.leases, self.holdings, new_session=self.new_session, together=together
        )

    def new_leases(self, deliveries: set[str] | None) -> MemoryLeaseStore:
        return MemoryLeaseStore(clock=lambda: 1_000.0, ttl=TTL, max_stalls=2, done_ttl=TTL, deliveries=deliveries)

    def new_session(self) -> Session:
        self.made += 1
        return Session(name=f"w1-{self.made}", node="w1", identity=None)

    def beat(self) -> Beat:
        return self.heartbeat.beat()

    def begin(self, start: Start) -> Start:
        assert isinstance(self.leases.acquire(start), Acquired)
        self.holdings.starts.append(start)
        return start

    def overtake(self, task_id: str) -> None:
        """Another worker takes the lease, since it has run out."""
        self.run_out(task_id)
        assert isinstance(self.leases.acquire(a_start(task_id, session="w2")), Acquired)

    def run_out(self, task_id: str) -> None:
        held = self.leases._tasks[task_id].lease
        assert held is not None
        held.expires = 0

    def empty(self) -> None:
        """The store loses everything."""
        self.leases._tasks.clear()
        self.leases._done.clear()
        self.sessions.bury_all()
        self.sessions.owned.clear()
        self.sessions.epoch = "e2"


def a_start(task_id: str = "t1", *, session: str = "w1-1", tag: str | None = None) -> Start:
    a_start.number += 1  # type: ignore[attr-defined]  # tokens differ
    return Start(
        task_id=task_id,
        task_name="shop.pay",
        token=f"token-{a_start.number}",  # type: ignore[attr-defined]  # as above
        session=session,
        attempt="shop.pay:0",
        marker=f"{task_id}:m1",
        tag=tag,
    )


a_start.number = 0  # type: ignore[attr-defined]  # as above


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_one_call_renews_session_leases_and_deliveries(rig: Rig) -> None:
    start = rig.begin(a_start())
    rig.holdings.known = ["w1-1/1", "w1-1/2"]
    rig.beat()

    assert rig.beat() == Beat()

    assert rig.sessions.calls[1:] == [("w1-1", False, [start], ["w1-1/1", "w1-1/2"])]


def test_leases_in_another_store_take_one_call_more() -> None:
    rig = Rig(together=False)
    rig.begin(a_start())
    rig.overtake("t1")
    rig.holdings.known = ["w1-1/1"]

    beat = rig.beat()

    assert beat.lost == rig.holdings.starts
    assert rig.sessions.calls == [("w1-1", True, [], ["w1-1/1"])]


def test_lease_store_that_is_away_fails_the_beat_of_an_idle_worker() -> None:
    """It must stop the fetching, or messages are taken that cannot be started."""
    rig = Rig(together=False)

    def away(starts: Sequence[Start]) -> list[Renewal]:
        raise StoreError("redis://leases", "no connection")

    rig.leases.renew = away  # type: ignore[method-assign]  # a fault

    with pytest.raises(StoreError):
        rig.beat()


def test_worker_joins_until_the_first_answer_and_stays_from_then_on(rig: Rig) -> None:
    rig.sessions.faults.before = 1
    with pytest.raises(StoreError):
        rig.beat()
    rig.sessions.faults.after = 1
    with pytest.raises(StoreError):
        rig.beat()

    rig.beat()
    rig.beat()

    assert [join for _, join, _, _ in rig.sessions.calls] == [True, True, True, False]
    assert rig.made == 1


def test_no_answer_is_no_loss(rig: Rig) -> None:
    rig.begin(a_start())
    rig.beat()
    session = rig.heartbeat.session
    for fault in ("before", "after"):
        setattr(rig.sessions.faults, fault, 1)
        with pytest.raises(StoreError):
            rig.beat()

    assert rig.beat() == Beat()
    assert rig.heartbeat.session == session


def test_session_that_ran_out_unnoticed_goes_on(rig: Rig) -> None:
    rig.beat()
    rig.sessions.alive.clear()

    assert rig.beat() == Beat()
    assert rig.made == 1


def test_buried_session_is_replaced_by_a_new_incarnation_that_has_joined(rig: Rig) -> None:
    rig.beat()
    rig.sessions.bury_all()

    beat = rig.beat()

    assert beat == Beat(session_lost=True)
    assert rig.heartbeat.session.name == "w1-2"
    assert rig.sessions.alive == {"w1-2"}
    assert rig.beat() == Beat()
    assert rig.made == 2


@pytest.mark.parametrize("fault", ["before", "after"])
def test_new_incarnation_that_could_not_join_is_replaced_at_the_next_beat(rig: Rig, fault: str) -> None:
    rig.beat()
    rig.sessions.bury_all()
    faults = rig.sessions.faults
    original = faults.around

    def second_call_fails(effect: Callable[[], object]) -> object:
        if len(rig.sessions.calls) == 3:
            setattr(faults, fault, 1)
        return original(effect)

    faults.around = second_call_fails  # type: ignore[method-assign]  # a fault of its own
    with pytest.raises(StoreError):
        rig.beat()

    rig.beat()

    assert rig.heartbeat.session.name in rig.sessions.alive
    assert rig.beat() == Beat()


def test_overtaken_starts_are_told_and_no_others(rig: Rig) -> None:
    held, lost, ended = rig.begin(a_start("t1")), rig.begin(a_start("t2")), rig.begin(a_start("t3"))
    rig.holdings.starts.append(a_start("t4"))
    rig.leases.release(ended, ended=True, marker=True, state="success")
    rig.overtake("t2")

    assert rig.beat().lost == [lost]
    assert rig.beat().lost == [lost], "the worker knows whom it has told"
    assert held in rig.holdings.starts


def test_lease_that_ran_out_in_an_outage_is_held_again(rig: Rig) -> None:
    start = rig.begin(a_start())
    rig.beat()
    rig.run_out("t1")

    assert rig.beat() == Beat()
    assert isinstance(rig.leases.acquire(a_start()), Busy)
    assert isinstance(rig.leases.acquire(start), Acquired)


# -- deliveries that nobody knows


def test_delivery_is_forgotten_when_it_is_unknown_for_two_beats(rig: Rig) -> None:
    """Was V3."""
    rig.sessions.owned = {"w1-1/1", "w1-1/2"}
    rig.holdings.known = ["w1-1/2"]

    assert [rig.beat().forgotten, rig.beat().forgotten] == [[], ["w1-1/1"]]


def test_delivery_that_comes_while_a_beat_is_under_way_is_not_forgotten(rig: Rig) -> None:
    rig.sessions.owned = {"w1-1/1"}
    rig.beat()
    rig.holdings.known = ["w1-1/1"]
    rig.sessions.owned.add("w1-1/2")

    assert rig.beat().forgotten == []
    rig.holdings.known.append("w1-1/2")
    assert rig.beat().forgotten == []


def test_delivery_that_is_known_again_starts_anew(rig: Rig) -> None:
    rig.sessions.owned = {"w1-1/1"}
    rig.beat()
    rig.holdings.known = ["w1-1/1"]
    rig.beat()
    rig.holdings.known = []

    assert [rig.beat().forgotten, rig.beat().forgotten] == [[], ["w1-1/1"]]


def test_beat_without_an_answer_counts_for_nothing(rig: Rig) -> None:
    rig.sessions.owned = {"w1-1/1"}
    rig.beat()
    rig.sessions.faults.after = 1
    with pytest.raises(StoreError):
        rig.beat()

    assert rig.beat().forgotten == ["w1-1/1"]


def test_forgotten_delivery_is_told_until_it_is_settled(rig: Rig) -> None:
    """What is done about it may fail, too."""
    rig.sessions.owned = {"w1-1/1"}
    rig.beat()

    assert [rig.beat().forgotten, rig.beat().forgotten] == [["w1-1/1"], ["w1-1/1"]]
    rig.sessions.owned.clear()
    assert rig.beat().forgotten == []


# -- an emptied store


def test_first_beat_finds_no_store_emptied(rig: Rig) -> None:
    rig.sessions.epoch = "whatever"

    assert not rig.beat().emptied


def test_emptied_store_is_told_once(rig: Rig) -> None:
    rig.beat()
    rig.empty()

    assert rig.beat() == Beat(session_lost=True, emptied=True)
    assert rig.beat() == Beat()


def test_what_runs_takes_its_lease_again_from_an_emptied_store(rig: Rig) -> None:
    start = rig.begin(a_start())
    rig.beat()
    rig.empty()

    beat = rig.beat()

    assert beat.lost == []
    assert isinstance(rig.leases.acquire(a_start()), Busy)
    assert rig.leases.release(start, ended=True, marker=True, state="success")


def test_what_runs_takes_its_lease_again_though_its_delivery_is_lost_with_the_store() -> None:
    deliveries = {"w1-1/1"}
    rig = Rig(deliveries=deliveries)
    rig.begin(a_start(tag="w1-1/1"))
    rig.beat()
    deliveries.clear()
    rig.empty()

    rig.beat()

    assert isinstance(rig.leases.acquire(a_start()), Busy)


@pytest.mark.parametrize("fault", ["before", "after"])
def test_lease_that_could_not_be_taken_again_is_taken_at_the_next_beat(rig: Rig, fault: str) -> None:
    rig.begin(a_start("t1"))
    rig.begin(a_start("t2"))
    rig.beat()
    rig.empty()
    faults, acquire = Faults(), rig.leases.acquire
    setattr(faults, fault, 1)
    rig.leases.acquire = lambda start: faults.around(lambda: acquire(start))  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(StoreError):
        rig.beat()

    rig.beat()

    for task_id in ("t1", "t2"):
        assert isinstance(rig.leases.acquire(a_start(task_id)), Busy)


def test_start_that_ended_meanwhile_takes_no_lease_from_an_emptied_store(rig: Rig) -> None:
    start = rig.begin(a_start())
    rig.beat()
    rig.empty()
    rig.leases.acquire(start)
    rig.leases.release(start, ended=True, marker=True, state="success")

    rig.beat()

    assert rig.leases._task("t1").lease is None


# -- good-bye


def test_good_bye_ends_the_session(rig: Rig) -> None:
    rig.beat()

    rig.heartbeat.leave()

    assert rig.sessions.alive == set()


def test_worker_that_never_joined_says_no_good_bye(rig: Rig) -> None:
    rig.sessions.leave = lambda session: pytest.fail("there is nothing to leave")  # type: ignore[method-assign]

    rig.heartbeat.leave()
