"""An app of its own for each test, on any broker: its workers, its diary, and what is left of it all."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amqp.exceptions import NotFound
from celery import Celery
from kombu import Queue

from celery_selfheal import install
from celery_selfheal.dead_letter import DEATH_HEADER, Death
from celery_selfheal.keys import Keys
from celery_selfheal.testing import RedisServer, WorkerProcess

APPS = Path(__file__).parent / "apps"
PATIENCE_SECONDS = 60.0  # of a machine that does much else; no promise


@dataclass(frozen=True)
class Entry:
    """One line of the diary.

    Attributes:
        at: Monotonic seconds, the same for all processes of a machine.
        clock: Unix seconds.
    """

    event: str
    id: str
    node: str
    pid: int
    retries: int
    at: float
    clock: float
    seen: dict[str, Any] = field(default_factory=dict)


class Yard:
    """Sends to workers of ``apps/dock.py`` and ends them all.

    Args:
        kind: ``redis``, ``classic`` or ``quorum``.
        name: Of the app, and so of its queue: nothing is shared with another test.
        leases: Another server, if the leases live there.

    Attributes:
        settings: Celery's and ours, for producer and workers alike; to be set before first use.
        module: The workers' app, in the folder ``apps``.
    """

    module = "dock"
    apps = APPS

    def __init__(
        self, kind: str, broker: str, redis: RedisServer, folder: Path, *, name: str, leases: RedisServer | None = None
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.name = name
        self.queue = f"{name}-queue"
        self.settings: dict[str, Any] = {
            "selfheal_redis_url": (leases or redis).url(2),
            "task_default_queue": self.queue,
            "task_default_queue_type": "quorum" if kind == "quorum" else "classic",
            "task_default_exchange_type": "topic" if kind == "quorum" else "direct",
            "selfheal_reaper_interval": 0.5,
            "broker_connection_retry_on_startup": True,
            # Two tests may use the same id.
            "result_backend_transport_options": {"global_keyprefix": f"{name}-"},
        }
        if kind == "redis":
            names = {name: f"{self.name}-{name.removesuffix('_key')}" for name in ("unacked_key", "unacked_index_key")}
            self.settings["broker_transport_options"] = names
        is_together = kind == "redis" and leases is None
        if is_together:
            del self.settings["selfheal_redis_url"]
        self.workers: list[WorkerProcess] = []
        self.keys = Keys(prefix="selfheal", app=name)
        self.redis = redis.client(0)
        self.leases = (leases or redis).client(0 if is_together else 2)
        self._broker, self._results = broker, redis.url(1)
        self._diary = folder / "diary.jsonl"
        self._diary.touch()
        self._app: Celery | None = None

    @property
    def app(self) -> Any:
        """The application as a web process has it, for sending and for results."""
        if self._app is None:
            self._app = Celery(self.name, broker=self._broker, backend=self._results, set_as_current=False)
            self._app.conf.update(self.settings)
            install(self._app)
        return self._app

    def start(self, name: str, **options: Any) -> WorkerProcess:
        """Start a worker and wait until it is ready."""
        worker = WorkerProcess(
            self.module, cwd=self.folder, log=self.folder / f"{name}.log", name=name, env=self._env(), **options
        )
        self.workers.append(worker)
        worker.start()
        worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def send(self, task: str, *args: Any, task_id: str, **options: Any) -> Any:
        return self.app.send_task(f"{self.module}.{task}", args, task_id=task_id, **options)

    def entries(self, event: str = "", task_id: str = "") -> list[Entry]:
        # A line that is just being written has no end yet.
        *lines, _ = self._diary.read_text().split("\n")
        entries = [Entry(**json.loads(line)) for line in lines]
        return [one for one in entries if event in ("", one.event) and task_id in ("", one.id)]

    def counts(self, event: str) -> Counter[str]:
        """How often each task id noted it."""
        return Counter(entry.id for entry in self.entries(event))

    def wait(self, what: str, condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}\n{self.entries()}"
            time.sleep(0.02)

    def wait_noted(self, event: str, *task_ids: str, times: int = 1) -> list[Entry]:
        """Wait until each of the tasks has noted the event so often; returns the entries of the first one."""
        self.wait(
            f"{event} of {', '.join(task_ids)}",
            lambda: all(self.counts(event)[task_id] >= times for task_id in task_ids),
        )
        return self.entries(event, task_ids[0])

    def wait_over(self, worker: WorkerProcess) -> None:
        self.wait(f"{worker.name} ends", lambda: not worker.alive)

    def counted(self, event: str) -> int:
        """How often the lease store counted an event, over all tasks."""
        counts = self.leases.hgetall(self.keys.counters)
        return sum(int(count) for name, count in counts.items() if name.decode().startswith(f"{event}|"))

    def state(self, task_id: str) -> str:
        return str(self.app.AsyncResult(task_id).state)

    def deaths(self) -> list[Death]:
        """Dead letters; they stay where they are."""
        queue = f"{self.name}.dlq"
        if self.kind == "redis":
            headers = [json.loads(raw)["headers"] for raw in self.redis.lrange(queue, 0, -1)]
        else:
            headers = []
            with suppress(NotFound), self.app.connection_for_read() as connection, connection.channel() as channel:
                while (message := Queue(queue, channel=channel).get()) is not None:
                    headers.append(message.headers)
        return [Death.from_header(one[DEATH_HEADER]) for one in headers]

    def left(self) -> dict[str, object]:
        """Leases, journals and messages that must be gone when every task has ended; empty if they are."""
        traces = tuple(f"{self.keys.root}:{name}" for name in ("lease:", "journal:", "inflight", "expiry", "owned:"))
        found = {key.decode(): self.leases.type(key) for key in self.leases.keys(f"{self.keys.root}*")}
        left: dict[str, object] = {key: kind for key, kind in found.items() if key.startswith(traces)}
        if self.kind == "redis":
            for key in (self.queue, f"{self.name}-unacked"):
                if self.redis.exists(key):
                    left[key] = self.redis.type(key)
        else:
            with self.app.connection_for_read() as connection, connection.channel() as channel:
                ready = channel.queue_declare(self.queue, passive=True).message_count
            if ready:
                left[self.queue] = ready
        return left

    def wait_nothing_left(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == {}

    def close(self) -> None:
        """End everything; the logs stay."""
        for worker in self.workers:
            worker.stop(grace=0)
        if self._app is not None:
            self._app.close()
            # Else results that are collected later say good-bye to a server that is gone.
            self._app.backend.result_consumer._pubsub = None
        self.redis.close()
        self.leases.close()

    def _env(self) -> Mapping[str, str]:
        return {
            "DOCK_NAME": self.name,
            "DOCK_BROKER": self._broker,
            "DOCK_RESULTS": self._results,
            "DOCK_SETTINGS": json.dumps(self.settings),
            "DOCK_DIARY": str(self._diary),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.apps), os.environ.get("PYTHONPATH")])),
        }
