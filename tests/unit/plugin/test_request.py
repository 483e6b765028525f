"""What main leaves behind of a failure, for whoever gets a copy of its message."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery

from celery_selfheal import SelfHealTask, UnrecoverableError
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.request import SelfHealRequest


@pytest.fixture
def request_of_main() -> Any:
    """A request whose lease store was silent while its body ran: main settles what the child perhaps could not."""
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")

    @app.task(name="shop.pay", base=SelfHealTask, shared=False, lazy=False)
    def pay() -> None: ...

    worker = mock.Mock()
    worker.node = "w1"
    worker.was_silent_since.return_value = True
    worker.interruptions.of.return_value = None
    worker.announce.return_value = SimpleNamespace(token="t", tag=None, deadline_seconds=None)
    plugin_of(app).worker = worker
    message = mock.Mock(delivery_info={}, properties={}, headers={"id": "id-1", "task": "shop.pay"})
    request = SelfHealRequest(
        message,
        app=app,
        task=pay,
        on_ack=mock.Mock(),
        decoded=True,
        body=((), {}, {}),
        headers={"id": "id-1", "task": "shop.pay", "retries": 0},
        hostname="w1",
    )
    request.time_start = 1.0
    return request


def test_marker_of_a_failure_says_what_is_left_to_do(request_of_main: Any) -> None:
    """A marker without it would end the copy that is to be dead-lettered in this one's place."""
    try:
        raise UnrecoverableError("no such order")
    except UnrecoverableError:
        request_of_main.on_failure(ExceptionInfo())

    worker = plugin_of(request_of_main._app).worker
    worker.dead_letter.assert_called_once()
    (call,) = worker.ended_from_outside.call_args_list
    assert json.loads(call.kwargs["failure"])["reason"] == "unrecoverable"


def test_marker_of_a_success_leaves_nothing_to_do(request_of_main: Any) -> None:
    request_of_main.acknowledge()

    (call,) = plugin_of(request_of_main._app).worker.ended_from_outside.call_args_list
    assert call.kwargs["failure"] == ""
