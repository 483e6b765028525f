"""The heartbeat on real stores: one call a beat, and what runs is held whatever the store has lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import redis
import sqlalchemy as sa

from celery_selfheal.agents.heartbeat import Heartbeat
from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import Acquired, Busy, LeaseStore, Start
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.sessions.port import Session
from celery_selfheal.sessions.postgres import PostgresSessionStore
from celery_selfheal.sessions.redis import RedisSessionStore
from celery_selfheal.testing import RedisServer
from contract.benches import (
    ADDRESS,
    DONE_TTL,
    KEYS,
    MAX_STALLS,
    TTL,
    UNACKED,
    Broker,
    RedisBench,
    a_start,
    commands,
    time_passes,
)
from contract.postgres_bench import PostgresBench, empty, postgres_time_passes, statements


class Holdings:
    """What a worker holds."""

    def __init__(self) -> None:
        self.starts: list[Start] = []

    def running(self) -> Sequence[Start]:
        return self.starts

    def tags(self) -> Iterable[str]:
        return [start.tag for start in self.starts if start.tag]


class Rig:
    """A worker with its heartbeat; leases live beside the sessions, or in a database of their own."""

    def __init__(self, client: redis.Redis, keys: Keys, *, lease_client: redis.Redis | None = None) -> None:
        self.client = client
        self.keys = keys
        self.broker = Broker(client)
        self.holdings = Holdings()
        self.made = 0
        self.leases: LeaseStore = RedisLeaseStore(
            lease_client or client,
            keys,
            ttl=TTL,
            max_stalls=MAX_STALLS,
            done_ttl=DONE_TTL,
            address=ADDRESS,
            unacked=None if lease_client else UNACKED,
        )
        self.heartbeat = Heartbeat(
            RedisSessionStore(client, keys, ttl=TTL, address=ADDRESS, unacked=UNACKED),
            self.leases,
            self.holdings,
            new_session=self.new_session,
            together=lease_client is None,
        )
        self.heartbeat.beat()

    def new_session(self) -> Session:
        self.made += 1
        return Session(name=f"w{self.made}", node="celery@w", identity=None)

    def begin(self, *task_ids: str) -> None:
        for task_id in task_ids:
            self.broker.publish(b"{}")
            session = self.heartbeat.session.name
            start = a_start(task_id, session=session, tag=self.broker.take(session=session))
            assert isinstance(self.leases.acquire(start), Acquired)
            self.holdings.starts.append(start)

    def time_passes(self, duration: timedelta) -> None:
        time_passes(self.client, duration)

    def forget_all(self) -> None:
        self.client.flushdb()

    def is_busy(self, task_id: str) -> bool:
        return isinstance(self.leases.acquire(a_start(task_id, session="other")), Busy)


class PostgresRig(Rig):
    """A worker of a broker that redelivers by itself; leases and session live in PostgreSQL."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.holdings = Holdings()
        self.made = 0
        bench = PostgresBench(engine)
        self.leases = bench.store
        self.heartbeat = Heartbeat(
            PostgresSessionStore(bench.functions, KEYS, ttl=TTL),
            self.leases,
            self.holdings,
            new_session=self.new_session,
            together=True,
        )
        self.heartbeat.beat()

    def begin(self, *task_ids: str) -> None:
        for task_id in task_ids:
            start = a_start(task_id, session=self.heartbeat.session.name)
            assert isinstance(self.leases.acquire(start), Acquired)
            self.holdings.starts.append(start)

    def time_passes(self, duration: timedelta) -> None:
        postgres_time_passes(self.engine, duration)

    def forget_all(self) -> None:
        empty(self.engine)


@pytest.fixture(params=["redis", "postgres"])
def rig(request: pytest.FixtureRequest, keys: Keys) -> Rig:
    """A worker whose leases live beside its session, in each store."""
    if request.param == "postgres":
        return PostgresRig(request.getfixturevalue("engine"))
    return Rig(request.getfixturevalue("client"), keys)


@pytest.fixture
def lease_client(server: RedisServer) -> Iterator[redis.Redis]:
    client = server.client(1)
    client.flushdb()
    yield client
    client.close()


def test_beat_of_a_thousand_tasks_is_one_command(client: redis.Redis, keys: Keys) -> None:
    rig = Rig(client, keys)
    rig.begin(*(f"t{n}" for n in range(1_000)))

    with commands(client) as sent:
        rig.heartbeat.beat()

    assert [command.split()[0] for command in sent] == ["EVALSHA"]


def test_leases_in_a_store_of_their_own_take_one_command_more(
    client: redis.Redis, lease_client: redis.Redis, keys: Keys
) -> None:
    rig = Rig(client, keys, lease_client=lease_client)
    rig.begin("t1", "t2", "t3")

    with commands(client) as sent:
        rig.heartbeat.beat()

    assert [command.split()[0] for command in sent] == ["EVALSHA"] * 2


def test_beat_of_a_thousand_tasks_is_one_statement(engine: sa.Engine) -> None:
    rig = PostgresRig(engine)
    rig.begin(*(f"t{n}" for n in range(1_000)))

    with statements(engine) as sent:
        rig.heartbeat.beat()

    assert [statement.split("(")[0] for statement in sent] == ["SELECT * FROM selfheal_beat"]


def test_tasks_outlive_an_outage(rig: Rig) -> None:
    rig.begin("t1")
    rig.time_passes(TTL * 3)

    beat = rig.heartbeat.beat()

    assert (beat.lost, beat.session_lost, beat.emptied, beat.forgotten) == ([], False, False, [])
    assert rig.is_busy("t1")


def test_delivery_outlives_an_outage(client: redis.Redis, keys: Keys) -> None:
    rig = Rig(client, keys)
    rig.begin("t1")
    rig.time_passes(TTL * 3)

    rig.heartbeat.beat()

    assert len(rig.broker.held()) == 1


def test_body_under_way_stays_the_only_one_though_its_worker_was_taken_for_dead(engine: sa.Engine) -> None:
    rig = PostgresRig(engine)
    rig.begin("t1")
    rig.time_passes(TTL * 3)
    rig.leases.expire(session="w1", limit=9)
    rig.heartbeat._sessions.bury("w1", host="")

    beat = rig.heartbeat.beat()

    assert (beat.session_lost, beat.lost) == (True, [])
    assert rig.heartbeat.session.name == "w2"
    assert rig.is_busy("t1")


def test_overtaken_body_is_told_so(rig: Rig) -> None:
    rig.begin("t1")
    rig.time_passes(TTL * 3)
    assert isinstance(rig.leases.acquire(a_start("t1", session="other")), Acquired)

    assert rig.heartbeat.beat().lost == rig.holdings.starts


def test_what_runs_is_held_again_by_an_emptied_store(rig: Rig) -> None:
    rig.begin("t1")
    rig.forget_all()

    beat = rig.heartbeat.beat()

    assert beat.emptied
    assert rig.is_busy("t1")


def test_what_runs_is_held_again_by_an_emptied_store_of_its_own(
    client: redis.Redis, lease_client: redis.Redis, keys: Keys
) -> None:
    """The sessions live elsewhere and know nothing of it."""
    rig = Rig(client, keys, lease_client=lease_client)
    rig.begin("t1")
    rig.heartbeat.beat()
    lease_client.flushdb()

    rig.heartbeat.beat()

    assert rig.is_busy("t1")


@pytest.mark.parametrize("apart", [False, True], ids=["one server", "two servers"])
def test_emptied_store_gets_lock_keys_again_unless_another_task_has_one(
    client: redis.Redis, lease_client: redis.Redis, keys: Keys, apart: bool
) -> None:
    """Main knows no lock key by the message, and works it out only now."""
    rig = Rig(client, keys, lease_client=lease_client if apart else None)
    rig.begin("t1", "t2")
    rig.heartbeat._completed = lambda start: replace(start, lock_key=f"key of {start.task_id}")
    rig.heartbeat.beat()
    (lease_client if apart else client).flushdb()
    assert isinstance(rig.leases.acquire(a_start("t9", lock_key="key of t2")), Acquired)

    beat = rig.heartbeat.beat()

    assert [start.task_id for start in beat.lost] == ["t2"]
    outcome = rig.leases.acquire(a_start("t8", lock_key="key of t1"))
    assert isinstance(outcome, Busy)
    assert outcome.key == "key of t1"


def test_worker_that_was_buried_while_it_was_paused_starts_nothing_of_its_old_messages(
    client: redis.Redis, keys: Keys
) -> None:
    rig = Rig(client, keys)
    rig.begin("t1")
    rig.broker.publish(b"{}")
    reserved = a_start("t2", session="w1", tag=rig.broker.take(session="w1"))
    time_passes(client, TTL * 3)
    for start in (*rig.holdings.starts, reserved):
        RedisBench(client).take_away(start)
    rig.leases.expire(session="w1", limit=9)
    rig.heartbeat._sessions.bury("w1", host="")

    beat = rig.heartbeat.beat()

    assert beat.session_lost
    assert rig.heartbeat.session.name == "w2"
    assert type(rig.leases.acquire(reserved)).__name__ == "NotMine"
    assert rig.is_busy("t1"), "the body under way is still the only one"
