"""What the adapter replaces in kombu's Redis transport has the shape that it was written for."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import kombu
import pytest
from celery import Celery
from kombu.transport import redis as kombu_redis

from celery_selfheal import install
from celery_selfheal.plugin.brokers.redis import CHANNEL_SHAPE, QOS_SHAPE, missing_shape
from celery_selfheal.plugin.steps import DeliveryStep

SEEN_VERSIONS = {(5, 5), (5, 6), (5, 7)}
NOWHERE = "redis://127.0.0.1:1/0"  # nothing listens there, and nothing may ask
REPLACED = ("_brpop_start", "_brpop_read")
REPLACED_OF_QOS = ("append", "ack", "reject", "restore_unacked", "restore_visible")

# Parameters after ``self``, of the methods that are replaced or called.
CHANNEL_SIGNATURES = {
    "_brpop_start": ["timeout"],
    "_brpop_read": ["options"],
    "_q_for_pri": ["queue", "pri"],
    "conn_or_acquire": ["client"],
}
QOS_SIGNATURES = {
    "append": ["message", "delivery_tag"],
    "ack": ["delivery_tag"],
    "reject": ["delivery_tag", "requeue"],
    "restore_unacked": ["client"],
    "restore_visible": ["start", "num", "interval"],
    "restore_by_tag": ["tag", "client", "leftmost"],
    "_flush": [],
}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def test_this_kombu_has_been_looked_at() -> None:
    """Fails on a new one: read its transport/redis.py against the adapter, then add it here."""
    assert tuple(kombu.VERSION[:2]) in SEEN_VERSIONS


@pytest.mark.parametrize(("name", "expected"), CHANNEL_SIGNATURES.items())
def test_a_channel_takes_what_the_adapter_takes(name: str, expected: list[str]) -> None:
    assert parameters(getattr(kombu_redis.Channel, name)) == expected


@pytest.mark.parametrize(("name", "expected"), QOS_SIGNATURES.items())
def test_its_bookkeeping_takes_what_the_adapter_takes(name: str, expected: list[str]) -> None:
    assert parameters(getattr(kombu_redis.QoS, name)) == expected


def test_the_poller_asks_and_reads_through_the_channel_instance() -> None:
    """Else a replacement on the instance would never be called."""
    poller = kombu_redis.MultiChannelPoller()
    channel = Mock(_in_poll=False, active_queues=["celery"], active_fanout_queues=[])
    channel.client.connection._sock.fileno.return_value = 7
    poller._chan_to_sock[channel, channel.client, "BRPOP"] = channel.client.connection._sock
    poller._fd_to_chan[7] = (channel, "BRPOP")
    handler = channel.handlers = {"BRPOP": Mock()}

    poller._register_BRPOP(channel)
    poller.on_readable(7)

    channel._brpop_start.assert_called_once_with()
    handler["BRPOP"].assert_called_once_with()


def test_a_full_channel_is_not_asked() -> None:
    poller = kombu_redis.MultiChannelPoller()
    channel = Mock(_in_poll=False, active_queues=["celery"], active_fanout_queues=[])
    channel.qos.can_consume.return_value = False
    poller.add(channel)

    poller.on_poll_start()

    channel._brpop_start.assert_not_called()


def test_what_is_delivered_counts_for_the_prefetch_limit_until_it_is_dirty() -> None:
    """The adapter writes ``_delivered`` and ``_dirty`` itself."""
    qos = kombu_redis.QoS(Mock(do_restore=False), prefetch_count=2)
    for tag in ("s/1", "s/2"):
        qos._delivered[tag] = Mock()
    assert not qos.can_consume()

    qos._dirty.add("s/1")

    assert qos.can_consume()
    qos._flush()
    assert list(qos._delivered) == ["s/2"]


class FakeQos:
    """Knows every name of the shape, and notices what is set on it."""

    def __init__(self, *without: str) -> None:
        for name in QOS_SHAPE:
            if name not in without:
                setattr(self, name, MagicMock(name=name))


class FakeChannel:
    def __init__(self, *without: str) -> None:
        for name in CHANNEL_SHAPE:
            if name not in without:
                setattr(self, name, MagicMock(name=name))
        self.handlers = {"BRPOP": Mock()}
        if "handlers" in without:
            del self.handlers
        if "qos" not in without:
            self.qos = FakeQos(*(name.removeprefix("qos.") for name in without))

    def look(self) -> dict[str, Any]:
        seen = dict(vars(self), handlers=dict(getattr(self, "handlers", {})))
        return {**seen, "of qos": dict(vars(self.qos))} if hasattr(self, "qos") else seen


def started(channel: FakeChannel, **settings: Any) -> DeliveryStep:
    """Run the consumer's step as Celery does after each connection."""
    app = Celery("shape", broker=NOWHERE, set_as_current=False)
    app.conf.update(settings)
    plugin = install(app)
    plugin.worker = Mock()
    consumer = SimpleNamespace(
        app=app,
        timer=Mock(),
        pool=None,
        task_consumer=SimpleNamespace(channel=channel),
        hub=None,
        loop=Mock(__name__="synloop"),
        **{f"on_{event}": Mock() for event in ("unknown_message", "unknown_task", "invalid_task", "decode_error")},
    )
    step = DeliveryStep(consumer)
    step.start(consumer)
    return step


def test_a_channel_of_the_known_shape_is_taken_over() -> None:
    """The control: what the tests below find untouched is touched here."""
    channel = FakeChannel()
    before = channel.look()

    started(channel)

    after = channel.look()
    for name in REPLACED:
        assert after[name] is not before[name]
    for name in REPLACED_OF_QOS:
        assert after["of qos"][name] is not before["of qos"][name]
    assert after["handlers"]["BRPOP"] is not before["handlers"]["BRPOP"]


@pytest.mark.parametrize("missing", [*CHANNEL_SHAPE, *(f"qos.{name}" for name in QOS_SHAPE)])
def test_an_unknown_shape_leaves_kombu_untouched_and_is_told_in_one_line(
    missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = FakeChannel(missing)
    before = channel.look()
    caplog.set_level(logging.INFO, "celery_selfheal")

    step = started(channel)

    assert missing_shape(channel) == [missing]
    assert channel.look() == before
    (message,) = caplog.messages
    assert missing in message
    assert "\n" not in message
    step.stop(None)


def test_the_setting_leaves_kombu_untouched_and_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    channel = FakeChannel()
    before = channel.look()
    caplog.set_level(logging.INFO, "celery_selfheal")

    step = started(channel, selfheal_redis_reliable_fetch=False)

    assert channel.look() == before
    (message,) = caplog.messages
    assert "selfheal_redis_reliable_fetch" in message
    assert "\n" not in message
    step.stop(None)


def test_a_transport_without_acknowledgements_is_left_untouched(caplog: pytest.LogCaptureFixture) -> None:
    channel = FakeChannel()
    before = channel.look()

    started(channel, broker_transport_options={"ack_emulation": False})

    assert channel.look() == before
    assert len(caplog.messages) == 1
