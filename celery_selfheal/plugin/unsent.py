"""Messages that were made, as Celery would send them, and that wait to be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from celery import Celery
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from celery_selfheal.plugin.publisher import Outgoing

T = TypeVar("T")

_FORMAT = 1  # of the text; another one is refused, not guessed at
_QUEUE_FIELDS = (
    *("routing_key", "durable", "exclusive", "auto_delete", "queue_arguments", "no_declare"),
    *("expires", "message_ttl", "max_length", "max_length_bytes", "max_priority"),
)
_EXCHANGE_FIELDS = ("name", "type", "durable", "auto_delete", "arguments", "delivery_mode", "no_declare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """One message, with what must be there before it can be sent.

    Attributes:
        declares: Queues and exchanges, as texts and numbers.
    """

    outgoing: Outgoing
    declares: Sequence[dict[str, Any]] = field(default=())

    @property
    def task_id(self) -> str:
        """Celery's message id."""
        return str(self.outgoing.headers.get("id") or self.outgoing.properties.get("correlation_id") or "")

    @property
    def task_name(self) -> str:
        """Name of the task; empty in messages of Celery's first protocol, which keep it in their body."""
        return str(self.outgoing.headers.get("task") or "")

    def encode(self) -> str:
        """As text, for people to read, too."""
        one = self.outgoing
        return str(
            dumps(  # type: ignore[no-untyped-call]  # kombu is untyped
                {
                    "format": _FORMAT,
                    "exchange": one.exchange,
                    "routing_key": one.routing_key,
                    "headers": one.headers,
                    "properties": one.properties,
                    "content_type": one.content_type,
                    "content_encoding": one.content_encoding,
                    "declares": list(self.declares),
                    "body": _text_or_bytes(one.body, one.content_encoding),
                }
            )
        )

    @classmethod
    def decode(cls, text: str) -> Unsent:
        """Read what ``encode`` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            read = loads(text)  # type: ignore[no-untyped-call]  # as above
            if read["format"] != _FORMAT:
                raise ValueError(f"its format is {read['format']!r}, and this celery_selfheal knows {_FORMAT}")
            body = read["body"]
            return cls(
                outgoing=Outgoing(
                    body=body.encode() if isinstance(body, str) else bytes(body),
                    content_type=str(read["content_type"]),
                    content_encoding=str(read["content_encoding"]),
                    headers=dict(read["headers"]),
                    properties=dict(read["properties"]),
                    exchange=str(read["exchange"]),
                    routing_key=str(read["routing_key"]),
                ),
                declares=[dict(one) for one in read["declares"]],
            )
        except (LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise ValueError(f"it is no message of ours: {type(exc).__name__}: {exc}") from exc

    def entities(self) -> Iterator[Any]:
        """The queues and exchanges, unbound."""
        for one in self.declares:
            if "exchange" in one:
                fields = {name: value for name, value in one.items() if name != "exchange"}
                yield Queue(exchange=Exchange(**one["exchange"]), **fields)  # type: ignore[no-untyped-call]  # as above
            else:
                yield Exchange(**one)  # type: ignore[no-untyped-call]  # as above


def make_unsent(app: Celery, publish: Callable[[], T]) -> tuple[T, list[Unsent]]:
    """Let Celery publish, and keep what it would send instead.

    Everything is done that comes before the sending: routing, serialization, ``before_task_publish``, and what the
    result backend must know of a chord. An event that a task was sent (``task_send_sent_event``) is sent at once.

    Returns:
        What ``publish`` returned, and the messages in their order: several for a group or a chord.
    """
    _intercept(app)
    made: list[Unsent] = []
    token = _catches.set(made)
    try:
        return publish(), made
    finally:
        _catches.reset(token)


#: Where messages of this thread or greenlet go, instead of the broker.
_catches: ContextVar[list[Unsent] | None] = ContextVar("selfheal_catches", default=None)


def _intercept(app: Celery) -> None:
    """Stand in the one way that every task message takes: a chord hands no producer down to its header."""
    amqp: Any = app.amqp
    send = amqp.send_task_message
    if isinstance(send, _Gate):
        return
    amqp.send_task_message = _Gate(app, send)


@dataclass(frozen=True, slots=True)
class _Gate:
    """Celery's ``send_task_message``, with a way aside."""

    app: Any
    send: Callable[..., Any]

    def __call__(self, producer: Any, name: str, message: Any, **options: Any) -> Any:
        made = _catches.get()
        if made is None:
            return self.send(producer, name, message, **options)
        with _catching(self.app, made) as catcher:
            return self.send(catcher, name, message, **{**options, "retry": False})


@contextmanager
def _catching(app: Celery, made: list[Unsent]) -> Iterator[Any]:
    with Connection(transport=_Transport) as connection:  # type: ignore[no-untyped-call]  # as above
        yield _Catcher(app, connection.default_channel, made)


class _Catcher(Producer):
    """Keeps task messages, and hands everything else to a producer of the application."""

    def __init__(self, app: Any, channel: _Channel, made: list[Unsent]) -> None:
        super().__init__(channel, auto_declare=False)  # type: ignore[no-untyped-call]  # as above
        self._app = app
        self._caught = channel
        self._made = made

    def publish(self, body: Any, *args: Any, declare: Any = None, **options: Any) -> None:
        if getattr(options.get("exchange"), "name", options.get("exchange")) == self._app.conf.event_exchange:
            with self._app.producer_or_acquire() as producer:
                producer.publish(body, *args, declare=declare, **options)
            return
        super().publish(body, *args, **{**options, "declare": (), "retry": False})  # type: ignore[no-untyped-call]  # as above
        self._made.append(Unsent(outgoing=self._caught.taken(), declares=[_written(one) for one in declare or ()]))


class _Channel(virtual.Channel):
    """Takes one message, as it would go over the wire but for the coding of its body."""

    do_restore = False
    _taken: Outgoing | None = None

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: Any = None,
        properties: Any = None,
    ) -> dict[str, Any]:
        encoding = content_encoding or "binary"
        kept = {name: value for name, value in (properties or {}).items() if value is not None}
        if priority is not None:
            kept["priority"] = priority
        if kept.get("expiration") is not None:
            kept["expiration"] = int(kept["expiration"]) / 1000  # ``publish`` takes seconds and writes milliseconds
        return {
            "body": body.encode("utf-8" if encoding == "binary" else encoding)
            if isinstance(body, str)
            else bytes(body),
            "content_type": content_type or "application/data",
            "content_encoding": encoding,
            "headers": dict(headers or {}),
            "properties": kept,
        }

    def basic_publish(self, message: Any, exchange: Any, routing_key: Any, **_: Any) -> None:
        self._taken = Outgoing(exchange=exchange or "", routing_key=routing_key or "", **message)

    def taken(self) -> Outgoing:
        """The message, once."""
        taken, self._taken = self._taken, None
        assert taken is not None  # noqa: S101  # ``publish`` has put it here
        return taken


class _Transport(virtual.Transport):
    Channel = _Channel
    driver_type = driver_name = "unsent"


def _written(entity: Any) -> dict[str, Any]:
    """A queue or an exchange as texts and numbers; bindings to further exchanges are left to whoever consumes."""
    if isinstance(entity, str):
        return _written(Queue(entity, exchange="", routing_key=entity))  # type: ignore[no-untyped-call]  # as above
    if isinstance(entity, Exchange):
        return {name: getattr(entity, name) for name in _EXCHANGE_FIELDS}
    fields = {name: getattr(entity, name) for name in _QUEUE_FIELDS}
    return {"name": entity.name, "exchange": _written(entity.exchange), **fields}


def _text_or_bytes(body: bytes, encoding: str) -> str | bytes:
    if encoding.lower() in ("utf-8", "utf8", "us-ascii", "ascii"):
        try:
            return body.decode()
        except UnicodeDecodeError:
            return body
    return body
