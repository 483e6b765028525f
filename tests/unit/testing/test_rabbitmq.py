"""A private RabbitMQ node keeps what it confirmed, whatever is done to it, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu import Connection, Queue

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import processes
from celery_selfheal.testing.rabbitmq import BINARY_VARIABLE, RabbitServer, find_rabbitmq_binary


@pytest.fixture
def before() -> set[int]:
    """Processes that were there already."""
    return {row.pid for row in processes.process_table()}


@pytest.fixture
def server(before: set[int]) -> Iterator[RabbitServer]:
    """Without RabbitMQ the test is left out on this machine, and fails in CI."""
    try:
        find_rabbitmq_binary()
    except SettingsError as exc:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(str(exc))
        pytest.skip(str(exc))
    with RabbitServer() as running:
        yield running


@pytest.mark.timeout(240)
def test_a_node_may_be_paused_killed_and_started_again(server: RabbitServer, before: set[int]) -> None:
    with Connection(server.url(), transport_options={"confirm_publish": True}) as connection:
        Queue("orders", channel=connection.channel(), durable=True).declare()
        connection.Producer().publish("a1", routing_key="orders", delivery_mode=2)
    first_pid, port = server.pid, server.port

    server.pause()
    with pytest.raises(OSError, match="timed out"):
        Connection(server.url(), connect_timeout=1).connect()
    server.resume()
    server.kill()
    server.restart()

    assert server.pid != first_pid
    assert server.port == port
    with Connection(server.url()) as connection:
        message = Queue("orders", channel=connection.channel()).get(no_ack=True)
    assert message.payload == "a1"

    ours = {row.pid for row in processes.process_table() if row.parent == os.getpid() and row.pid not in before}
    assert len(ours) == 2  # the node, and Erlang's port mapper
    server.stop()
    assert not ours & {row.pid for row in processes.process_table()}


def test_a_binary_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "nothing"))

    with pytest.raises(SettingsError, match=f"{BINARY_VARIABLE} names no program"):
        find_rabbitmq_binary()
