"""One bank: its worker, what its bodies wrote down, and what is left in its Redis."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from celery_selfheal import install
from celery_selfheal.dead_letter import DEATH_HEADER, Death
from celery_selfheal.keys import Keys
from celery_selfheal.testing import RedisServer, TcpProxy, WorkerProcess

APPS = Path(__file__).parent / "apps"
APP = "bank"
DLQ = "bank.dlq"
PATIENCE_SECONDS = 60.0  # of a machine that does much else; no promise


@dataclass(frozen=True)
class Entry:
    """One line of the diary; ``at`` is in monotonic seconds, the same for all processes of a machine."""

    event: str
    id: str
    task: str
    retries: int
    pid: int
    at: float
    seen: dict[str, Any] = field(default_factory=dict)
    queue: str = ""


class Bank:
    """Sends to workers of ``apps/bank.py`` on a server of its own, and ends them all.

    Attributes:
        settings: Celery's and ours, for producer and workers alike; to be set before first use.
    """

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.workers: list[WorkerProcess] = []
        self.redis = server.client()
        self.keys = Keys(prefix="selfheal", app=APP)
        self._diary = folder / "diary.jsonl"
        self._diary.touch()
        self._app: Celery | None = None

    @property
    def app(self) -> Any:
        """The application as a web process has it, for sending and for results."""
        if self._app is None:
            self._app = Celery(APP, broker=self.server.url(0), backend=self.server.url(1), set_as_current=False)
            self._app.conf.update(self.settings)
            install(self._app)
            # Else kombu does not know that the exchange is one of topics, and drops what it cannot match.
            self._app.conf.task_queues = [
                Queue("celery"),
                Queue("slow"),
                Queue("euros", Exchange("payments", type="topic"), routing_key="pay.eur.#"),
            ]
        return self._app

    def send(self, task: str, *args: Any, task_id: str, **options: Any) -> Any:
        return self.app.send_task(f"bank.{task}", args, task_id=task_id, **options)

    def sign(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.signature(f"bank.{task}", args=args, **options)

    def start(self, name: str = "w1", *, via: TcpProxy | None = None, **options: Any) -> WorkerProcess:
        """Start a worker of the bank and wait until it is ready; ``via`` is its only way to the server."""
        given = {"concurrency": 2, "queues": "celery,slow,euros", **options}
        worker = WorkerProcess(
            APP, cwd=self.folder, log=self.folder / f"{name}.log", name=name, env=self._env(via), **given
        )
        self.workers.append(worker)
        worker.start()
        worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def entries(self, event: str = "start", task_id: str = "") -> list[Entry]:
        entries = [Entry(**json.loads(line)) for line in self._diary.read_text().splitlines()]
        return [entry for entry in entries if entry.event == event and task_id in ("", entry.id)]

    def attempts(self, task_id: str) -> list[int]:
        """Numbers of the attempts that have started, in that order."""
        return [entry.retries for entry in self.entries("start", task_id)]

    def waits(self, task_id: str) -> list[float]:
        """Seconds from one start of the task to its next one."""
        at = [entry.at for entry in self.entries("start", task_id)]
        return [later - earlier for earlier, later in itertools.pairwise(at)]

    def counts(self, event: str) -> Counter[tuple[str, int]]:
        """How often each attempt of each task has noted the event."""
        return Counter((entry.id, entry.retries) for entry in self.entries(event))

    def dead(self, task_id: str = "") -> list[tuple[Death, dict[str, Any]]]:
        """Dead letters with their whole message, oldest first."""
        messages = [json.loads(raw) for raw in reversed(self.redis.lrange(DLQ, 0, -1))]
        letters = [(Death.from_header(message["headers"][DEATH_HEADER]), message) for message in messages]
        return [letter for letter in letters if task_id in ("", letter[0].id)]

    def death(self, task_id: str) -> Death:
        """Wait for the one dead letter of a task."""
        self.wait(f"{task_id} is dead-lettered", lambda: self.dead(task_id))
        ((death, _),) = self.dead(task_id)
        return death

    def state(self, task_id: str) -> str:
        return str(self.app.AsyncResult(task_id).state)

    def result(self, task_id: str) -> Any:
        """Wait for the result; a failure is returned."""
        return self.app.AsyncResult(task_id).get(timeout=PATIENCE_SECONDS, propagate=False)

    def wait(
        self,
        what: str,
        condition: Callable[[], object],
        *,
        seconds: float = PATIENCE_SECONDS,
        meanwhile: Callable[[], object] = int,
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
            meanwhile()
            time.sleep(0.02)

    def wait_ended(self, ids: Iterable[str], **options: Any) -> None:
        wanted = set(ids)
        self.wait(f"all of {len(wanted)} end", lambda: wanted <= {entry.id for entry in self.entries("end")}, **options)

    def wait_nothing_left(self, *, dead: Iterable[str] = ()) -> None:
        """Wait until no message nor lease is left but the dead letters of these tasks."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == {}
        assert sorted(death.id for death, _ in self.dead()) == sorted(dead)

    def left(self) -> dict[str, object]:
        """All that must be gone when every task has ended; empty if it is."""
        traces = tuple(f"{self.keys.root}:{name}" for name in ("lease:", "journal:", "inflight", "expiry", "owned:"))
        messages = ("celery", "slow", "euros", "unacked")
        keys = sorted(key.decode() for key in self.redis.keys("*"))
        return {key: self.redis.type(key) for key in keys if key.startswith((*traces, *messages))}

    def _env(self, via: TcpProxy | None) -> dict[str, str]:
        urls = [self.server.url(0), self.server.url(1)]
        if via is not None:
            urls = [re.sub(r":\d+/", f":{via.port}/", url) for url in urls]
        return {
            "BANK_BROKER": urls[0],
            "BANK_RESULTS": urls[1],
            "BANK_SETTINGS": json.dumps(self.settings),
            "BANK_DIARY": str(self._diary),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }

    def close(self) -> None:
        """End everything; the logs stay."""
        for worker in self.workers:
            worker.stop(grace=0)
        if self._app is not None:
            self._app.close()
            # Else results that are collected later say good-bye to a server that is gone.
            self._app.backend.result_consumer._pubsub = None
        self.redis.close()
