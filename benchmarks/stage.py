"""A private server, and workers on it."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from benchmarks.tasks import APP, PLAIN_VARIABLE, QUEUE, URL_VARIABLE
from celery_selfheal.testing import RedisServer, WorkerProcess

ROOT = Path(__file__).resolve().parents[1]


class Stage:
    """Starts what a benchmark needs, and ends all of it, however the benchmark ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="selfheal-benchmark-"))
        self._workers: list[WorkerProcess] = []
        self.server = RedisServer()

    @property
    def url(self) -> str:
        """Database 0 of the server."""
        return self.server.url()

    def client(self, db: int = 0) -> Any:  # redis-py's types differ between the versions that we support
        """A client of the server, on connections of its own."""
        return self.server.client(db)

    def worker(
        self,
        *,
        plain: bool = False,
        concurrency: int = 1,
        prefetch: int = 4,
        pid_namespace: bool = False,
        app: str = APP,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> WorkerProcess:
        """Start a worker, without waiting until it is ready."""
        name = f"w{len(self._workers) + 1}"
        worker = WorkerProcess(
            app,
            cwd=ROOT,
            log=self._folder / f"{name}.log",
            name=name,
            concurrency=concurrency,
            prefetch=prefetch,
            pid_namespace=pid_namespace,
            env={URL_VARIABLE: self.url, PLAIN_VARIABLE: "yes" if plain else "", **(env or {})},
            args=args,
        )
        self._workers.append(worker)
        return worker.start()

    def __enter__(self) -> Stage:
        # So that its clean-up runs, too, when a supervisor or a shell ends this process.
        signal.signal(signal.SIGTERM, _leave)
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop(grace=0)
        self.server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def is_drained(client: Any) -> bool:
    """Whether nothing waits in the queue and nothing is unacknowledged."""
    with client.pipeline(transaction=False) as pipe:
        waiting, unacked = pipe.llen(QUEUE).hlen("unacked").execute()
    return not waiting and not unacked
