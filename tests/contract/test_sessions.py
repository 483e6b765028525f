"""Worker sessions: who lives, who is gone, and who may say so."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import pytest
import redis

from celery_selfheal.errors import StoreError
from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import Acquired, Renewal
from celery_selfheal.sessions.port import Census, Peer, Session, Standing
from celery_selfheal.sessions.redis import RedisDeliveryStore, RedisSessionStore
from celery_selfheal.testing import servers
from celery_selfheal.witness import ProcessIdentity
from contract.benches import (
    ADDRESS,
    KEYS,
    TTL,
    UNACKED,
    Broker,
    RedisBench,
    a_start,
    a_tag,
    commands,
    everything,
    time_passes,
)

BEAT = TTL / 4
LEAD_MS = 60_000


def a_session(name: str = "w1", *, host: str = "h1") -> Session:
    identity = ProcessIdentity(host=host, pid=int(name[1:]), started="7") if host else None
    return Session(name=name, node=f"celery@{name}", identity=identity)


W1, W2, W3 = (a_session(f"w{n}") for n in (1, 2, 3))


@pytest.fixture
def sessions(client: redis.Redis, keys: Keys) -> RedisSessionStore:
    return RedisSessionStore(client, keys, ttl=TTL, address=ADDRESS, unacked=UNACKED)


@pytest.fixture
def deliveries(client: redis.Redis, keys: Keys) -> RedisDeliveryStore:
    return RedisDeliveryStore(client, keys, unacked=UNACKED, address=ADDRESS)


@pytest.fixture
def broker(client: redis.Redis) -> Broker:
    return Broker(client)


def join(sessions: RedisSessionStore, *joining: Session) -> None:
    for session in joining:
        assert sessions.beat(session, join=True).standing is Standing.BEGUN


def beat(sessions: RedisSessionStore, session: Session) -> Standing:
    return sessions.beat(session, join=False).standing


def names(peers: Iterable[Peer]) -> list[str]:
    return sorted(peer.name for peer in peers)


def census(sessions: RedisSessionStore, by: Session | None = None, *, limit: int = 100) -> Census:
    return sessions.census(session=by, lead_ms=LEAD_MS, limit=limit)


def expired(sessions: RedisSessionStore, by: Session | None = None) -> list[str]:
    return names(census(sessions, by).expired)


# -- beat


def test_first_beat_begins_a_session_and_the_next_ones_keep_it(sessions: RedisSessionStore) -> None:
    assert sessions.beat(W1, join=True).standing is Standing.BEGUN
    assert beat(sessions, W1) is Standing.KEPT


def test_repeated_first_beat_keeps_the_session(sessions: RedisSessionStore) -> None:
    """Its first reply was lost, so the worker joins once more."""
    sessions.beat(W1, join=True)

    assert sessions.beat(W1, join=True).standing is Standing.KEPT


def test_beat_that_does_not_join_begins_nothing(sessions: RedisSessionStore, client: redis.Redis, keys: Keys) -> None:
    assert beat(sessions, W1) is Standing.LOST

    assert not client.exists(keys.session("w1"))
    assert client.zscore(keys.sessions, "w1") is None


def test_beat_sets_the_expiry_and_never_adds(sessions: RedisSessionStore, client: redis.Redis, keys: Keys) -> None:
    join(sessions, W1)
    for _ in range(3):
        beat(sessions, W1)

    left = timedelta(milliseconds=client.pttl(keys.session("w1")))  # type: ignore[arg-type]  # redis-py's unions
    assert TTL - timedelta(minutes=1) < left <= TTL


def test_session_that_ran_out_unnoticed_lives_again(sessions: RedisSessionStore, broker: Broker) -> None:
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


def test_buried_session_is_lost_for_ever(sessions: RedisSessionStore, client: redis.Redis, keys: Keys) -> None:
    join(sessions, W1)
    time_passes(client, TTL * 2)
    sessions.bury("w1", host="h1")

    assert [beat(sessions, W1), beat(sessions, W1)] == [Standing.LOST, Standing.LOST]

    assert not client.exists(keys.session("w1"))
    assert expired(sessions) == []


def test_epoch_stays_until_the_store_is_emptied(sessions: RedisSessionStore, client: redis.Redis) -> None:
    first, other = sessions.beat(W1, join=True).epoch, sessions.beat(W2, join=True).epoch
    assert first == other == sessions.beat(W1, join=False).epoch

    client.flushdb()
    answer = sessions.beat(W1, join=False)

    assert answer.epoch not in ("", first)
    assert answer.standing is Standing.LOST


def test_beat_renews_leases_and_answers_in_their_order(sessions: RedisSessionStore, client: redis.Redis) -> None:
    bench = RedisBench(client)
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


def test_beat_of_a_lost_session_still_holds_what_nobody_has_taken(
    sessions: RedisSessionStore, client: redis.Redis
) -> None:
    """The body runs on: a restored copy must find it busy, whatever became of the session."""
    bench = RedisBench(client)
    start = a_start()
    join(sessions, W1)
    bench.store.acquire(start)
    time_passes(client, TTL * 2)
    bench.store.expire(session="w1", limit=10)
    sessions.bury("w1", host="h1")

    answer = sessions.beat(W1, join=False, starts=[start])

    assert (answer.standing, answer.renewals) == (Standing.LOST, [Renewal.HELD])


def test_beat_keeps_the_visibility_timeout_from_known_deliveries(
    sessions: RedisSessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    join(sessions, W1)
    broker.publish(b"{}", b"{}")
    known, other = broker.take(), broker.take()
    hours = timedelta(hours=2)
    time_passes(broker.client, hours + timedelta(minutes=1))

    sessions.beat(W1, join=False, tags=[known, a_tag()])

    assert [tag for tag, _ in deliveries.overdue(visibility_timeout=hours, limit=10)] == [other]
    assert broker.client.zcard(UNACKED.index) == 2, "a settled delivery does not come back into the index"


def test_beat_names_the_deliveries_that_its_worker_has_forgotten(sessions: RedisSessionStore, broker: Broker) -> None:
    """Was V3: a living worker must not hold for ever what it does not know."""
    join(sessions, W1, W2)
    broker.publish(*[b"{}"] * 4)
    known, forgotten, lost = broker.take(), broker.take(), broker.take()
    broker.take(session="w2")

    answer = sessions.beat(W1, join=False, tags=[known, known, known, a_tag()])

    assert sorted(answer.unknown_tags) == sorted([forgotten, lost])
    assert sessions.beat(W1, join=False, tags=[lost, forgotten, known]).unknown_tags == []


def test_deliveries_of_an_earlier_session_hide_no_forgotten_one(
    sessions: RedisSessionStore, broker: Broker, client: redis.Redis
) -> None:
    """A worker that was taken for dead still runs what it took before, and keeps it from the visibility timeout."""
    join(sessions, W1, W2)
    broker.publish(*[b"{}"] * 3)
    earlier, known, forgotten = broker.take(session="w2"), broker.take(), broker.take()
    before = client.zscore(UNACKED.index, earlier)

    answer = sessions.beat(W1, join=False, tags=[earlier, known])

    assert answer.unknown_tags == [forgotten]
    assert client.zscore(UNACKED.index, earlier) != before


def test_delivery_that_a_stock_worker_restored_hides_no_forgotten_one(
    sessions: RedisSessionStore, broker: Broker, client: redis.Redis
) -> None:
    join(sessions, W1)
    broker.publish(*[b"{}"] * 2)
    restored, forgotten = broker.take(), broker.take()
    client.zrem(UNACKED.index, restored)
    client.hdel(UNACKED.unacked, restored)

    assert sessions.beat(W1, join=False, tags=[restored]).unknown_tags == [forgotten]


def test_beat_renews_more_than_one_command_can_name(
    sessions: RedisSessionStore, broker: Broker, client: redis.Redis
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


def test_beat_is_one_command_whatever_is_held(sessions: RedisSessionStore, client: redis.Redis) -> None:
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


def test_living_sessions_are_not_expired(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2)
    time_passes(client, BEAT)

    assert expired(sessions) == []
    assert expired(sessions, W1) == []


def test_session_that_runs_out_while_others_beat_is_dead(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2)
    for _ in range(5):
        time_passes(client, BEAT)
        assert beat(sessions, W1) is Standing.KEPT

    found = census(sessions, W1)

    assert (found.lead, found.grace) == (True, False)
    assert [(peer.name, peer.node, peer.identity) for peer in found.expired] == [("w2", "celery@w2", W2.identity)]


def test_only_the_leader_is_told_who_has_run_out(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2, W3)
    for _ in range(5):
        time_passes(client, BEAT)
        beat(sessions, W1)
        beat(sessions, W2)

    assert census(sessions, W1).lead
    assert census(sessions, W1).lead, "a leader stays it"
    follower = census(sessions, W2)
    assert (follower.lead, follower.expired) == (False, [])


def test_lead_passes_on_when_the_leader_sweeps_no_more(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2)
    census(sessions, W1)
    assert not census(sessions, W2).lead

    time_passes(client, timedelta(milliseconds=LEAD_MS))

    assert census(sessions, W2).lead
    assert not census(sessions, W1).lead


def test_sweep_on_request_leads_once_and_takes_nobodys_lead(sessions: RedisSessionStore) -> None:
    join(sessions, W1, W2)
    assert census(sessions, W1).lead

    assert census(sessions).lead

    assert census(sessions, W1).lead
    assert not census(sessions, W2).lead


def test_expired_sessions_are_told_by_pages(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, *(a_session(f"w{n}") for n in range(1, 6)))
    for _ in range(5):
        time_passes(client, BEAT)
        beat(sessions, W1)

    assert len(census(sessions, limit=3).expired) == 3
    for peer in census(sessions, limit=3).expired:
        sessions.bury(peer.name, host="h1")
    assert len(census(sessions, limit=3).expired) == 1


def test_everybody_is_told_the_sessions_of_the_own_machine(sessions: RedisSessionStore) -> None:
    """The kernel is asked by each machine's own workers, leader or not."""
    stranger = a_session("w9", host="h2")
    join(sessions, W1, W2, stranger)
    census(sessions, stranger)

    assert names(census(sessions, W1).neighbours) == ["w1", "w2"]
    assert names(census(sessions, stranger).neighbours) == ["w9"]


def test_sessions_without_a_witness_are_nobodys_neighbours(sessions: RedisSessionStore) -> None:
    blind, other = a_session("w1", host=""), a_session("w2", host="")
    join(sessions, blind, other)

    assert census(sessions, blind).neighbours == []
    assert census(sessions).neighbours == []


# -- grace


def test_outage_kills_nobody(sessions: RedisSessionStore, client: redis.Redis) -> None:
    """Nobody could beat, so no session's expiry proves a death."""
    join(sessions, W1, W2)
    time_passes(client, TTL * 2)
    assert beat(sessions, W1) is Standing.AGAIN

    found = census(sessions, W1)

    assert (found.grace, found.expired) == (True, [])
    assert beat(sessions, W2) is Standing.AGAIN


def test_outage_that_ends_some_sessions_only_kills_nobody(sessions: RedisSessionStore, client: redis.Redis) -> None:
    """Shorter than a TTL, it ends the sessions of those that had beaten some time before it began."""
    join(sessions, W1, W2)
    time_passes(client, BEAT)
    beat(sessions, W1)
    time_passes(client, TTL * 0.8)
    assert beat(sessions, W1) is Standing.KEPT

    assert expired(sessions, W1) == []

    assert beat(sessions, W2) is Standing.AGAIN


def test_sweep_on_request_that_comes_before_the_first_beat_kills_nobody(
    sessions: RedisSessionStore, client: redis.Redis
) -> None:
    """``selfheal reap`` has no session of its own, and no beat that could open the grace."""
    join(sessions, W1, W2)
    time_passes(client, TTL * 2)

    assert expired(sessions) == []

    assert [beat(sessions, W1), beat(sessions, W2)] == [Standing.AGAIN, Standing.AGAIN]


def test_worker_that_has_run_out_itself_does_not_judge_others(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2)
    time_passes(client, TTL * 2)

    found = census(sessions, W1)

    assert (found.lead, found.expired) == (False, [])


def test_worker_that_sweeps_before_it_beats_after_an_outage_kills_nobody(
    sessions: RedisSessionStore, client: redis.Redis
) -> None:
    """Its beat met the end of the outage and failed; its own session has outlived it."""
    join(sessions, W1, W2)
    time_passes(client, BEAT)
    beat(sessions, W1)
    time_passes(client, TTL * 0.8)

    assert expired(sessions, W1) == []

    assert [beat(sessions, W1), beat(sessions, W2)] == [Standing.KEPT, Standing.AGAIN]


def test_who_does_not_come_back_within_the_grace_is_dead(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2)
    time_passes(client, TTL * 2)
    for _ in range(5):
        beat(sessions, W1)
        time_passes(client, BEAT)
    beat(sessions, W1)

    found = census(sessions, W1)

    assert (found.grace, names(found.expired)) == (False, ["w2"])


def test_fleet_that_is_gone_is_found_by_sweeps_alone(sessions: RedisSessionStore, client: redis.Redis) -> None:
    """Every worker has died, and ``selfheal reap --loop`` is all that is left."""
    join(sessions, W1)
    time_passes(client, TTL * 2)
    census(sessions)
    time_passes(client, TTL * 1.1)

    assert expired(sessions) == ["w1"]


def test_first_worker_of_a_fleet_opens_no_grace(sessions: RedisSessionStore) -> None:
    join(sessions, W1)

    assert not census(sessions, W1).grace


def test_dead_are_found_in_the_grace_where_their_death_is_proven(
    sessions: RedisSessionStore, client: redis.Redis
) -> None:
    join(sessions, W1, W2, W3, a_session("w4"))
    time_passes(client, TTL * 2)
    beat(sessions, W1)
    beat(sessions, W3)
    assert census(sessions, W1).grace

    sessions.condemn(next(peer for peer in census(sessions, W1).neighbours if peer.name == "w2"))
    sessions.leave(W3)

    assert expired(sessions, W1) == ["w2", "w3"]


# -- condemn


def test_condemned_session_is_dead_at_once(
    sessions: RedisSessionStore, deliveries: RedisDeliveryStore, broker: Broker
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


def test_session_that_is_another_process_by_now_is_not_condemned(sessions: RedisSessionStore) -> None:
    """The kernel was asked about a process that the record does not name any more."""
    join(sessions, W1)
    (peer,) = census(sessions, W1).neighbours
    sessions.condemn(peer)
    sessions.bury("w1", host="h1")
    successor = Session(name="w1", node="celery@w1", identity=ProcessIdentity(host="h1", pid=1, started="8"))
    join(sessions, successor)

    assert not sessions.condemn(peer)

    assert beat(sessions, successor) is Standing.KEPT


def test_buried_session_is_not_condemned_once_more(sessions: RedisSessionStore) -> None:
    join(sessions, W1)
    (peer,) = census(sessions, W1).neighbours
    sessions.condemn(peer)
    sessions.bury("w1", host="h1")

    assert not sessions.condemn(peer)
    assert not sessions.condemn(Peer(name="w1", about="{}"))
    assert expired(sessions) == []


# -- bury and leave


def test_living_session_is_not_buried(sessions: RedisSessionStore) -> None:
    join(sessions, W1)

    assert not sessions.bury("w1", host="h1")
    assert beat(sessions, W1) is Standing.KEPT


def test_session_that_owns_deliveries_is_not_buried(
    sessions: RedisSessionStore, deliveries: RedisDeliveryStore, broker: Broker
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


def test_burial_leaves_nothing_of_a_session(sessions: RedisSessionStore, client: redis.Redis) -> None:
    join(sessions, W1, W2)
    sessions.leave(W2)

    sessions.bury("w2", host="h1")

    assert not [key for key, value in everything(client).items() if "w2" in f"{key} {value}"]
    assert beat(sessions, W1) is Standing.KEPT


def test_session_that_says_good_bye_is_dead_at_once_and_keeps_what_it_owns_for_the_sweep(
    sessions: RedisSessionStore, deliveries: RedisDeliveryStore, broker: Broker
) -> None:
    join(sessions, W1, W2)
    broker.publish(b"{}")
    tag = broker.take()

    sessions.leave(W1)

    assert expired(sessions, W2) == ["w1"]
    assert [delivery.tag for delivery in deliveries.owned("w1")] == [tag]


def test_late_good_bye_of_a_buried_session_is_swept_away(sessions: RedisSessionStore) -> None:
    join(sessions, W1)
    sessions.leave(W1)
    sessions.bury("w1", host="h1")

    sessions.leave(W1)
    for peer in census(sessions).expired:
        sessions.bury(peer.name, host="")

    assert expired(sessions) == []


# -- session and leases


def test_living_session_keeps_its_leases_though_a_census_found_it_expired(
    sessions: RedisSessionStore, client: redis.Redis
) -> None:
    """It beat again between the reaper's census and its next step, which can be seconds in a large sweep."""
    bench = RedisBench(client)
    start = a_start()
    join(sessions, W1)
    bench.store.acquire(start)
    time_passes(client, TTL * 2)
    assert sessions.beat(W1, join=False, starts=[start]).standing is Standing.AGAIN

    assert bench.store.expire(session="w1", limit=10) == []

    assert bench.holder("t1") == start.token


def test_start_that_is_told_as_stalled_and_lives_keeps_its_name(
    sessions: RedisSessionStore, client: redis.Redis
) -> None:
    """What it is told as next, and its counter, must say which task it is."""
    bench = RedisBench(client)
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


def test_dead_session_frees_its_tasks_and_then_restores_them(
    sessions: RedisSessionStore, deliveries: RedisDeliveryStore, broker: Broker
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
