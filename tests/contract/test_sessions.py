"""Worker sessions: who lives, who is gone, and who may say so."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import pytest
import redis
import sqlalchemy as sa

from celery_selfheal.errors import StoreError
from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import Acquired, Renewal
from celery_selfheal.sessions.port import Census, Peer, Session, SessionStore, Standing
from celery_selfheal.sessions.postgres import PostgresSessionStore
from celery_selfheal.sessions.redis import RedisDeliveryStore, RedisSessionStore
from celery_selfheal.testing import servers
from celery_selfheal.witness import ProcessIdentity
from contract.benches import (
    ADDRESS,
    KEYS,
    TTL,
    UNACKED,
    Broker,
    LeaseBench,
    RedisBench,
    a_start,
    a_tag,
    commands,
    everything,
    time_passes,
)
from contract.postgres_bench import PostgresBench, all_rows, empty, postgres_time_passes

BEAT = TTL / 4
LEAD_MS = 60_000


def a_session(name: str = "w1", *, host: str = "h1") -> Session:
    identity = ProcessIdentity(host=host, pid=int(name[1:]), started="7") if host else None
    return Session(name=name, node=f"celery@{name}", identity=identity)


W1, W2, W3 = (a_session(f"w{n}") for n in (1, 2, 3))


class Fleet(Protocol):
    """A session store, the leases beside it, and the hand of fate."""

    sessions: SessionStore
    bench: LeaseBench

    def time_passes(self, duration: timedelta) -> None:
        """Without anybody's beating meanwhile: an outage, or a fleet that is gone."""

    def forget_all(self) -> None:
        """The store loses all its data."""

    def left_of(self, session: str) -> timedelta:
        """Until the session runs out; nothing if it does not live."""

    def mentions(self, word: str) -> list[str]:
        """Where the store holds something with the word in it."""


class RedisFleet:
    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self.sessions = RedisSessionStore(client, KEYS, ttl=TTL, address=ADDRESS, unacked=UNACKED)
        self.bench = RedisBench(client)

    def time_passes(self, duration: timedelta) -> None:
        time_passes(self._client, duration)

    def forget_all(self) -> None:
        self._client.flushdb()

    def left_of(self, session: str) -> timedelta:
        return timedelta(milliseconds=max(0, self._client.pttl(KEYS.session(session))))

    def mentions(self, word: str) -> list[str]:
        return [key for key, value in everything(self._client).items() if word in f"{key} {value}"]


class PostgresFleet:
    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.bench = PostgresBench(engine)
        self.sessions = PostgresSessionStore(self.bench.functions, KEYS, ttl=TTL)

    def time_passes(self, duration: timedelta) -> None:
        postgres_time_passes(self._engine, duration)

    def forget_all(self) -> None:
        empty(self._engine)

    def left_of(self, session: str) -> timedelta:
        rows = self.bench.sql(
            "SELECT expires_at - clock_timestamp() FROM selfheal_sessions"
            " WHERE name = :name AND expires_at > clock_timestamp()",
            name=session,
        )
        return rows[0][0] if rows else timedelta(0)

    def mentions(self, word: str) -> list[str]:
        return [table for table, rows in all_rows(self._engine).items() if word in str(rows)]


@pytest.fixture(params=["redis", "postgres"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """Each store under the same contract."""
    if request.param == "postgres":
        return PostgresFleet(request.getfixturevalue("engine"))
    return RedisFleet(request.getfixturevalue("client"))


@pytest.fixture
def sessions(fleet: Fleet) -> SessionStore:
    return fleet.sessions


on_the_broker = pytest.mark.parametrize("fleet", ["redis"], indirect=True)
"""What only a store can do that knows the broker's deliveries."""


@pytest.fixture
def deliveries(client: redis.Redis, keys: Keys) -> RedisDeliveryStore:
    return RedisDeliveryStore(client, keys, unacked=UNACKED, address=ADDRESS)


@pytest.fixture
def broker(client: redis.Redis) -> Broker:
    return Broker(client)


def join(sessions: SessionStore, *joining: Session) -> None:
    for session in joining:
        assert sessions.beat(session, join=True).standing is Standing.BEGUN


def beat(sessions: SessionStore, session: Session) -> Standing:
    return sessions.beat(session, join=False).standing


def names(peers: Iterable[Peer]) -> list[str]:
    return sorted(peer.name for peer in peers)


def census(sessions: SessionStore, by: Session | None = None, *, limit: int = 100) -> Census:
    return sessions.census(session=by, lead_ms=LEAD_MS, limit=limit)


def expired(sessions: SessionStore, by: Session | None = None) -> list[str]:
    return names(census(sessions, by).expired)


# -- beat


def test_first_beat_begins_a_session_and_the_next_ones_keep_it(sessions: SessionStore) -> None:
    assert sessions.beat(W1, join=True).standing is Standing.BEGUN
    assert beat(sessions, W1) is Standing.KEPT


def test_repeated_first_beat_keeps_the_session(sessions: SessionStore) -> None:
    """Its first reply was lost, so the worker joins once more."""
    sessions.beat(W1, join=True)

    assert sessions.beat(W1, join=True).standing is Standing.KEPT


def test_beat_that_does_not_join_begins_nothing(sessions: SessionStore, fleet: Fleet) -> None:
    assert beat(sessions, W1) is Standing.LOST

    assert fleet.mentions("w1") == []


def test_beat_sets_the_expiry_and_never_adds(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1)
    for _ in range(3):
        beat(sessions, W1)

    assert TTL - timedelta(minutes=1) < fleet.left_of("w1") <= TTL


@on_the_broker
def test_session_that_ran_out_unnoticed_lives_again(sessions: SessionStore, broker: Broker) -> None:
    join(sessions, W1)
    broker.publish(b"{}")
    tag = broker.take()
    time_passes(broker.client, TTL * 2)
    assert broker.fetch() == 0

    assert beat(sessions, W1) is Standing.AGAIN

    assert beat(sessions, W1) is Standing.KEPT
    assert expired(sessions) == []
    assert set(broker.held()) == {tag}
    broker.publish(b"{}")
    broker.take()


def test_buried_session_is_lost_for_ever(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1)
    fleet.time_passes(TTL * 2)
    sessions.bury("w1", host="h1")

    assert [beat(sessions, W1), beat(sessions, W1)] == [Standing.LOST, Standing.LOST]

    assert not fleet.left_of("w1")
    assert expired(sessions) == []


def test_epoch_stays_until_the_store_is_emptied(sessions: SessionStore, fleet: Fleet) -> None:
    first, other = sessions.beat(W1, join=True).epoch, sessions.beat(W2, join=True).epoch
    assert first == other == sessions.beat(W1, join=False).epoch

    fleet.forget_all()
    answer = sessions.beat(W1, join=False)

    assert answer.epoch not in ("", first)
    assert answer.standing is Standing.LOST


def test_beat_renews_leases_and_answers_in_their_order(sessions: SessionStore, fleet: Fleet) -> None:
    bench = fleet.bench
    held, unborn, lost = a_start("t1"), a_start("t2"), a_start("t3")
    for start in (held, lost):
        bench.store.acquire(start)
    bench.shorten("t1")
    bench.run_out("t3")
    bench.store.acquire(a_start("t3", session="w2"))

    answer = sessions.beat(W1, join=True, starts=[lost, held, unborn], tags=["x"])

    assert answer.renewals == [Renewal.LOST, Renewal.HELD, Renewal.IDLE]
    assert answer.unknown_tags == []
    assert bench.remaining("t1") > TTL - timedelta(minutes=1)


def test_beat_of_a_lost_session_still_holds_what_nobody_has_taken(sessions: SessionStore, fleet: Fleet) -> None:
    """The body runs on: a restored copy must find it busy, whatever became of the session."""
    bench = fleet.bench
    start = a_start()
    join(sessions, W1)
    bench.store.acquire(start)
    fleet.time_passes(TTL * 2)
    bench.store.expire(session="w1", limit=10)
    sessions.bury("w1", host="h1")

    answer = sessions.beat(W1, join=False, starts=[start])

    assert (answer.standing, answer.renewals) == (Standing.LOST, [Renewal.HELD])


@on_the_broker
def test_beat_keeps_the_visibility_timeout_from_known_deliveries(
    sessions: SessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    join(sessions, W1)
    broker.publish(b"{}", b"{}")
    known, other = broker.take(), broker.take()
    hours = timedelta(hours=2)
    time_passes(broker.client, hours + timedelta(minutes=1))

    sessions.beat(W1, join=False, tags=[known, a_tag()])

    assert [tag for tag, _ in deliveries.overdue(visibility_timeout=hours, limit=10)] == [other]
    assert broker.client.zcard(UNACKED.index) == 2, "a settled delivery does not come back into the index"


@on_the_broker
def test_beat_names_the_deliveries_that_its_worker_has_forgotten(sessions: SessionStore, broker: Broker) -> None:
    """Was V3: a living worker must not hold for ever what it does not know."""
    join(sessions, W1, W2)
    broker.publish(*[b"{}"] * 4)
    known, forgotten, lost = broker.take(), broker.take(), broker.take()
    broker.take(session="w2")

    answer = sessions.beat(W1, join=False, tags=[known, known, known, a_tag()])

    assert sorted(answer.unknown_tags) == sorted([forgotten, lost])
    assert sessions.beat(W1, join=False, tags=[lost, forgotten, known]).unknown_tags == []


@on_the_broker
def test_deliveries_of_an_earlier_session_hide_no_forgotten_one(
    sessions: SessionStore, broker: Broker, client: redis.Redis
) -> None:
    """A worker that was taken for dead still runs what it took before, and keeps it from the visibility timeout."""
    join(sessions, W1, W2)
    broker.publish(*[b"{}"] * 3)
    earlier, known, forgotten = broker.take(session="w2"), broker.take(), broker.take()
    before = client.zscore(UNACKED.index, earlier)

    answer = sessions.beat(W1, join=False, tags=[earlier, known])

    assert answer.unknown_tags == [forgotten]
    assert client.zscore(UNACKED.index, earlier) != before


@on_the_broker
def test_delivery_that_a_stock_worker_restored_hides_no_forgotten_one(
    sessions: SessionStore, broker: Broker, client: redis.Redis
) -> None:
    join(sessions, W1)
    broker.publish(*[b"{}"] * 2)
    restored, forgotten = broker.take(), broker.take()
    client.zrem(UNACKED.index, restored)
    client.hdel(UNACKED.unacked, restored)

    assert sessions.beat(W1, join=False, tags=[restored]).unknown_tags == [forgotten]


@on_the_broker
def test_beat_renews_more_than_one_command_can_name(
    sessions: SessionStore, broker: Broker, client: redis.Redis
) -> None:
    bench = RedisBench(client)
    join(sessions, W1)
    many = 2_001
    broker.publish(*[b"{}"] * (many + 1))
    starts = [a_start(f"t{n}", tag=broker.take()) for n in range(many)]
    forgotten = broker.take()
    for start in starts:
        bench.store.acquire(start)
        client.zadd(KEYS.index, {start.task_id: 1})

    answer = sessions.beat(W1, join=False, starts=starts, tags=[str(start.tag) for start in starts])

    assert answer.renewals == [Renewal.HELD] * many
    assert answer.unknown_tags == [forgotten]
    assert client.zcount(KEYS.index, 1, 1) == 0


@on_the_broker
def test_beat_is_one_command_whatever_is_held(sessions: SessionStore, client: redis.Redis) -> None:
    bench = RedisBench(client)
    starts = [a_start(f"t{n}") for n in range(1_000)]
    for start in starts:
        bench.store.acquire(start)
    tags = [a_tag() for _ in range(1_000)]
    join(sessions, W1)

    with commands(client) as sent:
        answer = sessions.beat(W1, join=False, starts=starts, tags=tags)

    assert answer.renewals == [Renewal.HELD] * 1_000
    assert [command.split()[0] for command in sent] == ["EVALSHA"]


# -- census


def test_living_sessions_are_not_expired(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2)
    fleet.time_passes(BEAT)

    assert expired(sessions) == []
    assert expired(sessions, W1) == []


def test_session_that_runs_out_while_others_beat_is_dead(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2)
    for _ in range(5):
        fleet.time_passes(BEAT)
        assert beat(sessions, W1) is Standing.KEPT

    found = census(sessions, W1)

    assert (found.lead, found.grace) == (True, False)
    assert [(peer.name, peer.node, peer.identity) for peer in found.expired] == [("w2", "celery@w2", W2.identity)]


def test_only_the_leader_is_told_who_has_run_out(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2, W3)
    for _ in range(5):
        fleet.time_passes(BEAT)
        beat(sessions, W1)
        beat(sessions, W2)

    assert census(sessions, W1).lead
    assert census(sessions, W1).lead, "a leader stays it"
    follower = census(sessions, W2)
    assert (follower.lead, follower.expired) == (False, [])


def test_lead_passes_on_when_the_leader_sweeps_no_more(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2)
    census(sessions, W1)
    assert not census(sessions, W2).lead

    fleet.time_passes(timedelta(milliseconds=LEAD_MS))

    assert census(sessions, W2).lead
    assert not census(sessions, W1).lead


def test_sweep_on_request_leads_once_and_takes_nobodys_lead(sessions: SessionStore) -> None:
    join(sessions, W1, W2)
    assert census(sessions, W1).lead

    assert census(sessions).lead

    assert census(sessions, W1).lead
    assert not census(sessions, W2).lead


def test_expired_sessions_are_told_by_pages(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, *(a_session(f"w{n}") for n in range(1, 6)))
    for _ in range(5):
        fleet.time_passes(BEAT)
        beat(sessions, W1)

    assert len(census(sessions, limit=3).expired) == 3
    for peer in census(sessions, limit=3).expired:
        sessions.bury(peer.name, host="h1")
    assert len(census(sessions, limit=3).expired) == 1


def test_everybody_is_told_the_sessions_of_the_own_machine(sessions: SessionStore) -> None:
    """The kernel is asked by each machine's own workers, leader or not."""
    stranger = a_session("w9", host="h2")
    join(sessions, W1, W2, stranger)
    census(sessions, stranger)

    assert names(census(sessions, W1).neighbours) == ["w1", "w2"]
    assert names(census(sessions, stranger).neighbours) == ["w9"]


def test_sessions_without_a_witness_are_nobodys_neighbours(sessions: SessionStore) -> None:
    blind, other = a_session("w1", host=""), a_session("w2", host="")
    join(sessions, blind, other)

    assert census(sessions, blind).neighbours == []
    assert census(sessions).neighbours == []


# -- grace


def test_outage_kills_nobody(sessions: SessionStore, fleet: Fleet) -> None:
    """Nobody could beat, so no session's expiry proves a death."""
    join(sessions, W1, W2)
    fleet.time_passes(TTL * 2)
    assert beat(sessions, W1) is Standing.AGAIN

    found = census(sessions, W1)

    assert (found.grace, found.expired) == (True, [])
    assert beat(sessions, W2) is Standing.AGAIN


def test_outage_that_ends_some_sessions_only_kills_nobody(sessions: SessionStore, fleet: Fleet) -> None:
    """Shorter than a TTL, it ends the sessions of those that had beaten some time before it began."""
    join(sessions, W1, W2)
    fleet.time_passes(BEAT)
    beat(sessions, W1)
    fleet.time_passes(TTL * 0.8)
    assert beat(sessions, W1) is Standing.KEPT

    assert expired(sessions, W1) == []

    assert beat(sessions, W2) is Standing.AGAIN


def test_sweep_on_request_that_comes_before_the_first_beat_kills_nobody(sessions: SessionStore, fleet: Fleet) -> None:
    """``selfheal reap`` has no session of its own, and no beat that could open the grace."""
    join(sessions, W1, W2)
    fleet.time_passes(TTL * 2)

    assert expired(sessions) == []

    assert [beat(sessions, W1), beat(sessions, W2)] == [Standing.AGAIN, Standing.AGAIN]


def test_worker_that_has_run_out_itself_does_not_judge_others(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2)
    fleet.time_passes(TTL * 2)

    found = census(sessions, W1)

    assert (found.lead, found.expired) == (False, [])


def test_worker_that_sweeps_before_it_beats_after_an_outage_kills_nobody(sessions: SessionStore, fleet: Fleet) -> None:
    """Its beat met the end of the outage and failed; its own session has outlived it."""
    join(sessions, W1, W2)
    fleet.time_passes(BEAT)
    beat(sessions, W1)
    fleet.time_passes(TTL * 0.8)

    assert expired(sessions, W1) == []

    assert [beat(sessions, W1), beat(sessions, W2)] == [Standing.KEPT, Standing.AGAIN]


def test_who_does_not_come_back_within_the_grace_is_dead(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2)
    fleet.time_passes(TTL * 2)
    for _ in range(5):
        beat(sessions, W1)
        fleet.time_passes(BEAT)
    beat(sessions, W1)

    found = census(sessions, W1)

    assert (found.grace, names(found.expired)) == (False, ["w2"])


def test_fleet_that_is_gone_is_found_by_sweeps_alone(sessions: SessionStore, fleet: Fleet) -> None:
    """Every worker has died, and ``selfheal reap --loop`` is all that is left."""
    join(sessions, W1)
    fleet.time_passes(TTL * 2)
    census(sessions)
    fleet.time_passes(TTL * 1.1)

    assert expired(sessions) == ["w1"]


def test_first_worker_of_a_fleet_opens_no_grace(sessions: SessionStore) -> None:
    join(sessions, W1)

    assert not census(sessions, W1).grace


def test_dead_are_found_in_the_grace_where_their_death_is_proven(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2, W3, a_session("w4"))
    fleet.time_passes(TTL * 2)
    beat(sessions, W1)
    beat(sessions, W3)
    assert census(sessions, W1).grace

    sessions.condemn(next(peer for peer in census(sessions, W1).neighbours if peer.name == "w2"))
    sessions.leave(W3)

    assert expired(sessions, W1) == ["w2", "w3"]


# -- condemn


@on_the_broker
def test_condemned_session_is_dead_at_once(
    sessions: SessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    join(sessions, W1, W2)
    broker.publish(b"{}")
    broker.take(session="w2")
    (delivery,) = deliveries.owned("w2")
    assert not deliveries.settle(delivery, session="w2", message=b"{}", dead=True, front=True)
    (peer,) = (peer for peer in census(sessions, W1).neighbours if peer.name == "w2")

    assert sessions.condemn(peer)

    assert expired(sessions, W1) == ["w2"]
    assert broker.fetch(session="w2") == 0
    assert deliveries.settle(delivery, session="w2", message=b"{}", dead=True, front=True)


def test_session_that_is_another_process_by_now_is_not_condemned(sessions: SessionStore) -> None:
    """The kernel was asked about a process that the record does not name any more."""
    join(sessions, W1)
    (peer,) = census(sessions, W1).neighbours
    sessions.condemn(peer)
    sessions.bury("w1", host="h1")
    successor = Session(name="w1", node="celery@w1", identity=ProcessIdentity(host="h1", pid=1, started="8"))
    join(sessions, successor)

    assert not sessions.condemn(peer)

    assert beat(sessions, successor) is Standing.KEPT


def test_buried_session_is_not_condemned_once_more(sessions: SessionStore) -> None:
    join(sessions, W1)
    (peer,) = census(sessions, W1).neighbours
    sessions.condemn(peer)
    sessions.bury("w1", host="h1")

    assert not sessions.condemn(peer)
    assert not sessions.condemn(Peer(name="w1", about="{}"))
    assert expired(sessions) == []


# -- bury and leave


def test_living_session_is_not_buried(sessions: SessionStore) -> None:
    join(sessions, W1)

    assert not sessions.bury("w1", host="h1")
    assert beat(sessions, W1) is Standing.KEPT


@on_the_broker
def test_session_that_owns_deliveries_is_not_buried(
    sessions: SessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    """Nobody would ever look for them again."""
    join(sessions, W1)
    broker.publish(b"{}")
    broker.take()
    sessions.leave(W1)
    assert not sessions.bury("w1", host="h1")
    assert expired(sessions) == ["w1"]

    for delivery in deliveries.owned("w1"):
        deliveries.settle(delivery, session="w1", message=delivery.message, dead=True, front=True)

    assert sessions.bury("w1", host="h1")
    assert expired(sessions) == []


def test_burial_leaves_nothing_of_a_session(sessions: SessionStore, fleet: Fleet) -> None:
    join(sessions, W1, W2)
    sessions.leave(W2)

    sessions.bury("w2", host="h1")

    assert fleet.mentions("w2") == []
    assert beat(sessions, W1) is Standing.KEPT


@on_the_broker
def test_session_that_says_good_bye_is_dead_at_once_and_keeps_what_it_owns_for_the_sweep(
    sessions: SessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    join(sessions, W1, W2)
    broker.publish(b"{}")
    tag = broker.take()

    sessions.leave(W1)

    assert expired(sessions, W2) == ["w1"]
    assert [delivery.tag for delivery in deliveries.owned("w1")] == [tag]


def test_late_good_bye_of_a_buried_session_is_swept_away(sessions: SessionStore) -> None:
    join(sessions, W1)
    sessions.leave(W1)
    sessions.bury("w1", host="h1")

    sessions.leave(W1)
    for peer in census(sessions).expired:
        sessions.bury(peer.name, host="")

    assert expired(sessions) == []


# -- session and leases


def test_living_session_keeps_its_leases_though_a_census_found_it_expired(sessions: SessionStore, fleet: Fleet) -> None:
    """It beat again between the reaper's census and its next step, which can be seconds in a large sweep."""
    bench = fleet.bench
    start = a_start()
    join(sessions, W1)
    bench.store.acquire(start)
    fleet.time_passes(TTL * 2)
    assert sessions.beat(W1, join=False, starts=[start]).standing is Standing.AGAIN

    assert bench.store.expire(session="w1", limit=10) == []

    assert bench.holder("t1") == start.token


def test_start_that_is_told_as_stalled_and_lives_keeps_its_name(sessions: SessionStore, fleet: Fleet) -> None:
    """What it is told as next, and its counter, must say which task it is."""
    bench = fleet.bench
    start = a_start()
    join(sessions, W1)
    bench.store.acquire(start)
    bench.run_out("t1")
    bench.store.expire(session=None, limit=10)
    sessions.beat(W1, join=False, starts=[start])
    bench.run_out("t1")

    (stall,) = bench.store.expire(session=None, limit=10)

    assert (stall.task_name, stall.owner) == ("shop.pay", "celery@w1")
    assert bench.count("stalls") == 2


@on_the_broker
def test_dead_session_frees_its_tasks_and_then_restores_them(
    sessions: SessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    bench = RedisBench(broker.client)
    join(sessions, W1, W2)
    broker.publish(b"{}")
    first = a_start(tag=broker.take())
    bench.store.acquire(first)
    sessions.leave(W1)

    assert len(bench.store.expire(session="w1", limit=10)) == 1
    (delivery,) = deliveries.owned("w1")
    deliveries.settle(delivery, session="w1", message=delivery.message, dead=True, front=True)
    outcome = bench.store.acquire(a_start(session="w2", tag=broker.take(session="w2")))

    assert isinstance(outcome, Acquired)
    assert outcome.stalls == 1


# -- values


def test_peer_is_named_by_its_session_where_the_store_has_forgotten_it() -> None:
    peer = Peer(name="celery@a:1:ff", about="{}")

    assert (peer.node, peer.identity) == ("celery@a:1:ff", None)


@pytest.mark.parametrize("host", ["h1", ""])
def test_peer_is_what_its_session_said(host: str) -> None:
    session = a_session(host=host)

    peer = Peer(name=session.name, about=session.about())

    assert (peer.node, peer.identity) == (session.node, session.identity)


def test_every_step_tells_a_store_that_does_not_answer_by_one_error(keys: Keys) -> None:
    with redis.Redis(port=servers.free_port(), retry=None) as nobody:
        sessions = RedisSessionStore(nobody, keys, ttl=TTL, address=ADDRESS)
        for step in (
            lambda: sessions.beat(W1, join=True),
            lambda: census(sessions),
            lambda: sessions.condemn(Peer(name="w1", about="{}")),
            lambda: sessions.bury("w1", host=""),
            lambda: sessions.leave(W1),
        ):
            with pytest.raises(StoreError, match=ADDRESS):
                step()
