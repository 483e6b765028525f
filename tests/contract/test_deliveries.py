"""Deliveries: taken in one step, owned by a session, and moved out of its hands at most once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from celery_selfheal.agents.reaper import Reaper
from celery_selfheal.errors import StoreError
from celery_selfheal.keys import Keys
from celery_selfheal.sessions.port import Delivery, Session
from celery_selfheal.sessions.redis import RedisDeliveryStore, RedisSessionStore, message_of
from celery_selfheal.testing import servers
from contract.benches import (
    ADDRESS,
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

MEBIBYTE = 1024 * 1024

ODD_MESSAGES = {
    "binary": bytes(range(256)) * 4,
    "truncated": b'{"body": "W10=", "headers": {"id": "t1", "ta',
    "empty": b"",
    "a quote": b'"',
    "our own seams": b'[{},"","q"],"","q"]',
    "deep": b"[" * 100_000,
    "no object": b"[1, 2]",
    "eight mebibytes": b'{"body": "' + b"x" * 8 * MEBIBYTE + b'"}',
}

odd_messages = pytest.mark.parametrize("message", ODD_MESSAGES.values(), ids=ODD_MESSAGES.keys())


@pytest.fixture
def sessions(client: redis.Redis, keys: Keys) -> RedisSessionStore:
    return RedisSessionStore(client, keys, ttl=TTL, address=ADDRESS, unacked=UNACKED)


@pytest.fixture
def deliveries(client: redis.Redis, keys: Keys) -> RedisDeliveryStore:
    return RedisDeliveryStore(client, keys, unacked=UNACKED, address=ADDRESS)


@pytest.fixture
def broker(client: redis.Redis, sessions: RedisSessionStore) -> Broker:
    """A broker with two living workers."""
    for name in ("w1", "w2"):
        join(sessions, name)
    return Broker(client)


@pytest.fixture
def full_memory(client: redis.Redis) -> Iterator[Callable[[], None]]:
    """Leaves the server without memory for another write, when it is called."""
    before = client.config_get("maxmemory*")

    def fill() -> None:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")

    yield fill
    for name, value in before.items():  # type: ignore[union-attr]  # redis-py's unions
        if name in ("maxmemory", "maxmemory-policy"):
            client.config_set(name, value)


def a_session(name: str) -> Session:
    return Session(name=name, node=f"celery@{name}", identity=None)


def join(sessions: RedisSessionStore, name: str) -> None:
    sessions.beat(a_session(name), join=True)


def settle(deliveries: RedisDeliveryStore, delivery: Delivery, **changes: Any) -> bool:
    how = {"session": "w1", "message": delivery.message, "dead": False, "front": True, **changes}
    return deliveries.settle(delivery, **how)


def only(deliveries: RedisDeliveryStore, session: str = "w1") -> Delivery:
    (delivery,) = deliveries.owned(session)
    return delivery


def envelope(task_id: str) -> bytes:
    return json.dumps({"body": "W10=", "headers": {"id": task_id, "task": "shop.pay"}, "properties": {}}).encode()


def ids(messages: list[bytes]) -> list[str]:
    return [json.loads(message)["headers"]["id"] for message in messages]


# -- fetch


def test_fetch_takes_the_oldest_message_and_records_it_three_times(
    broker: Broker, deliveries: RedisDeliveryStore, client: redis.Redis, keys: Keys
) -> None:
    broker.publish(b'{"n": 1}', b'{"n": 2}')
    tag = a_tag()

    assert broker.fetch("q", tag=tag) == [1, b'{"n": 1}']

    assert broker.waiting() == [b'{"n": 2}']
    assert broker.held() == {tag: b'[{"n": 1},"","q"]'}
    delivery = only(deliveries)
    assert (delivery.tag, delivery.list_key, delivery.message) == (tag, "q", b'{"n": 1}')
    seconds, micros = client.time()  # type: ignore[misc]  # redis-py's unions
    score = client.zscore(UNACKED.index, tag)
    assert 0 <= seconds + micros / 1e6 - score < 60
    assert delivery.received_us == pytest.approx(score * 1e6, abs=2)


def test_unacked_entry_is_one_that_kombu_can_restore(broker: Broker) -> None:
    broker.publish(envelope("t1"))
    tag = broker.take()

    message, exchange, routing_key = json.loads(broker.held()[tag])

    assert (message["headers"]["id"], exchange, routing_key) == ("t1", "", "q")


def test_fetch_of_empty_lists_writes_nothing(broker: Broker) -> None:
    before = everything(broker.client)

    assert broker.fetch("q", "p") is None

    assert everything(broker.client) == before


def test_lists_are_looked_at_in_their_order(broker: Broker) -> None:
    """Queues by turn and, within each priority step, as kombu orders them."""
    steps = ["q", "p", "q\x06\x163", "p\x06\x163", "q\x06\x169"]
    for name in reversed(steps):
        broker.publish(name.encode(), name.encode(), to=name)

    answers = [broker.fetch(*steps) for _ in range(2 * len(steps) + 1)]

    taken = [(position, message.decode()) for position, message in answers[:-1]]
    assert taken == [(n + 1, name) for n, name in enumerate(steps) for _ in range(2)]
    assert answers[-1] is None


def test_delivery_remembers_the_list_of_its_priority(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    broker.publish(b"{}", to="q\x06\x169")
    broker.take("q", "q\x06\x169")

    settle(deliveries, only(deliveries))

    assert broker.waiting("q\x06\x169") == [b"{}"]


def test_list_with_spaces_and_quotes_in_its_name_gets_its_message_back(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    name = 'pre fix:{q} "à la" \\ ,"","x'
    broker.publish(b"{}", to=name)
    tag = broker.take(name)
    assert json.loads(broker.held()[tag]) == [{}, "", name]

    settle(deliveries, only(deliveries))

    assert broker.waiting(name) == [b"{}"]


def test_worker_without_a_living_session_gets_nothing(broker: Broker) -> None:
    """Was V10: a paused worker wakes and fetches before its beat has noticed."""
    broker.publish(b"{}")
    before = everything(broker.client)

    assert broker.fetch(session="w9") == 0

    assert everything(broker.client) == before


@odd_messages
def test_message_comes_back_byte_for_byte_whatever_it_is(
    broker: Broker, deliveries: RedisDeliveryStore, message: bytes
) -> None:
    broker.publish(message)

    taken = broker.fetch("q")
    assert taken == [1, message]
    settle(deliveries, only(deliveries))

    assert broker.waiting() == [message]
    assert broker.held() == {}


@pytest.mark.parametrize("broken", ["unacked", "unacked_index", "owned", "list", "session"])
def test_fetch_that_meets_a_strange_key_loses_nothing(broker: Broker, keys: Keys, broken: str) -> None:
    """A Lua error does not undo what was written before it."""
    name = {"owned": keys.owned("w1"), "list": "strange", "session": keys.session("w1")}.get(broken, broken)
    strange = ("sadd", name, "x") if broken != "session" else ("del", name)
    broker.publish(b"1", b"2")
    broker.client.execute_command(*strange)

    try:
        answer = broker.fetch("strange", "q")
    except StoreError:
        answer = 0

    assert answer == 0
    assert broker.waiting() == [b"1", b"2"]
    assert broken == "unacked" or broker.held() == {}


def test_what_a_failed_fetch_has_left_is_settled_as_nothing(
    broker: Broker, deliveries: RedisDeliveryStore, keys: Keys
) -> None:
    broker.publish(b"1")
    broker.client.sadd("unacked", "x")
    with pytest.raises(StoreError):
        broker.fetch()
    broker.client.delete("unacked")
    left = only(deliveries)

    assert not settle(deliveries, left)

    assert deliveries.owned("w1") == []
    assert broker.client.zcard(UNACKED.index) == 0
    assert broker.waiting() == [b"1"]


def test_fetch_from_a_server_without_memory_loses_nothing(broker: Broker, full_memory: Callable[[], None]) -> None:
    broker.publish(b"1", b"2")
    before = everything(broker.client)
    full_memory()

    with pytest.raises(StoreError, match="memory"):
        broker.fetch()

    assert everything(broker.client) == before


def test_repeated_fetch_takes_no_second_message_under_the_same_tag(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    """A repeat by whatever lies between us and the server would overwrite the first message."""
    broker.publish(b"1", b"2")
    tag = a_tag()
    broker.fetch(tag=tag)

    broker.fetch(tag=tag)

    assert (broker.waiting(), only(deliveries).message) == ([b"2"], b"1")


# -- owned


def test_owned_are_those_of_one_session_in_order_of_receipt(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    broker.publish(*(b"%d" % n for n in range(20)))
    for n in range(20):
        broker.take(session="w1" if n % 2 else "w2")

    assert [int(delivery.message) for delivery in deliveries.owned("w1")] == list(range(1, 20, 2))
    assert [int(delivery.message) for delivery in deliveries.owned("w2")] == list(range(0, 20, 2))
    assert deliveries.owned("w9") == []


def test_named_are_those_that_are_still_owned(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    broker.publish(b"0", b"1", b"2")
    first, second, _ = broker.take(), broker.take(), broker.take()
    strange = broker_tag_of(broker, session="w2")

    found = deliveries.named("w1", [second, strange, first, a_tag()])

    assert [delivery.tag for delivery in found] == [first, second]
    assert deliveries.named("w1", []) == []


def broker_tag_of(broker: Broker, *, session: str) -> str:
    broker.publish(b"x", to="other")
    return broker.take("other", session=session)


def test_delivery_whose_entry_is_gone_has_no_message(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    """Kombu has acknowledged it, which knows no owner records."""
    broker.publish(b"1")
    broker.client.hdel(UNACKED.unacked, broker.take())

    assert only(deliveries).message == b""


# -- settle


@pytest.mark.parametrize(("front", "expected"), [(True, [b"new", b"2"]), (False, [b"2", b"new"])])
def test_settled_delivery_is_replaced_by_its_successor(
    broker: Broker, deliveries: RedisDeliveryStore, front: bool, expected: list[bytes]
) -> None:
    broker.publish(b"1", b"2")
    broker.take()

    assert settle(deliveries, only(deliveries), message=b"new", front=front)

    assert broker.waiting() == expected
    assert broker.held() == {}
    assert deliveries.owned("w1") == []
    assert broker.client.zcard(UNACKED.index) == 0


def test_delivery_is_settled_once(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    """Two sweepers, or a call whose reply was lost."""
    broker.publish(b"1")
    broker.take()
    delivery = only(deliveries)

    assert [settle(deliveries, delivery), settle(deliveries, delivery)] == [True, False]

    assert broker.waiting() == [b"1"]


def test_late_settlement_leaves_the_next_delivery_of_the_message_alone(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    broker.publish(b"1")
    broker.take()
    delivery = only(deliveries)
    settle(deliveries, delivery)
    tag = broker.take(session="w2")

    assert not settle(deliveries, delivery)

    assert set(broker.held()) == {tag}
    assert broker.waiting() == []


def test_deliveries_of_a_living_session_are_its_own(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    broker.publish(b"1")
    broker.take()
    before = everything(broker.client)

    assert not settle(deliveries, only(deliveries), dead=True)

    assert everything(broker.client) == before


def test_deliveries_of_a_dead_session_are_anybodys(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore
) -> None:
    broker.publish(b"1")
    broker.take()
    sessions.leave(a_session("w1"))

    assert settle(deliveries, only(deliveries), dead=True)

    assert broker.waiting() == [b"1"]


def test_settlement_of_what_kombu_has_acknowledged_brings_nothing_back(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    broker.publish(b"1")
    tag = broker.take()
    delivery = only(deliveries)
    broker.client.hdel(UNACKED.unacked, tag)
    broker.client.zrem(UNACKED.index, tag)

    assert not settle(deliveries, delivery)

    assert broker.waiting() == []
    assert deliveries.owned("w1") == []


def test_settlement_that_cannot_be_written_loses_nothing(
    broker: Broker, deliveries: RedisDeliveryStore, client: redis.Redis
) -> None:
    broker.publish(b"1")
    broker.take()
    delivery = only(deliveries)
    client.set("q", "a string")
    before = everything(client)

    with pytest.raises(StoreError):
        settle(deliveries, delivery)

    assert everything(client) == before


def test_settlement_on_a_server_without_memory_loses_nothing(
    broker: Broker, deliveries: RedisDeliveryStore, full_memory: Callable[[], None]
) -> None:
    broker.publish(b"1")
    broker.take()
    delivery = only(deliveries)
    before = everything(broker.client)
    full_memory()

    with pytest.raises(StoreError, match="memory"):
        settle(deliveries, delivery)

    assert everything(broker.client) == before


def test_many_are_settled_in_one_round_trip_each_with_its_own_answer(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    broker.publish(b"0", b"1", b"2")
    for _ in range(3):
        broker.take()
    owned = deliveries.owned("w1")
    settle(deliveries, owned[1])

    with commands(broker.client) as sent:
        answers = deliveries.settle_all(
            [(delivery, b"new " + delivery.message) for delivery in owned], session="w1", dead=False, front=False
        )

    assert answers == [True, False, True]
    assert broker.waiting() == [b"1", b"new 0", b"new 2"]
    # As one step: a fetch between two of them would break the order.
    steps = [command.split()[0] for command in sent if not command.startswith("SCRIPT")]
    assert steps == ["MULTI", *["EVALSHA"] * 3, "EXEC"]
    assert deliveries.settle_all([], session="w1", dead=False, front=False) == []


# -- acknowledge


def test_many_are_acknowledged_in_one_round_trip_whoever_holds_them_and_no_other(
    broker: Broker, deliveries: RedisDeliveryStore, client: redis.Redis
) -> None:
    broker.publish(b"1", b"2", b"3")
    first, second, third = broker.take(), broker.take(), broker.take()

    for _ in range(2):
        deliveries.acknowledge_all([first, third, "gone/1"])

    assert [delivery.tag for delivery in deliveries.owned("w1")] == [second]
    assert client.hkeys(UNACKED.unacked) == [second.encode()]
    assert client.zrange(UNACKED.index, 0, -1) == [second.encode()]


def test_acknowledged_delivery_is_gone_and_a_repeat_changes_nothing(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    broker.publish(b"1", b"2")
    first, second = broker.take(), broker.take()
    for _ in range(2):
        deliveries.acknowledge(first, session="w1")

    assert set(broker.held()) == {second}
    assert only(deliveries).tag == second
    assert broker.client.zcard(UNACKED.index) == 1
    assert broker.waiting() == []


def test_late_acknowledgement_leaves_the_restored_copy_alone(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore
) -> None:
    """Was V1: under one tag for both, the first holder's ack would delete the second one's entry."""
    broker.publish(b"1")
    first = broker.take()
    sessions.leave(a_session("w1"))
    settle(deliveries, only(deliveries), dead=True)
    second = broker.take(session="w2")

    deliveries.acknowledge(first, session="w1")

    assert set(broker.held()) == {second}
    assert only(deliveries, "w2").message == b"1"


def test_release_by_a_worker_that_was_taken_for_dead_leaves_the_restored_copy_alone(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore
) -> None:
    """Was V1, for the acknowledgement that is part of the release."""
    bench = RedisBench(broker.client)
    broker.publish(b"1")
    start = a_start(tag=broker.take())
    bench.store.acquire(start)
    sessions.leave(a_session("w1"))
    bench.store.expire(session="w1", limit=10)
    settle(deliveries, only(deliveries), dead=True)
    second = broker.take(session="w2")

    bench.store.release(start, ended=True, marker=True, state="success", acknowledge=True)

    assert set(broker.held()) == {second}
    assert only(deliveries, "w2").message == b"1"


# -- restore, in order


def reaper_of(client: redis.Redis, keys: Keys, deliveries: RedisDeliveryStore) -> Reaper:
    return Reaper(
        RedisSessionStore(client, keys, ttl=TTL, address=ADDRESS, unacked=UNACKED),
        RedisBench(client).store,
        deliveries=deliveries,
        unowned=None,
        session=lambda: None,
        lead=timedelta(seconds=4),
        tell=lambda event: None,
    )


@pytest.mark.parametrize("count", [6, 250])
def test_restored_messages_are_taken_next_and_in_their_order(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore, keys: Keys, count: int
) -> None:
    steps = ["q", "q\x06\x163"]
    expected = {name: [f"{name}-{n}" for n in range(count)] for name in steps}
    for name in steps:
        broker.publish(*map(envelope, expected[name]), to=name)
    for n in range(count - 2):
        for name in steps if n % 2 else reversed(steps):
            broker.take(name)
    sessions.leave(a_session("w1"))

    report = reaper_of(broker.client, keys, deliveries).sweep()

    assert (report.restored, report.sessions) == (2 * (count - 2), 1)
    assert {name: ids(broker.waiting(name)) for name in steps} == expected


@odd_messages
def test_reaper_restores_a_message_that_it_cannot_read(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore, keys: Keys, message: bytes
) -> None:
    """One such message must not keep the others of a dead worker from coming back."""
    broker.publish(envelope("t1"), message, envelope("t2"))
    for _ in range(3):
        broker.take()
    sessions.leave(a_session("w1"))

    report = reaper_of(broker.client, keys, deliveries).sweep()

    assert (report.restored, report.sessions) == (3, 1)
    first, middle, last = broker.waiting()
    assert ids([first, last]) == ["t1", "t2"]
    assert middle == message


@odd_messages
def test_message_is_cut_out_of_its_entry_undecoded(message: bytes) -> None:
    assert message_of(b"[" + message + b',"","q"]') == message
    assert message_of(b"") == b""


# -- deliveries without an owner


def unowned(broker: Broker, message: bytes, *, age: timedelta, tag: str = "kombu-tag") -> str:
    seconds, _ = broker.client.time()
    broker.client.hset(UNACKED.unacked, tag, json.dumps([message.decode(), "", "q"]))
    broker.client.zadd(UNACKED.index, {tag: seconds - age.total_seconds()})
    return tag


HOUR = timedelta(hours=1)


def restore(deliveries: RedisDeliveryStore, tag: str, *lists: str) -> bool:
    return deliveries.restore_unowned(tag, b"1", lists=lists or ("q",), visibility_timeout=HOUR)


def test_overdue_are_told_oldest_first_and_by_pages(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    for hours in (1, 2, 4, 3):
        unowned(broker, b"{}", age=hours * HOUR, tag=f"t{hours}")

    found = deliveries.overdue(visibility_timeout=1.5 * HOUR, limit=2)

    assert [tag for tag, _ in found] == ["t4", "t3"]
    assert json.loads(found[0][1]) == ["{}", "", "q"]
    assert len(deliveries.overdue(visibility_timeout=1.5 * HOUR, limit=9)) == 3
    assert deliveries.overdue(visibility_timeout=9 * HOUR, limit=9) == []


def test_overdue_names_index_entries_without_a_message(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    broker.client.hdel(UNACKED.unacked, unowned(broker, b"1", age=2 * HOUR))

    assert deliveries.overdue(visibility_timeout=HOUR, limit=9) == [("kombu-tag", b"")]
    assert not restore(deliveries, "kombu-tag")
    assert deliveries.overdue(visibility_timeout=HOUR, limit=9) == []


def test_overdue_delivery_is_restored_once_to_each_of_its_queues(
    broker: Broker, deliveries: RedisDeliveryStore
) -> None:
    tag = unowned(broker, b"1", age=2 * HOUR)

    assert [restore(deliveries, tag, "q", "p"), restore(deliveries, tag, "q", "p")] == [True, False]

    assert (broker.waiting("q"), broker.waiting("p")) == ([b"1"], [b"1"])
    assert broker.held() == {}
    assert broker.client.zcard(UNACKED.index) == 0


def test_delivery_that_was_refreshed_meanwhile_is_not_restored(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    tag = unowned(broker, b"1", age=2 * HOUR)
    unowned(broker, b"1", age=HOUR / 2)

    assert not restore(deliveries, tag)

    assert broker.waiting() == []
    assert set(broker.held()) == {tag}


def test_restore_that_fails_half_way_doubles_nothing(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    """It is tried again at each sweep."""
    tag = unowned(broker, b"1", age=2 * HOUR)
    broker.client.set("p", "a string")

    for _ in range(3):
        with pytest.raises(StoreError):
            restore(deliveries, tag, "q", "p")

    assert len(broker.waiting("q")) <= 1
    assert set(broker.held()) == {tag}


def test_owner_record_answers_for_a_delivery(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore
) -> None:
    broker.publish(b"1")
    tag = broker.take()

    assert deliveries.is_owned(tag, "w1")
    assert not deliveries.is_owned(tag, "w2")
    deliveries.acknowledge(tag, session="w1")
    assert not deliveries.is_owned(tag, "w1")


def test_pushed_message_waits_behind_the_others(broker: Broker, deliveries: RedisDeliveryStore) -> None:
    broker.publish(b"1")

    deliveries.push("q", b"2")

    assert broker.waiting() == [b"1", b"2"]


def test_every_step_tells_a_store_that_does_not_answer_by_one_error(keys: Keys) -> None:
    delivery = Delivery(tag="t", received_us=1, list_key="q", message=b"")
    with redis.Redis(port=servers.free_port(), retry=None) as nobody:
        deliveries = RedisDeliveryStore(nobody, keys, unacked=UNACKED, address=ADDRESS)
        steps: list[Callable[[], object]] = [
            lambda: deliveries.owned("w1"),
            lambda: deliveries.named("w1", ["t"]),
            lambda: settle(deliveries, delivery),
            lambda: deliveries.push("q", b""),
            lambda: deliveries.acknowledge("t", session="w1"),
            lambda: deliveries.overdue(visibility_timeout=HOUR, limit=1),
            lambda: deliveries.is_owned("t", "w1"),
            lambda: restore(deliveries, "t"),
        ]
        for step in steps:
            with pytest.raises(StoreError, match=ADDRESS):
                step()


def test_delivery_survives_the_death_of_its_session_for_any_time(
    broker: Broker, deliveries: RedisDeliveryStore, sessions: RedisSessionStore
) -> None:
    """A fleet that was away for a weekend finds its messages."""
    broker.publish(b"1")
    broker.take()

    time_passes(broker.client, timedelta(days=3))

    join(sessions, "w3")
    assert only(deliveries).message == b"1"
    assert settle(deliveries, only(deliveries), dead=True)
