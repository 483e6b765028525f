"""An app of its own for each test: its workers, its ledger in a database, its diary, and kills at named points."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from celery import _state
from sqlalchemy import Engine, text

from celery_selfheal import DeadLetterQueue
from celery_selfheal.database.migrate import upgrade
from celery_selfheal.keys import Keys
from celery_selfheal.testing import RedisServer, WorkerProcess

APPS = Path(__file__).parent / "apps"
PATIENCE_SECONDS = 90.0  # of a machine that does much else; no promise


class Office:
    """Starts workers of ``apps/ledger.py`` and reads the books afterwards.

    Args:
        broker: URL.
        redis: Leases and results of all brokers.
        engine: A database of this test alone.
        name: Of the app, and so of its queues: nothing is shared with another test.
    """

    def __init__(self, broker: str, redis: RedisServer, engine: Engine, folder: Path, *, name: str) -> None:
        self.folder = folder
        self.name = name
        self.engine = engine
        self.queue = f"{name}-queue"
        self.settings: dict[str, Any] = {
            "selfheal_redis_url": redis.url(0) if broker.startswith("redis") else redis.url(2),
            "selfheal_database_url": engine.url.render_as_string(hide_password=False),
            "task_default_queue": self.queue,
            "selfheal_reaper_interval": 0.3,
            "broker_connection_retry_on_startup": True,
        }
        self.workers: list[WorkerProcess] = []
        self.keys = Keys(prefix="selfheal", app=name)
        self._broker = broker
        self._redis = redis
        self._app_before = _state._tls.current_app
        self._ledger: ModuleType | None = None
        (folder / "diary.jsonl").touch()
        upgrade(engine)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE entries (name varchar(255), amount integer)"))

    @property
    def ledger(self) -> Any:
        """The app's module in this process, loaded with the settings at first use."""
        if self._ledger is None:
            with mock.patch.dict(os.environ, self._env()):
                spec = importlib.util.spec_from_file_location("ledger", APPS / "ledger.py")
                assert spec is not None
                assert spec.loader is not None
                self._ledger = importlib.util.module_from_spec(spec)
                sys.modules["ledger"] = self._ledger
                spec.loader.exec_module(self._ledger)
        return self._ledger

    @property
    def dlq(self) -> DeadLetterQueue:
        return DeadLetterQueue(self.ledger.app)

    def is_idle(self) -> bool:
        """Nothing waits, and nothing runs."""
        client = self._redis.client(0)
        inflight = self._redis.client(0 if self._broker.startswith("redis") else 2).hlen(f"{self.keys.root}:inflight")
        return not client.llen(self.queue) and not client.hlen("unacked") and not inflight

    def start(
        self, name: str = "w", *, ready: bool = True, die_at: Sequence[str] = (), **options: Any
    ) -> WorkerProcess:
        """Start a worker; ``die_at`` are the points at which its processes are killed, see ``apps/ledger.py``."""
        worker = WorkerProcess(
            "ledger",
            cwd=self.folder,
            log=self.folder / f"{name}.log",
            name=name,
            env=self._env(die_at=die_at),
            **options,
        )
        self.workers.append(worker)
        worker.start()
        if ready:
            worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def gate(self, task_id: str) -> Path:
        """Keep a body from ending until the returned file is removed."""
        gate = self.folder / f"gate.{task_id}"
        gate.touch()
        return gate

    def diary(self, event: str = "start", task_id: str = "") -> list[dict[str, Any]]:
        """What bodies noted, oldest first."""
        lines = [json.loads(line) for line in (self.folder / "diary.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == event and task_id in ("", line["id"])]

    def entries(self) -> Counter[str]:
        """How often each name is in the ledger: more than once is a doubled effect."""
        with self.engine.connect() as connection:
            return Counter(connection.execute(text("SELECT name FROM entries")).scalars())

    def jobs(self) -> dict[str, str]:
        """Status of each idempotency key."""
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT idempotency_key, status FROM processed_jobs")).all()
        return {row.idempotency_key: row.status for row in rows}

    def killed(self) -> set[str]:
        """Ids of the tasks that were killed at their point."""
        return {path.name.removeprefix("died.") for path in self.folder.glob("died.*")}

    def wait(self, what: str, condition: Callable[[], object], *, patience: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
            time.sleep(0.05)

    def results(self, results: Iterable[Any], *, patience: float = PATIENCE_SECONDS) -> list[Any]:
        return [result.get(timeout=patience, propagate=True) for result in results]

    def log(self, name: str) -> str:
        """What a worker has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(grace=0)
        if self._ledger is not None:
            if not self._broker.startswith("redis"):
                with self.ledger.app.connection_for_write() as connection, connection.channel() as channel:
                    for queue in (self.queue, f"{self.name}.dlq"):
                        channel.queue_delete(queue)
            self.ledger.app.close()
            sys.modules.pop("ledger", None)
        _state._set_current_app(self._app_before)
        self.engine.dispose()
        for database in range(3):
            client = self._redis.client(database)
            client.flushdb()
            client.close()

    def _env(self, *, die_at: Sequence[str] = ()) -> dict[str, str]:
        return {
            "LEDGER_NAME": self.name,
            "LEDGER_BROKER": self._broker,
            "LEDGER_RESULTS": self._redis.url(1),
            "LEDGER_SETTINGS": json.dumps(self.settings),
            "LEDGER_FOLDER": str(self.folder),
            "LEDGER_DIE_AT": ";".join(die_at),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }
