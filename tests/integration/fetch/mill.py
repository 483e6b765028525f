"""Workers on one queue, the messages they were sent, and the place where each of them is."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state

from celery_selfheal.testing import RedisServer, WorkerProcess

APPS = Path(__file__).parent / "apps"
PATIENCE_SECONDS = 60.0  # of a machine that does much else; no promise
QUEUE = "celery"
DEAD_LETTERS = "mill.dlq"
HEALER_QUEUE = "healer"  # nobody sends there: who consumes it only sweeps
QUICK_HEALING = {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 1, "selfheal_reaper_interval": 0.5}


@dataclass(frozen=True)
class Line:
    """One line of the diary.

    Attributes:
        at: Monotonic seconds, the same for all processes of a machine.
    """

    event: str
    id: str
    at: float
    node: str


class Diary:
    """What task bodies wrote down; reads on from where it stopped, since it gets long."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._position = 0
        self._lines: list[Line] = []

    def lines(self, event: str) -> list[Line]:
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.decode().splitlines():
            kind, task_id, at, node = line.split(" ")
            self._lines.append(Line(kind, task_id, float(at), node))
        return [line for line in self._lines if line.event == event]

    def ids(self, event: str) -> list[str]:
        """In the order in which it happened."""
        return [line.id for line in self.lines(event)]


class Mill:
    """Starts workers of ``apps/mill.py`` on one server, and sends to them as an application without the plugin would.

    Args:
        settings: Celery's and ours, for producer and workers.
        stock: Celery's own task class.
    """

    def __init__(
        self, server: RedisServer, folder: Path, *, db: int = 0, stock: bool = False, settings: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.diary = Diary(folder / "diary")
        self.sent: list[str] = []
        self.workers: list[WorkerProcess] = []
        self.redis = server.client(db)
        self.redis.flushall()
        self.settings = {**QUICK_HEALING, **settings}
        self.prefix = self.settings.get("broker_transport_options", {}).get("global_keyprefix", "")
        self._env = {
            "MILL_BROKER": server.url(db),
            "MILL_SETTINGS": json.dumps(self.settings),
            "MILL_STOCK": "yes" if stock else "",
            "MILL_DIARY": str(self.diary.path),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }
        self._app_before = _state._tls.current_app
        self.app = Celery("mill-gate", broker=server.url(db), set_as_current=False)
        self.app.conf.update({key: value for key, value in self.settings.items() if not key.startswith("selfheal_")})

    def start(self, name: str = "", *, ready: bool = True, **options: Any) -> WorkerProcess:
        """Start a worker; ``options`` as for ``WorkerProcess``."""
        if options.get("pool") == "gevent":
            _require_gevent()
        name = name or f"w{len(self.workers)}"
        worker = WorkerProcess(
            "mill", cwd=self.folder, log=self.folder / f"{name}.log", name=name, env=self._env, **options
        )
        self.workers.append(worker)
        worker.start()
        if ready:
            worker.wait_ready(PATIENCE_SECONDS)
        return worker

    def start_healer(self) -> WorkerProcess:
        """A worker that takes nothing, and heals the others."""
        return self.start("healer", queues=HEALER_QUEUE, pool="solo")

    def send(self, count: int = 1, *, task: str = "grind", args: Iterable[Any] = (), **options: Any) -> list[str]:
        """Send so many tasks; returns their ids in order."""
        ids = [f"m{len(self.sent) + n}" for n in range(count)]
        self.sent += ids
        with self.app.producer_or_acquire() as producer:
            for task_id in ids:
                self.app.send_task(task, args=tuple(args), task_id=task_id, producer=producer, **options)
        return ids

    def waiting(self, name: str = QUEUE) -> list[str]:
        """Ids in a list, next one first."""
        messages = self.redis.lrange(self.prefix + name, 0, -1)
        return [json.loads(message)["headers"]["id"] for message in reversed(messages)]

    def held(self) -> list[str]:
        """Ids of what is taken and not acknowledged."""
        return [json.loads(entry)[0]["headers"]["id"] for entry in self.redis.hvals(f"{self.prefix}unacked")]

    def dead(self) -> list[str]:
        return self.waiting(DEAD_LETTERS)

    def lost(self) -> set[str]:
        """What was sent and is nowhere any more."""
        # Against the stream: what moves on meanwhile is seen at one of its places.
        known = {*self.waiting(), *self.held(), *self.dead(), *self.diary.ids("end")}
        return set(self.sent) - known

    def wait(self, what: str, condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
            time.sleep(0.01)

    def wait_started(self, task_ids: Iterable[str]) -> None:
        self.wait("they start", lambda: set(task_ids) <= set(self.diary.ids("start")))

    def wait_ended(self, task_ids: Iterable[str]) -> None:
        self.wait("they end", lambda: set(task_ids) <= set(self.diary.ids("end")))

    def wait_drained(self) -> None:
        """Wait until nothing waits and nothing is held."""
        self.wait("nothing is left", lambda: not self.redis.llen(self.prefix + QUEUE) and not self.held())

    def wait_idle(self, workers: int = 1) -> None:
        """Wait until so many connections block: as many workers wait for their next message."""
        self.wait("they wait", lambda: self.redis.info("clients")["blocked_clients"] >= workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(grace=0)
        self.app.close()
        _state._set_current_app(self._app_before)
        self.redis.flushall()
        self.redis.close()


def _require_gevent() -> None:
    """Without gevent the test is left out on this machine, and fails in CI."""
    if importlib.util.find_spec("gevent") is None:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail("CI must test the gevent pool: install gevent")
        pytest.skip("gevent is not installed")
