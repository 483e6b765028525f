"""Workers whose leases live in PostgreSQL, what they wrote down, and what they left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import sqlalchemy as sa
from celery import _state

from celery_selfheal import DeadLetterQueue
from celery_selfheal.database import drivers, migrate
from celery_selfheal.testing import WorkerProcess
from celery_selfheal.testing.postgres import PostgresServer
from integration.fleet import APPS, PATIENCE_SECONDS, Diary

SHORT_TTL = {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 1, "selfheal_reaper_interval": 0.5}


class Crew:
    """Starts workers of ``apps/shop.py`` on a database of its own, and ends them all."""

    def __init__(self, server: PostgresServer, broker: str, folder: Path, *, migrated: bool = True) -> None:
        self.server = server
        self.folder = folder
        self.diary = Diary(folder / "diary.jsonl")
        self.url = drivers.parse(server.new_database())
        self.engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT")
        if migrated:
            migrate.upgrade(sa.create_engine(self.url))
        name = f"shop-{uuid.uuid4().hex[:8]}"
        self.settings: dict[str, Any] = {
            "task_default_queue": name,
            "selfheal_dlq": f"{name}.dlq",
            "selfheal_lease_backend": "postgres",
            "selfheal_database_url": self.url.render_as_string(hide_password=False),
        }
        self.workers: list[WorkerProcess] = []
        self._broker = broker
        self._app_before = _state._tls.current_app
        self._shop: ModuleType | None = None

    @property
    def shop(self) -> Any:
        """The shop's app in this process, for sending; loaded with the settings at first use."""
        if self._shop is None:
            with mock.patch.dict(os.environ, self._env()):
                spec = importlib.util.spec_from_file_location("shop", APPS / "shop.py")
                assert spec is not None
                assert spec.loader is not None
                self._shop = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(self._shop)
        return self._shop

    def start(self, name: str, *, ready: bool = True, **options: Any) -> WorkerProcess:
        """Start a worker in the test's folder; ``options`` as for ``WorkerProcess``."""
        worker = WorkerProcess(
            "shop", cwd=self.folder, log=self.folder / f"{name}.log", name=name, env=self._env(), **options
        )
        self.workers.append(worker)
        worker.start()
        if ready:
            worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def wait(self, what: str, condition: Callable[[], object], *, meanwhile: Callable[[], object] = int) -> None:
        """Wait until something is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s in vain until {what}: {self.left()}"
            meanwhile()
            time.sleep(0.05)

    def wait_started(self, *task_ids: str, times: int = 1) -> None:
        def counts() -> Counter[str]:
            return self.diary.start_counts()

        self.wait(f"{task_ids} have started", lambda: all(counts()[task_id] >= times for task_id in task_ids))

    def wait_ended(self, *task_ids: str) -> None:
        self.wait(f"{task_ids} have ended", lambda: set(task_ids) <= {entry.id for entry in self.diary.ends()})

    def wait_nothing_left(self) -> None:
        """Wait until no lease or journal is left, nor a session of a dead worker."""
        self.wait("nothing is left", lambda: not self.left())

    def left(self) -> dict[str, object]:
        left: dict[str, object] = {}
        leases = self.sql("SELECT row_to_json(l) FROM selfheal_leases l")
        if leases:
            left["leases"] = leases
        sessions = self.sql("SELECT name, expires_at::text FROM selfheal_sessions")
        if len(sessions) > sum(worker.alive for worker in self.workers):
            left["sessions"] = sessions
        return left

    def sql(self, statement: str, **arguments: Any) -> list[Any]:
        with self.engine.connect() as connection:
            result = connection.execute(sa.text(statement), arguments)
            return [tuple(row) for row in result] if result.returns_rows else []

    def counted(self, event: str) -> int:
        """How often the lease store counted an event, over all tasks."""
        counts = self.sql("SELECT value FROM selfheal_counters WHERE event = :event", event=event)
        return sum(value for (value,) in counts)

    def state_of(self, task_id: str) -> str:
        return str(self.shop.app.AsyncResult(task_id).state)

    def dead_letters(self) -> list[tuple[str, str]]:
        """Id and reason of each dead letter."""
        return [(letter.id, letter.reason) for letter in DeadLetterQueue(self.shop.app).list()]

    def close(self) -> None:
        """End everything; the logs stay."""
        for worker in self.workers:
            worker.stop(grace=0)
        if self._shop is not None:
            self._shop.app.close()
        _state._set_current_app(self._app_before)
        self.engine.dispose()

    def _env(self) -> Mapping[str, str]:
        return {
            "SHOP_BROKER": self._broker,
            "SHOP_RESULTS": f"db+{self.url.render_as_string(hide_password=False)}",
            "SHOP_SETTINGS": json.dumps(self.settings),
            "SHOP_DIARY": str(self.diary.path),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }
