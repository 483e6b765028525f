"""The tasks that measured workers run, on Celery as it is and with the plugin."""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any

import redis
from celery import Celery, Task

from celery_selfheal import SelfHealTask

APP = "benchmarks.worker"
URL_VARIABLE = "BENCHMARK_REDIS_URL"
PLAIN_VARIABLE = "BENCHMARK_PLAIN"
QUEUE = "celery"  # Celery's default
TOLD = "told"
"""List in database 1 of the server: what naps have told, as JSON ``[event, name, instant]``."""

HOLD_SECONDS = 300.0  # until it is killed


def make_app(url: str, *, plain: bool) -> Celery:
    """Make the application.

    Args:
        url: Broker and result backend.
        plain: Celery's own task class with late acknowledgement, instead of ours.
    """
    app = Celery("benchmark", broker=url, backend=url)
    app.conf.update(
        # The log tells the instant on the clock that tasks use, too.
        worker_log_format="%(created).6f %(levelname)s %(message)s",
        broker_connection_retry_on_startup=True,
    )
    options: dict[str, Any] = {"base": Task, "acks_late": True} if plain else {"base": SelfHealTask}
    # Both kinds of application live in one process here, and must not lend each other their tasks.
    options["shared"] = False

    @app.task(name="nothing", ignore_result=True, **options)
    def nothing() -> None:
        pass

    @app.task(name="nothing_plain", ignore_result=True, base=Task, acks_late=True, shared=False)
    def nothing_plain() -> None:
        pass

    @app.task(name="nothing_with_result", **options)
    def nothing_with_result() -> None:
        pass

    @app.task(name="nothing_under_lock", ignore_result=True, bind=True, **options)
    def nothing_under_lock(self: Any) -> None:
        with _client(url, os.getpid()).lock(f"lock:{self.request.id}", timeout=10):
            pass

    @app.task(name="nap", ignore_result=True, **options)
    def nap(name: str, hold: bool, seconds: float) -> None:
        """Sleep for ``seconds``; with ``hold``, the first start sleeps until it is killed."""
        started = time.time()
        client = _client(url.rpartition("/")[0] + "/1", os.getpid())
        is_first = client.incr(f"starts:{name}") == 1
        client.rpush(TOLD, json.dumps(["started", name, started]))
        time.sleep(HOLD_SECONDS if hold and is_first else seconds)
        client.rpush(TOLD, json.dumps(["ended", name, time.time()]))

    return app


@functools.cache
def _client(url: str, pid: int) -> Any:
    """One client a process: a forked child must not talk on its parent's connection."""
    return redis.Redis.from_url(url)
