"""The sweep keeps the order, shares the rows with others, and lets neither poison nor an outage stand in its way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable

from celery import Celery
from sqlalchemy.orm import Session

from celery_selfheal import apply_on_commit
from celery_selfheal.database.tables import OutboxMessage
from celery_selfheal.plugin.install import install
from celery_selfheal.plugin.outbox import courier_of
from celery_selfheal.plugin.unsent import Unsent, make_unsent
from celery_selfheal.telemetry.events import Event, MessageSetAside
from celery_selfheal.testing import RedisServer
from integration.outbox.outlet import APPS, PATIENCE_SECONDS, Outlet


def leave_behind(outlet: Outlet, *messages: str) -> None:
    """Rows whose writer has died long ago."""
    with Session(outlet.engine) as session:
        session.add_all([OutboxMessage(task_id=f"row-{n}", message=one) for n, one in enumerate(messages)])
        session.commit()
    outlet.grow_old()


def a_message(outlet: Outlet, task_id: str, **options: object) -> str:
    signature = outlet.parcel.s(task_id).set(task_id=task_id, **options)
    _, (made,) = make_unsent(outlet.app, signature.apply_async)
    return made.encode()


def deliver(app: Celery) -> int:
    courier = courier_of(install(app))
    assert courier is not None
    return courier.deliver().sent


def test_two_sweeps_at_once_send_a_thousand_rows_once_each(outlet: Outlet) -> None:
    ids = [f"p{n:04}" for n in range(1000)]
    leave_behind(outlet, *(a_message(outlet, task_id) for task_id in ids))
    sent: list[int] = []

    threads = [threading.Thread(target=lambda: sent.append(deliver(outlet.app))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)

    assert sum(sent) == 1000
    assert outlet.count_waiting() == 0
    assert sorted(message.headers["id"] for message in outlet.queued()) == ids


def test_one_sweep_keeps_the_order_over_all_pages(outlet: Outlet) -> None:
    ids = [f"p{n:04}" for n in range(250)]
    leave_behind(outlet, *(a_message(outlet, task_id) for task_id in ids))

    assert deliver(outlet.app) == 250

    assert [message.headers["id"] for message in outlet.queued()] == ids


def test_poison_on_rabbitmq_blocks_nobody_and_is_kept(new_outlet: Callable[..., Outlet]) -> None:
    outlet = new_outlet("classic")
    no_exchange = json.loads(a_message(outlet, "no-exchange"))
    no_exchange.update(exchange="nowhere", declares=[])
    no_queue = json.loads(a_message(outlet, "no-queue"))
    no_queue.update(routing_key="no-such-queue", declares=[])
    told: list[Event] = []
    install(outlet.app).tell = told.append
    leave_behind(
        outlet,
        a_message(outlet, "good-1"),
        "no message at all",
        json.dumps(no_exchange),
        a_message(outlet, "good-2"),
        json.dumps(no_queue),
        a_message(outlet, "good-3"),
    )

    assert deliver(outlet.app) == 3

    assert {message.headers["id"] for message in outlet.queued()} == {"good-1", "good-2", "good-3"}
    assert outlet.waiting() == ["row-1", "row-2", "row-4"]
    reasons = {one.task_id: one.reason for one in told if isinstance(one, MessageSetAside)}
    assert "cannot be read" in reasons["row-1"]
    assert "nowhere" in reasons["row-2"]
    assert reasons["row-4"] == "no queue takes it"


def test_a_broker_that_is_away_delays_messages_and_loses_none(new_outlet: Callable[..., Outlet]) -> None:
    with RedisServer() as broker:
        outlet = new_outlet(broker=broker.url(0))
        broker.kill()
        with Session(outlet.engine) as session:
            results = [
                apply_on_commit(session, outlet.parcel.s(n).set(task_id=f"{n}", ignore_result=True)) for n in range(3)
            ]
            session.commit()
        assert outlet.waiting() == ["0", "1", "2"]
        broker.restart()
        outlet.grow_old()

        assert deliver(outlet.app) == 3

        assert [message.headers["id"] for message in outlet.queued()] == [result.id for result in results]


def test_the_command_line_and_the_task_sweep_the_outbox_too(new_outlet: Callable[..., Outlet]) -> None:
    outlet = new_outlet("redis")
    leave_behind(outlet, a_message(outlet, "one"))

    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "outlet", "selfheal", "reap", "--json"],
        cwd=APPS,
        env={**os.environ, **outlet._env(die_at="")},
        check=False,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )

    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["outbox"] == 1
    leave_behind(outlet, a_message(outlet, "two"))
    assert outlet.app.tasks["celery_selfheal.reap"].run()["outbox"] == 1
    assert [message.headers["id"] for message in outlet.queued()] == ["one", "two"]


def test_a_queue_that_nobody_has_made_yet_is_made_on_rabbitmq(new_outlet: Callable[..., Outlet]) -> None:
    outlet = new_outlet("classic")
    text = a_message(outlet, "first", queue=f"{outlet.name}-fresh")
    leave_behind(outlet, text)

    assert deliver(outlet.app) == 1

    outlet.queue = f"{outlet.name}-fresh"
    assert [message.headers["id"] for message in outlet.queued()] == ["first"]
    assert Unsent.decode(text).task_id == "first"
