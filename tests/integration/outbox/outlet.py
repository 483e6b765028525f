"""An outlet of its own for each test: a database, a broker, workers, and producers that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import Celery, _state
from kombu.entity import Queue
from sqlalchemy import Engine, create_engine, func, select, text, update
from sqlalchemy.orm import Session

from celery_selfheal import SelfHealTask
from celery_selfheal.database import engines
from celery_selfheal.database.instants import store_now
from celery_selfheal.database.migrate import upgrade
from celery_selfheal.database.tables import OutboxMessage
from celery_selfheal.testing import RedisServer, WorkerProcess

APPS = Path(__file__).parent / "apps"
PATIENCE_SECONDS = 90.0  # of a machine that does much else; no promise


class Outlet:
    """Starts producers and workers of ``apps/outlet.py``.

    Args:
        redis: Leases and results.
    """

    def __init__(self, broker: str, redis: RedisServer, database_url: str, folder: Path, *, name: str) -> None:
        self.folder = folder
        self.name = name
        self.broker = broker
        self.engine: Engine = create_engine(database_url)
        self.workers: list[WorkerProcess] = []
        self.queue = f"{name}-queue"
        self.settings: dict[str, Any] = {
            "selfheal_redis_url": redis.url(0) if broker.startswith("redis") else redis.url(2),
            "selfheal_database_url": database_url,
            "selfheal_outbox": True,
            "selfheal_reaper_interval": 0.3,
            "task_default_queue": self.queue,
            "broker_connection_retry_on_startup": True,
        }
        self._results = redis.url(1)
        self._app_before = _state._tls.current_app
        (folder / "diary.jsonl").touch()
        upgrade(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (name varchar(255))"))
        self.app = Celery(name, broker=broker, backend=self._results, set_as_current=False)
        self.app.conf.update(self.settings)

        @self.app.task(base=SelfHealTask, shared=False, name="outlet.parcel")
        def parcel(order: str) -> str:
            return order

        @self.app.task(base=SelfHealTask, shared=False, name="outlet.order")
        def order(name: str) -> str:
            return name

        self.parcel, self.order = parcel, order

    def produce(self, *names: str, die_at: str = "") -> int:
        """Place orders in a process of its own; returns its exit status."""
        done = subprocess.run(
            [sys.executable, str(APPS / "outlet.py"), *names],
            cwd=self.folder,
            env={**os.environ, **self._env(die_at=die_at)},
            check=False,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
        )
        (self.folder / "producer.log").write_bytes(done.stdout + done.stderr)
        return done.returncode

    def start(self, name: str = "w", *, die_at: str = "", **options: Any) -> WorkerProcess:
        worker = WorkerProcess(
            "outlet",
            cwd=self.folder,
            log=self.folder / f"{name}.log",
            name=name,
            env=self._env(die_at=die_at),
            **options,
        )
        self.workers.append(worker)
        worker.start()
        worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def grow_old(self) -> None:
        """Make all rows of the outbox as old as the sweep wants them."""
        with self.engine.begin() as connection:
            now = connection.execute(select(store_now())).scalar_one()
            connection.execute(update(OutboxMessage).values(created_at=now - timedelta(hours=1)))

    def waiting(self) -> list[str]:
        """Task ids in the outbox."""
        with Session(self.engine) as session:
            return list(session.scalars(select(OutboxMessage.task_id).order_by(OutboxMessage.id)))

    def count_waiting(self) -> int:
        with Session(self.engine) as session:
            return session.scalar(select(func.count()).select_from(OutboxMessage)) or 0

    def queued(self) -> list[Any]:
        """Messages in the queue, oldest first; takes them."""
        messages = []
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            queue = Queue(self.queue, exchange="", routing_key=self.queue)(channel)
            queue.queue_declare()
            while (message := queue.get(no_ack=True)) is not None:
                messages.append(message)
        return messages

    def diary(self, event: str = "parcel") -> list[str]:
        """Orders for which this was noted, in order."""
        lines = [json.loads(line) for line in (self.folder / "diary.jsonl").read_text().splitlines()]
        return [line["order"] for line in lines if line["event"] == event]

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s in vain: {what}"
            time.sleep(0.05)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(grace=0)
        self.app.close()
        engines.close_all()
        _state._set_current_app(self._app_before)
        self.engine.dispose()

    def _env(self, *, die_at: str) -> dict[str, str]:
        return {
            "OUTLET_NAME": self.name,
            "OUTLET_BROKER": self.broker,
            "OUTLET_RESULTS": self._results,
            "OUTLET_SETTINGS": json.dumps(self.settings),
            "OUTLET_FOLDER": str(self.folder),
            "OUTLET_DIE_AT": die_at,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }
