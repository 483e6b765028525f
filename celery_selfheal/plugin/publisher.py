"""Publishing that is confirmed by the broker, on a connection of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu.entity import Queue
from kombu.exceptions import ChannelError


class Publisher:
    """Sends messages of ours: unroutable or unconfirmed is an error, never a silent loss.

    One connection a thread and process, opened on first use, opened anew after an error or a fork.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._local = threading.local()

    @contextmanager
    def producer(self) -> Iterator[Any]:
        """A producer on the confirming connection.

        Raises:
            kombu.exceptions.OperationalError: the broker cannot be reached.
        """
        producer = self._producer()
        try:
            yield producer
        except BaseException:
            # Whatever went wrong, a half-spoken channel is not used again.
            self.close()
            raise

    def send_raw(self, message: Any, *, headers: Mapping[str, Any], queue: str, declare: bool) -> None:
        """Publish the bytes of a received message to a queue, through the anonymous exchange.

        Args:
            message: A kombu message; body, content type and encoding, and properties are kept as they are.
            declare: Make the queue first, if it is not there.
        """
        with self.producer() as producer:
            if declare:
                self._declare(producer, queue)
            properties = message.properties or {}
            kept = {
                name: properties[name]
                for name in ("correlation_id", "reply_to", "priority", "message_id", "type", "app_id", "timestamp")
                if properties.get(name) is not None
            }
            body = message.body
            producer.publish(
                body.encode() if isinstance(body, str) and message.content_encoding in (None, "binary") else body,
                exchange="",
                routing_key=queue,
                content_type=message.content_type or "application/data",
                content_encoding=message.content_encoding or "binary",
                headers=dict(headers),
                delivery_mode=2,
                mandatory=True,
                retry=False,
                **kept,
            )

    def close(self) -> None:
        """Close this thread's connection."""
        _, connection, _ = getattr(self._local, "opened", (0, None, None))
        self._local.opened = None
        if connection is not None:
            try:
                connection.release()
            except Exception:  # noqa: BLE001  # a broken connection may refuse even that, in its driver's own way
                return

    def _producer(self) -> Any:
        opened = getattr(self._local, "opened", None)
        if opened is None or opened[0] != os.getpid():
            connection = self._app.connection_for_write()
            connection.transport_options = {**(connection.transport_options or {}), "confirm_publish": True}
            connection.ensure_connection(max_retries=1, interval_start=0)
            opened = (os.getpid(), connection, self._app.amqp.Producer(connection))
            self._local.opened = opened
        return opened[2]

    def _declare(self, producer: Any, name: str) -> None:
        """Declare lazily, and leave an existing queue as it is: its arguments cannot be changed."""
        channel = producer.channel
        try:
            with channel.connection.client.channel() as probe:
                probe.queue_declare(queue=name, passive=True)
                return
        except (ChannelError, *channel.connection.channel_errors):
            pass
        arguments = {"x-queue-type": "quorum"} if self._app.conf.task_default_queue_type == "quorum" else None
        queue = Queue(name, exchange="", routing_key=name, durable=True, queue_arguments=arguments)  # type: ignore[no-untyped-call]  # kombu is untyped
        queue(channel).queue_declare()  # type: ignore[no-untyped-call]  # as above
