"""Takes messages off a queue, unacknowledged: many at once where the transport can."""

from __future__ import annotations

import uuid
from typing import Any

QUIET_SECONDS = 2.0  # nothing comes any more: somebody else has taken what was there


def take(connection: Any, channel: Any, queue: str, *, count: int) -> list[Any]:
    """Messages of kombu's, in the queue's order; fewer than ``count`` where there are no more.

    One that cannot be decoded is taken like any other.

    Args:
        connection: That of ``channel``; nothing else may be under way on it.
    """
    if connection.transport.driver_name == "py-amqp" and count > 1:
        return _consume(connection, channel, queue, count)
    found: list[Any] = []
    while len(found) < count:
        message = channel.basic_get(queue=queue, no_ack=False)
        if message is None:
            break
        found.append(_to_python(channel, message))
    return found


def _consume(connection: Any, channel: Any, queue: str, count: int) -> list[Any]:
    """By a consumer of its own, limited by its prefetch: asked for one by one, each waits for a quorum's disks."""
    found: list[Any] = []
    tag = f"selfheal-{uuid.uuid4().hex}"
    channel.basic_qos(0, count, False)
    channel.basic_consume(
        queue=queue, consumer_tag=tag, no_ack=False, callback=lambda message: found.append(_to_python(channel, message))
    )
    try:
        while len(found) < count:
            connection.drain_events(timeout=QUIET_SECONDS)
    except TimeoutError:
        pass
    # What it has taken stays taken.
    channel.basic_cancel(tag)
    return found


def _to_python(channel: Any, message: Any) -> Any:
    # Not by kombu's Queue.get, which raises for a message that it cannot decode.
    convert = getattr(channel, "message_to_python", None)
    return message if convert is None else convert(message)
