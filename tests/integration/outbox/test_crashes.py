"""A process dies between a commit and its messages: none is lost, and a doubled one has no second effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_selfheal import headers as names
from celery_selfheal.plugin.install import install
from celery_selfheal.plugin.outbox import courier_of
from integration.outbox.outlet import Outlet

ORDERS = tuple(f"o{n:02}" for n in range(20))


def test_a_committed_order_is_sent_once_and_nothing_is_left(outlet: Outlet) -> None:
    assert outlet.produce(*ORDERS) == 0

    assert [message.headers["id"] for message in outlet.queued()] == [f"parcel-{name}" for name in ORDERS]
    assert outlet.waiting() == []


def test_what_dies_before_it_publishes_is_sent_by_the_sweep_in_order_and_once(outlet: Outlet) -> None:
    assert outlet.produce(*ORDERS, die_at="before publishing") == -9
    assert outlet.waiting() == [f"parcel-{name}" for name in ORDERS]

    outlet.start()

    outlet.wait("all parcels are sent", lambda: len(outlet.diary()) >= len(ORDERS))
    outlet.wait("the outbox is empty", lambda: outlet.count_waiting() == 0)
    assert outlet.diary() == list(ORDERS)


def test_what_dies_before_it_removes_is_sent_twice_as_the_same_message_and_has_one_effect(outlet: Outlet) -> None:
    assert outlet.produce(*ORDERS, die_at="before removing") == -9
    assert outlet.waiting() == [f"parcel-{name}" for name in ORDERS]

    worker = outlet.start(concurrency=1)

    outlet.wait("the outbox is empty", lambda: outlet.count_waiting() == 0)
    outlet.wait("both copies of all have come", lambda: worker.log_text().count("] received") == 2 * len(ORDERS))
    outlet.wait("every second copy has ended", lambda: worker.log_text().count("] ignored") == len(ORDERS))
    assert outlet.diary() == list(ORDERS)


def test_what_is_sent_again_has_the_same_id_and_instant_of_publication(outlet: Outlet) -> None:
    assert outlet.produce(*ORDERS, die_at="before removing") == -9
    first = [(message.headers["id"], message.headers[names.PUBLISHED]) for message in outlet.queued()]
    outlet.grow_old()
    courier = courier_of(install(outlet.app))
    assert courier is not None

    courier.deliver()

    assert [(message.headers["id"], message.headers[names.PUBLISHED]) for message in outlet.queued()] == first
    assert len(first) == len(ORDERS)


def test_a_task_that_dies_after_its_commit_has_one_effect_and_one_message(new_outlet: Callable[..., Outlet]) -> None:
    outlet = new_outlet("redis")
    outlet.start(die_at="before publishing", concurrency=2)

    outlet.order.apply_async(args=("one",), task_id="order-one")

    outlet.wait("the parcel is sent", outlet.diary)
    outlet.wait("the outbox is empty", lambda: outlet.count_waiting() == 0)
    assert (outlet.folder / "died").exists()
    assert outlet.app.AsyncResult("order-one").get(timeout=60) == "one"
    assert outlet.diary() == ["one"]


def test_a_task_sends_its_message_after_its_commit(outlet: Outlet) -> None:
    outlet.start(concurrency=2)

    results = [outlet.order.delay(name) for name in ORDERS]

    assert [result.get(timeout=60) for result in results] == list(ORDERS)
    outlet.wait("all parcels are sent", lambda: len(outlet.diary()) >= len(ORDERS))
    assert sorted(outlet.diary()) == list(ORDERS)
    assert sorted(outlet.diary("called")) == list(ORDERS)
    assert outlet.waiting() == []


@pytest.mark.parametrize("pool", ["gevent", "threads"])
def test_a_worker_of_any_pool_serves_the_outbox(new_outlet: Callable[..., Outlet], pool: str) -> None:
    if pool == "gevent":
        pytest.importorskip("gevent")
    outlet = new_outlet("redis")
    assert outlet.produce(*ORDERS, die_at="before publishing") == -9

    outlet.start(pool=pool, concurrency=1)

    outlet.wait("all parcels are sent", lambda: len(outlet.diary()) >= len(ORDERS))
    outlet.wait("the outbox is empty", lambda: outlet.count_waiting() == 0)
    assert sorted(outlet.diary()) == list(ORDERS)


def test_on_sqlite_nothing_is_lost_either(new_outlet: Callable[..., Outlet]) -> None:
    outlet = new_outlet("redis", database="sqlite")
    assert outlet.produce(*ORDERS, die_at="before publishing") == -9

    outlet.start(concurrency=1)

    outlet.wait("all parcels are sent", lambda: len(outlet.diary()) >= len(ORDERS))
    outlet.wait("the outbox is empty", lambda: outlet.count_waiting() == 0)
    assert sorted(outlet.diary()) == list(ORDERS)
