"""The dead letter queue on AMQP, and on every other transport of kombu's: read by taking all and giving it back."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps

from celery_selfheal import headers as names
from celery_selfheal.agents.dead_letters import DeadLetter, Entry, Outcome
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin.brokers.taking import take
from celery_selfheal.plugin.publisher import Publisher, copy_of

PAGE_SIZE = 100
SYNCED_ACKS = 25  # RabbitMQ holds back what goes to a quorum queue when 32 are under way
DELAYED = "celery_delayed_"  # in the names of the exchanges through which Celery's messages with an ETA travel


class KombuDeadLetterStore:
    """``DeadLetterStore`` on any kombu transport; on AMQP it is safe against kills.

    While a pass lasts, what it has read is hidden from others, and stays in the queue. A message that was moved here
    twice, since its worker was killed in between, is shown once, and settled with its twin.
    """

    def __init__(self, app: Celery, publisher: Publisher, *, queue: str) -> None:
        self._app = app
        self._publisher = publisher
        self._queue = queue

    @contextmanager
    def reading(self) -> Iterator[_Reading]:
        """See ``DeadLetterStore.reading``."""
        with self._app.connection_for_read() as connection:
            with answering(connection, "connect"):
                connection.ensure_connection(max_retries=1, interval_start=0)
            reading = _Reading(self._app, connection, self._publisher, self._queue)
            try:
                yield reading
            finally:
                reading.give_back()

    def __len__(self) -> int:
        """See ``DeadLetterStore``; on AMQP without what a pass has taken, and twins counted twice."""
        with self._app.connection_for_read() as connection, answering(connection, "count"):
            connection.ensure_connection(max_retries=1, interval_start=0)
            return _depth(connection, self._queue)


class _Reading:
    """See ``Reading``. Deliveries that were neither replayed nor dropped go back when it ends."""

    def __init__(self, app: Celery, connection: Any, publisher: Publisher, queue: str) -> None:
        self._app = app
        self._connection = connection
        self._publisher = publisher
        self._queue = queue
        self._channel: Any = None
        self._held: dict[bytes, list[Any]] = {}
        self._settled: set[bytes] = set()
        self._ahead: list[Any] = []
        self._unsynced_acks = 0
        self._exchanges: dict[str, bool] = {"": True}

    def pages(self) -> Iterator[list[Entry]]:
        """See ``Reading.pages``."""
        with answering(self._connection, "list"):
            left = _depth(self._connection, self._queue)
            self._channel = self._connection.channel()
        # Not beyond what was there when it began: what comes meanwhile is for the next pass.
        while left > 0:
            wanted = min(left, PAGE_SIZE)
            with answering(self._connection, "list"):
                messages, self._ahead = self._ahead[:wanted], self._ahead[wanted:]
                messages += self._take(wanted - len(messages))
                page = [entry for entry in map(self._enter, messages) if entry is not None]
            left = left - wanted if len(messages) == wanted else 0
            if page:
                yield page

    def replay(self, entries: Sequence[Entry]) -> list[Outcome]:
        """See ``Reading.replay``: published and confirmed, and only then acknowledged here."""
        copies, wanted = [], []
        with answering(self._connection, "replay"):
            for entry in entries:
                exchange, routing_key = self._origin_of(entry.letter)
                if self._exists(exchange):
                    headers = names.of_a_replay(entry.place.headers, replays=entry.letter.replays + 1)
                    copies.append(copy_of(entry.place, headers=headers, exchange=exchange, routing_key=routing_key))
                    wanted.append(entry)
            sent = dict(zip(map(id, wanted), self._publisher.send_all(copies), strict=True))
            self._settle([entry for entry in wanted if sent[id(entry)]])
        return [Outcome.MOVED if sent.get(id(entry)) else Outcome.UNROUTABLE for entry in entries]

    def drop(self, entries: Sequence[Entry]) -> list[Outcome]:
        """See ``Reading.drop``."""
        with answering(self._connection, "drop"):
            self._settle(entries)
        return [Outcome.MOVED for _ in entries]

    def give_back(self) -> None:
        """Put everything back that this pass has taken, in its order."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if not _is_amqp(self._connection):
            tags = [tag for tags in self._held.values() for tag in tags]
            for tag in [*tags, *(message.delivery_tag for message in self._ahead)]:
                channel.basic_reject(tag, requeue=True)
        # On AMQP this alone does it; and if even that does not go through, so does the end of the connection.
        with suppress(Exception):
            channel.close()

    def _take(self, count: int) -> list[Any]:
        return take(self._connection, self._channel, self._queue, count=count)

    def _enter(self, message: Any) -> Entry | None:
        """The entry of a message; ``None`` for the twin of one that was there before."""
        raw = dumps(envelope_of(message)).encode()  # type: ignore[no-untyped-call]  # kombu is untyped
        letter = DeadLetter.read(raw)
        key = _key_of(letter, message)
        if key in self._settled:
            self._acknowledge(message.delivery_tag)
            return None
        is_first = key not in self._held
        self._held.setdefault(key, []).append(message.delivery_tag)
        return Entry(raw, letter, message) if is_first else None

    def _settle(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            key = _key_of(entry.letter, entry.place)
            self._settled.add(key)
            for tag in self._held.pop(key, ()):
                self._acknowledge(tag)
        self._sync()

    def _acknowledge(self, tag: Any) -> None:
        self._channel.basic_ack(tag)
        self._unsynced_acks += 1
        if self._unsynced_acks >= SYNCED_ACKS:
            self._sync()

    def _sync(self) -> None:
        """Wait until the broker has taken the acknowledgements: a question to the queue is answered after them.

        Else the end of the channel overtakes those that a quorum queue has not got to yet.
        """
        self._unsynced_acks = 0
        self._ahead += self._take(1)

    def _origin_of(self, letter: DeadLetter) -> tuple[str, str]:
        """Exchange and routing key that lead to the queue of its origin, and to no other."""
        straight = ("", letter.queue or letter.routing_key)
        if not letter.exchange or DELAYED in letter.exchange:
            return straight
        declared = [queue for queue in self._app.amqp.queues.values() if queue.exchange]
        fed = [queue for queue in declared if queue.exchange.name == letter.exchange]
        kinds = {queue.exchange.type for queue in fed}
        if letter.queue and ("fanout" in kinds or (len(fed) > 1 and kinds != {"direct"})):
            # The exchange also feeds queues in which it did not die.
            return straight
        if not _is_amqp(self._connection):
            # Kombu emulates exchanges, and knows only those that were declared here.
            for queue in fed:
                queue(self._connection.default_channel).declare()
            if not self._connection.default_channel._lookup(letter.exchange, letter.routing_key):
                return straight
        return letter.exchange, letter.routing_key

    def _exists(self, exchange: str) -> bool:
        """Whether there is such an exchange: a publish to none would take those before it along."""
        if exchange not in self._exchanges:
            self._exchanges[exchange] = True
            if _is_amqp(self._connection):
                channel = self._connection.channel()
                try:
                    channel.exchange_declare(exchange, "direct", passive=True)
                except self._connection.channel_errors:
                    self._exchanges[exchange] = False
                else:
                    channel.close()
        return self._exchanges[exchange]


@contextmanager
def answering(connection: Any, step: str) -> Iterator[None]:
    """Turn "the broker did not answer" into ``StoreError``.

    Args:
        connection: Kombu's.
        step: What was asked of it.
    """
    errors = (OSError, OperationalError, *connection.connection_errors, *connection.channel_errors)
    try:
        yield
    except errors as exc:
        raise StoreError(connection.as_uri(), f"{step}: {type(exc).__name__}: {exc}") from exc


def envelope_of(message: Any) -> dict[str, Any]:
    """A received message in kombu's own envelope, as a Redis list would hold it."""
    one = copy_of(message, headers=message.headers or {}, exchange="", routing_key="")
    info = message.delivery_info or {}
    return {
        "body": base64.b64encode(one.body).decode(),
        "content-type": one.content_type,
        "content-encoding": one.content_encoding,
        "headers": {name: value for name, value in one.headers.items() if not name.startswith(names.BROKERS)},
        "properties": {
            **one.properties,
            "body_encoding": "base64",
            "delivery_info": {"exchange": info.get("exchange"), "routing_key": info.get("routing_key")},
        },
    }


def _key_of(letter: DeadLetter, message: Any) -> bytes:
    """The same for copies of one message that died once: they differ in nothing but the instant."""
    task_id = (message.headers or {}).get("id") or message.delivery_tag
    known = f"{task_id}\0{letter.replays}\0{letter.queue}\0".encode()
    return hashlib.sha256(known + letter.body).digest()[:16]


def _depth(connection: Any, queue: str) -> int:
    channel = connection.channel()
    try:
        found = channel.queue_declare(queue=queue, passive=True)
    except connection.channel_errors:
        # There is no such queue, since nothing has died yet.
        return 0
    channel.close()
    return int(found.message_count)


def _is_amqp(connection: Any) -> bool:
    return bool(connection.transport.driver_type == "amqp")
