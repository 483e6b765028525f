"""Random lives of two tasks, two sessions and many starts, against a plain-dict model; any reply may be lost."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from celery_selfheal.leases.port import (
    Acquired,
    AlreadyDone,
    Busy,
    NotMine,
    Renewal,
    StalledOut,
    Start,
)
from contract.benches import MAX_STALLS, LeaseBench, MemoryBench, Picture, RedisBench, a_start, a_tag
from contract.postgres_bench import PostgresBench, empty

TASKS = ("t1", "t2")
SESSIONS = ("w1", "w2")
EVENTS = ("starts", "stalls", "success", "handed-over")

LOTS = 100
EXAMPLES_VARIABLE = "SELFHEAL_TEST_EXAMPLES"


@dataclass(slots=True)
class Task:
    """What is true of one task.

    Attributes:
        holder: Start that has the lease.
        journal: Unfinished starts, oldest first; before them those whose process died before it could acquire.
        inflight: Start that the reaper would take for stalled if the lease ran out.
    """

    holder: Start | None = None
    journal: list[str] = field(default_factory=list)
    inflight: Start | None = None


class Model:
    """The contract once more, without a clock: everything runs out when the machine says so."""

    def __init__(self) -> None:
        self.tasks = {task_id: Task() for task_id in TASKS}
        self.markers: dict[str, str] = {}
        self.owned: set[str] = set()
        self.dead: set[str] = set()
        self.unborn: set[str] = set()
        self.counted: Counter[str] = Counter()

    def acquire(self, start: Start) -> tuple[str, int | str, str | None]:
        task = self.tasks[start.task_id]
        stalls = sum(token != start.token for token in task.journal)
        if start.tag and start.token not in self.owned:
            return "not mine", 0, None
        if task.holder == start:
            return ("stalled" if stalls > MAX_STALLS else "held"), stalls, None
        if start.marker in self.markers:
            return "done", 0, None
        follows = start.predecessor is not None and (
            task.holder.token == start.predecessor if task.holder else start.predecessor in task.journal
        )
        if task.holder and not follows:
            return "busy", task.holder.attempt, None
        overtaken = None
        if follows:
            task.journal.clear()
            stalls = 0
        elif task.inflight not in (None, start):
            overtaken = task.inflight
            self.counted["stalls"] += 1
        task.holder = task.inflight = start
        if stalls > MAX_STALLS:
            return "stalled", stalls, overtaken.token if overtaken else None
        if start.token in task.journal:
            task.journal.remove(start.token)
        task.journal.append(start.token)
        self.counted["starts"] += 1
        return "held", stalls, overtaken.token if overtaken else None

    def release(self, start: Start, *, ended: bool, marker: bool, acknowledge: bool, state: str) -> bool:
        task = self.tasks[start.task_id]
        if not self.is_last_holder(start):
            if start.token in task.journal:
                task.journal.remove(start.token)
            return task.holder is None and self.markers.get(start.marker, start.token) == start.token
        task.holder = None
        if ended:
            task.journal.clear()
        elif start.token in task.journal:
            task.journal.remove(start.token)
        if marker:
            self.markers[start.marker] = start.token
        if task.inflight == start:
            task.inflight = None
        if acknowledge:
            self.owned.discard(start.token)
        self.counted[state] += 1
        return True

    def renew(self, start: Start) -> Renewal:
        task = self.tasks[start.task_id]
        if self.is_last_holder(start):
            task.holder = start
            task.inflight = task.inflight or start
            return Renewal.HELD
        return Renewal.LOST if start.token in task.journal else Renewal.IDLE

    def abandon(self, start: Start) -> int | None:
        if self.markers.get(start.marker) == start.token:
            return None
        task = self.tasks[start.task_id]
        is_new = start.token not in task.journal
        if is_new or task.inflight == start:
            self.counted["stalls"] += 1
        if is_new:
            # It held nothing, so it is no later start than those that did.
            self.unborn.add(start.token)
            task.journal.insert(sum(token in self.unborn for token in task.journal), start.token)
        self.dead.add(start.token)
        if task.holder == start:
            task.holder = None
        if task.inflight == start:
            task.inflight = None
        return len(task.journal)

    def expire(self, session: str | None) -> set[tuple[str, str, int]]:
        told = set()
        for task_id, task in self.tasks.items():
            start = task.inflight
            if start is None or (task.holder if session is None else start.session != session):
                continue
            if task.holder == start:
                task.holder = None
            task.inflight = None
            self.counted["stalls"] += 1
            told.add((task_id, start.token, len(task.journal)))
        return told

    def is_last_holder(self, start: Start) -> bool:
        task = self.tasks[start.task_id]
        return task.holder == start or (task.holder is None and task.journal[-1:] == [start.token])


class LeaseMachine(RuleBasedStateMachine):
    """Two workers, a reaper and bad luck."""

    starts: Bundle[Start] = Bundle("starts")

    def __init__(self, bench: LeaseBench, *, knows_deliveries: bool = True) -> None:
        super().__init__()
        self.knows_deliveries = knows_deliveries
        self.bench = bench
        self.model = Model()
        self.known: dict[str, Start] = {}
        self.fences: dict[str, int] = {}
        self.last_fence = 0

    # -- what workers do

    @rule(
        target=starts,
        task_id=st.sampled_from(("t1", "t1", "t1", "t2")),
        session=st.sampled_from(SESSIONS),
        retries=st.sampled_from((0, 0, 1)),
        has_delivery=st.sampled_from((False, False, True)),
        begins=st.sampled_from((True, True, False)),
        stalls=st.booleans(),
        chance=st.randoms(use_true_random=False),
    )
    def receive(
        self, task_id: str, session: str, retries: int, has_delivery: bool, begins: bool, stalls: bool, chance: Any
    ) -> Start:
        earlier = [start for start in self.known.values() if start.task_id == task_id]
        start = a_start(
            task_id,
            session=session,
            retries=retries,
            after=chance.choice(earlier) if retries and earlier else None,
            tag=a_tag(session) if has_delivery and self.knows_deliveries else None,
        )
        self.known[start.token] = start
        if start.tag:
            self.bench.deliver(start)
            self.model.owned.add(start.token)
        if begins:
            self.begin(start, reply_is_lost=False)
            if stalls:
                self.lease_of_runs_out(task_id)
        return start

    @rule(start=starts, reply_is_lost=st.booleans())
    def acquire(self, start: Start, reply_is_lost: bool) -> None:
        if start.token not in self.model.dead:
            self.begin(start, reply_is_lost=reply_is_lost)

    def begin(self, start: Start, *, reply_is_lost: bool) -> None:
        had_lease = self.model.tasks[start.task_id].holder == start
        state, detail, overtaken = self.model.acquire(start)
        if reply_is_lost:
            self.bench.store.acquire(start)

        outcome = self.bench.store.acquire(start)

        match outcome:
            case Acquired():
                assert (state, detail) == ("held", outcome.stalls)
                told = outcome.overtaken.token if outcome.overtaken else None
                assert told == (None if reply_is_lost else overtaken)
            case StalledOut():
                assert (state, detail) == ("stalled", outcome.stalls)
            case Busy():
                # A lease that was taken again has forgotten which attempt it was.
                assert state == "busy"
                assert outcome.attempt in ("", detail)
            case AlreadyDone():
                assert state == "done"
            case NotMine():
                assert state == "not mine"
        if isinstance(outcome, (Acquired, StalledOut)):
            assert outcome.lease.token == start.token
            if had_lease:
                assert outcome.lease.fence == self.fences[start.token]
            else:
                assert outcome.lease.fence > self.last_fence
                self.fences[start.token] = self.last_fence = outcome.lease.fence

    @rule(
        start=starts,
        ended=st.booleans(),
        marker=st.booleans(),
        acknowledge=st.booleans(),
        reply_is_lost=st.booleans(),
    )
    def release(self, start: Start, ended: bool, marker: bool, acknowledge: bool, reply_is_lost: bool) -> None:
        how: dict[str, Any] = {
            "ended": ended,
            "marker": marker and ended,
            "acknowledge": acknowledge and ended and start.tag is not None,
            "state": "success" if ended else "handed-over",
        }
        expected = self.model.release(start, **how)
        if reply_is_lost:
            self.bench.store.release(start, **how)
            # Its successors decide what the repeat is told: nothing hangs on it.
            assert self.bench.store.release(start, **how) in (expected, self.model.release(start, **how))
        else:
            assert self.bench.store.release(start, **how) == expected

    @rule(session=st.sampled_from(SESSIONS), reply_is_lost=st.booleans())
    def renew(self, session: str, reply_is_lost: bool) -> None:
        living = [start for start in self.known.values() if start.token not in self.model.dead]
        starts = [start for start in living if start.session == session]
        if reply_is_lost:
            self.bench.store.renew(starts)
            for start in starts:
                self.model.renew(start)

        assert self.bench.store.renew(starts) == [self.model.renew(start) for start in starts]

    @rule(start=starts, reply_is_lost=st.booleans())
    def abandon(self, start: Start, reply_is_lost: bool) -> None:
        expected = self.model.abandon(start)
        if reply_is_lost:
            self.bench.store.abandon(start)

        assert self.bench.store.abandon(start) == expected

    # -- what the reaper does

    @rule(session=st.none() | st.sampled_from(SESSIONS), reply_is_lost=st.booleans())
    def expire(self, session: str | None, reply_is_lost: bool) -> None:
        expected = self.model.expire(session)
        if reply_is_lost:
            self.bench.store.expire(session=session, limit=LOTS)
            expected = set()

        stalls = self.bench.store.expire(session=session, limit=LOTS)

        assert {(stall.task_id, stall.token, stall.unfinished_starts) for stall in stalls} == expected
        assert len(stalls) == len(expected)

    # -- bad luck

    @precondition(lambda self: any(task.holder for task in self.model.tasks.values()))
    @rule(chance=st.randoms(use_true_random=False))
    def lease_runs_out(self, chance: Any) -> None:
        self.lease_of_runs_out(chance.choice([task_id for task_id, task in self.model.tasks.items() if task.holder]))

    def lease_of_runs_out(self, task_id: str) -> None:
        self.model.tasks[task_id].holder = None
        self.bench.run_out(task_id)

    @precondition(lambda self: self.model.markers)
    @rule(chance=st.randoms(use_true_random=False))
    def marker_runs_out(self, chance: Any) -> None:
        marker = chance.choice(sorted(self.model.markers))
        del self.model.markers[marker]
        self.bench.lose_marker(marker)

    @precondition(lambda self: self.model.owned)
    @rule(chance=st.randoms(use_true_random=False))
    def delivery_is_restored(self, chance: Any) -> None:
        token = chance.choice(sorted(self.model.owned))
        self.model.owned.discard(token)
        self.bench.take_away(self.known[token])

    # -- what must be true at any time

    @invariant()
    def store_agrees_with_the_model(self) -> None:
        tasks = [self.model.tasks[task_id] for task_id in TASKS]
        assert self.bench.look(TASKS, EVENTS) == Picture(
            holders=[task.holder.token if task.holder else None for task in tasks],
            unfinished=[set(task.journal) for task in tasks],
            counts=[self.model.counted[event] for event in EVENTS],
            owned_tags={str(self.known[token].tag) for token in self.model.owned},
        )


@pytest.mark.timeout(900)  # when it fails it looks for the shortest life that does
@pytest.mark.parametrize("kind", ["memory", "redis", "postgres"])
def test_store_behaves_as_the_model_whatever_happens(kind: str, request: pytest.FixtureRequest) -> None:
    """Also when every call is made twice, since its first reply was lost."""
    run_state_machine_as_test(
        lambda: LeaseMachine(_fresh_bench(kind, request), knows_deliveries=kind != "postgres"),
        settings=settings(
            max_examples=int(os.environ.get(EXAMPLES_VARIABLE) or 30),
            stateful_step_count=30,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _fresh_bench(kind: str, request: pytest.FixtureRequest) -> LeaseBench:
    if kind == "memory":
        return MemoryBench()
    if kind == "postgres":
        engine: sa.Engine = request.getfixturevalue("engine")
        empty(engine)
        return PostgresBench(engine)
    client: redis.Redis = request.getfixturevalue("client")
    client.flushdb()
    return RedisBench(client)
