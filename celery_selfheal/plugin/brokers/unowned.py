"""Deliveries of workers without the plugin: their restore is kombu's duty, which we have taken over."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from celery import Celery

from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.keys import session_of_tag
from celery_selfheal.plugin.brokers.layout import RedisLayout
from celery_selfheal.sessions.redis import RedisDeliveryStore, message_of

logger = logging.getLogger("celery_selfheal")


class UnownedDeliveries:
    """Deliveries without owner record, from workers without the plugin: kombu's own duty, by Redis' clock."""

    def __init__(self, app: Celery, deliveries: RedisDeliveryStore, layout: RedisLayout) -> None:
        self._app = app
        self._deliveries = deliveries
        self._layout = layout

    def restore_overdue(self, *, limit: int) -> list[tuple[Envelope, str]]:
        """Put back those whose visibility timeout has passed."""
        timeout = self._layout.visibility_timeout
        overdue = self._deliveries.overdue(visibility_timeout=timeout, limit=limit)
        restored = []
        for tag, entry in overdue:
            session = session_of_tag(tag)
            if session is not None and self._deliveries.is_owned(tag, session):
                continue
            if not entry:
                # Nothing is left of it but its place in the index, which this takes away.
                self._deliveries.restore_unowned(tag, entry, lists=(), visibility_timeout=timeout)
                continue
            try:
                message, exchange, routing_key = _take_apart(entry)
            except (ValueError, TypeError) as exc:
                logger.error("delivery %s cannot be restored, its entry is of no form that we know: %s", tag, exc)
                continue
            envelope = Envelope.decode(message)
            lists = self._lists(exchange, routing_key, envelope)
            if lists and self._deliveries.restore_unowned(
                tag, envelope.restored(counted=True, started=False), lists=lists, visibility_timeout=timeout
            ):
                restored.append((envelope, tag))
        return restored

    def _lists(self, exchange: str, routing_key: str, envelope: Envelope) -> Sequence[str]:
        # Kombu knows the bindings; a lookup that finds none must restore nothing, or the message would vanish.
        with self._app.connection_for_read() as connection:
            channel = connection.default_channel
            for queue in self._app.amqp.queues.values():
                # A new channel finds the bindings in Redis, but takes every exchange that it does not know for direct.
                if queue.exchange is not None and queue.exchange.name:
                    queue.exchange(channel).declare()
            queues = channel._lookup(exchange, routing_key) if exchange else [routing_key]
            priority = channel._get_message_priority(envelope.fields or {"properties": {}}, reverse=False)
            return [self._layout.prefix + channel._q_for_pri(queue, priority) for queue in queues if queue]


def _take_apart(entry: bytes) -> tuple[bytes, str, str]:
    import json

    try:
        message, exchange, routing_key = json.loads(entry)
    except (ValueError, TypeError, RecursionError):
        # Ours, and its message is no JSON: cut it out undecoded.
        queue = entry[entry.rindex(b',"","') + 5 : -1]
        return message_of(entry), "", json.loads(b'"' + queue.lstrip(b'"'))
    return json.dumps(message).encode(), exchange, routing_key
