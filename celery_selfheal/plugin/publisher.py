"""Publishing that is confirmed by the broker, on a connection of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.entity import Queue
from kombu.exceptions import ChannelError

from celery_selfheal.clock import monotonic

KEPT_PROPERTIES = ("correlation_id", "reply_to", "priority", "message_id", "type", "app_id", "timestamp")
CONFIRM_SECONDS = 30.0
# From RabbitMQ 4 on a quorum queue drops what was looked at 20 times; a dead letter may be looked at for ever.
DELIVERY_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message on its way: a copy of one that was received, or one that waited for a commit.

    Attributes:
        properties: An ``expiration`` is in seconds.
    """

    body: bytes
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    exchange: str
    routing_key: str


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
            _publish(producer, copy_of(message, headers=headers, exchange="", routing_key=queue))

    def send_all(self, copies: Sequence[Outgoing]) -> list[bool]:
        """Publish many, on AMQP waiting once for the confirms of all of them.

        Returns:
            For each whether a queue has it. ``False``: none takes it, or not this one among the others of the call
            with the same exchange and routing key.

        Raises:
            Exception: of kombu's; any of them may have been sent or not.
        """
        with self.producer() as producer:
            connection = self._local.opened[1]
            if connection.transport.driver_type == "amqp":
                return _publish_confirmed(connection, copies)
            for one in copies:
                _publish(producer, one)
            return [True] * len(copies)

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
        is_quorum = self._app.conf.task_default_queue_type == "quorum"
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT} if is_quorum else None
        queue = Queue(name, exchange="", routing_key=name, durable=True, queue_arguments=arguments)  # type: ignore[no-untyped-call]  # kombu is untyped
        queue(channel).queue_declare()  # type: ignore[no-untyped-call]  # as above


def least_countdown(app: Celery, seconds: float | None) -> float | None:
    """A countdown that Celery can send: its delayed delivery on quorum queues refuses less than a second."""
    if not seconds or seconds >= 1:
        return seconds
    with app.connection_for_write() as connection:
        uses_quorum_queues, _ = detect_quorum_queues(app, connection.transport.driver_type)
    return 1.0 if uses_quorum_queues else seconds


def copy_of(message: Any, *, headers: Mapping[str, Any], exchange: str, routing_key: str) -> Outgoing:
    """Copy a kombu message: body, content type and encoding, and properties are kept, ``headers`` replace its own."""
    properties = message.properties or {}
    body = message.body or b""
    headers = dict(headers)
    if "compression" in headers and not message.errors:
        # Kombu has unpacked the body when it came.
        del headers["compression"]
    return Outgoing(
        body=bytes_of(body, message.content_encoding),
        content_type=message.content_type or "application/data",
        content_encoding=message.content_encoding or "binary",
        headers=headers,
        properties={
            **{name: properties[name] for name in KEPT_PROPERTIES if properties.get(name) is not None},
            "delivery_mode": 2,  # it outlives a restart of the broker, also if its producer did not mind
        },
        exchange=exchange,
        routing_key=routing_key,
    )


def bytes_of(body: bytes | str, encoding: str | None) -> bytes:
    """A body as it was sent: the AMQP library decodes text as it comes in."""
    if isinstance(body, str):
        try:
            return body.encode(encoding or "utf-8")
        except (LookupError, UnicodeError):
            return body.encode("utf-8", "surrogatepass")
    return bytes(body)


def _publish(producer: Any, one: Outgoing) -> None:
    producer.publish(
        one.body,
        exchange=one.exchange,
        routing_key=one.routing_key,
        content_type=one.content_type,
        content_encoding=one.content_encoding,
        headers=dict(one.headers),
        mandatory=True,
        retry=False,
        **one.properties,
    )


def _publish_confirmed(connection: Any, copies: Sequence[Outgoing]) -> list[bool]:
    """Each publish confirmed by itself waits for the broker's disk; together they wait once."""
    channel = connection.channel()
    channel.confirm_select()
    unconfirmed = dict(enumerate(copies, start=1))  # by the number that the broker counts them with
    refused: list[int] = []
    unrouted: set[tuple[str, str]] = set()

    def settled(number: int, multiple: bool) -> list[int]:
        numbers = [one for one in unconfirmed if one == number or (multiple and one < number)]
        for one in numbers:
            del unconfirmed[one]
        return numbers

    channel.events["basic_ack"].add(settled)
    channel.events["basic_nack"].add(lambda number, multiple: refused.extend(settled(number, multiple)))
    # A return does not say which message it was, only where it was to go.
    channel.events["basic_return"].add(lambda _, exchange, routing_key, __: unrouted.add((exchange, routing_key)))
    for one in copies:
        properties = dict(one.properties)
        if properties.get("expiration") is not None:
            properties["expiration"] = str(int(float(properties["expiration"]) * 1000))
        message = channel.prepare_message(
            one.body,
            priority=properties.pop("priority", None),
            content_type=one.content_type,
            content_encoding=one.content_encoding,
            headers=dict(one.headers),
            properties=properties,
        )
        channel._basic_publish(message, exchange=one.exchange, routing_key=one.routing_key, mandatory=True)
    give_up_at = monotonic() + CONFIRM_SECONDS
    while unconfirmed:
        connection.drain_events(timeout=max(0.01, give_up_at - monotonic()))
    channel.close()
    return [
        number not in refused and (one.exchange, one.routing_key) not in unrouted
        for number, one in enumerate(copies, start=1)
    ]
