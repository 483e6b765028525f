from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from celery_selfheal.plugin.pool_limits import warn_of_pool


def worker(pool: str, *, app_limit: float | None = None, **limits: float | None) -> Any:
    tasks = {name: SimpleNamespace(name=name, soft_time_limit=limit) for name, limit in limits.items()}
    tasks["celery.ping"] = SimpleNamespace(name="celery.ping", soft_time_limit=1)
    app = SimpleNamespace(tasks=tasks, conf=SimpleNamespace(task_soft_time_limit=app_limit))
    return SimpleNamespace(app=app, pool=type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})())


def test_a_soft_time_limit_where_it_does_nothing_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_pool(worker("thread", app_limit=5, slow=3, quick=None))

    assert "do nothing in the thread pool (task_soft_time_limit, slow)" in caplog.text


def test_where_limits_work_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_pool(worker("prefork", app_limit=5, slow=3))
    warn_of_pool(worker("gevent", slow=None))

    assert caplog.text == ""


def test_eventlet_is_said_to_be_best_effort(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_pool(worker("eventlet"))

    assert "self.check() only" in caplog.text
