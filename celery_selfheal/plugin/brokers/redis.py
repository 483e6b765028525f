"""Reliable fetch on kombu's Redis transport: takes, owns, acknowledges and gives back in single steps.

Works on the channel *instance* of one consumer; producers, other consumers and the queues stay as they are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from queue import Empty
from types import MethodType
from typing import Any

from celery_selfheal.clock import monotonic
from celery_selfheal.errors import StoreError
from celery_selfheal.keys import Keys, delivery_tag, session_of_tag
from celery_selfheal.leases.scripts import NoScriptError, source
from celery_selfheal.plugin.brokers.layout import RedisLayout
from celery_selfheal.plugin.brokers.wait import Idle
from celery_selfheal.plugin.death import death_of_bytes
from celery_selfheal.plugin.worker import Worker
from celery_selfheal.redis_wire import command, packed
from celery_selfheal.sessions.redis import RedisDeliveryStore

logger = logging.getLogger("celery_selfheal")

NO_SESSION_PAUSE_SECONDS = 0.1
KNOWN_PLANS = 100  # orders of queues that are kept packed; kombu turns them round after each message

CHANNEL_SHAPE = (
    "_brpop_start",
    "_brpop_read",
    "_q_for_pri",
    "_queue_cycle",
    "active_queues",
    "client",
    "conn_or_acquire",
    "handlers",
    "priority_steps",
    "qos",
)
QOS_SHAPE = ("append", "ack", "reject", "restore_unacked", "restore_visible", "restore_by_tag", "_delivered", "_dirty")


def missing_shape(channel: Any) -> list[str]:
    """What the adapter needs and this kombu's channel has not."""
    missing = [name for name in CHANNEL_SHAPE if not hasattr(channel, name)]
    if "qos" not in missing:
        missing += [f"qos.{name}" for name in QOS_SHAPE if not hasattr(channel.qos, name)]
    return missing


@dataclass(frozen=True, slots=True)
class _Plan:
    """One order of lists to look into, with all words of the command but the delivery tag.

    Attributes:
        queues: The queue of each list.
    """

    queues: list[str]
    lists: list[str]
    words: int
    before_tag: bytes
    after_tag: bytes


@dataclass(frozen=True, slots=True)
class _Question:
    """What was asked of Redis last, and whose answer is due."""

    tag: str
    plan: _Plan


class ReliableFetch:
    """Replaces BRPOP and the unacked bookkeeping of one channel."""

    def __init__(
        self,
        channel: Any,
        *,
        worker: Worker,
        deliveries: RedisDeliveryStore,
        keys: Keys,
        layout: RedisLayout,
        idle: Idle,
    ) -> None:
        self._channel = channel
        self._qos = channel.qos
        self._worker = worker
        self._deliveries = deliveries
        self._keys = keys
        self._layout = layout
        self._idle = idle
        self._asked: _Question | None = None
        self._original_append = self._qos.append
        self._original_ack = self._qos.ack
        self._original_reject = self._qos.reject
        self._sha = self._load()
        self._plan = lru_cache(KNOWN_PLANS)(self._make_plan)

    def install(self) -> None:
        """Take over the channel."""
        channel, qos = self._channel, self._qos
        channel._brpop_start = self._ask
        channel._brpop_read = self._read
        channel.handlers["BRPOP"] = self._read
        channel.selfheal_forget = self._forget
        qos.append = self._append
        qos.ack = self._ack
        qos.reject = self._reject
        qos.restore_unacked = self._restore_unacked
        # The sweep does this duty, by Redis' clock and for deliveries without owner only.
        qos.restore_visible = MethodType(lambda self, *args, **kwargs: None, qos)

    def close(self) -> None:
        """The channel is gone, or will be."""
        self._idle.close()

    # -- taking messages

    def _ask(self, timeout: float | None = None) -> None:
        channel = self._channel
        queues = channel._queue_cycle.consume(len(channel.active_queues))
        if not queues:
            return
        self._idle.counts(len(queues) * len(channel.priority_steps))
        if not self._worker.may_fetch:
            self._idle.not_now(NO_SESSION_PAUSE_SECONDS)
        if self._idle.must_wait():
            return
        session = self._worker.session.name
        tag = delivery_tag(session, self._worker.next_delivery())
        plan = self._plan(session, tuple(queues), tuple(channel.priority_steps))
        connection = channel.client.connection
        channel._in_poll = connection
        channel._brpop_sent_at = monotonic()
        self._asked = _Question(tag, plan)
        connection.send_packed_command((command(plan.words, plan.before_tag, packed([tag]), plan.after_tag),))

    def _make_plan(self, session: str, queues: tuple[str, ...], steps: tuple[int, ...]) -> _Plan:
        lists = [
            (queue, self._layout.prefix + self._channel._q_for_pri(queue, step)) for step in steps for queue in queues
        ]
        keys = [
            self._keys.session(session),
            self._layout.unacked.unacked,
            self._layout.unacked.index,
            self._keys.owned(session),
            *[name for _, name in lists],
        ]
        return _Plan(
            queues=[queue for queue, _ in lists],
            lists=[name for _, name in lists],
            words=3 + len(keys) + 1 + len(lists),
            before_tag=packed(["EVALSHA", self._sha, len(keys), *keys]),
            after_tag=packed([json.dumps(queue) for queue, _ in lists]),
        )

    def _read(self, **options: Any) -> bool:
        channel = self._channel
        asked, self._asked = self._asked, None
        try:
            reply = channel.client.parse_response(channel.client.connection, "EVALSHA", **options)
        except NoScriptError:
            # The server was restarted or its scripts were flushed: nothing was taken.
            self._sha = self._load()
            raise Empty from None
        except channel.connection_errors:
            # Whether it was taken is unknown; if so it is ours, nobody knows it, and two beats later it goes back.
            channel.client.connection.disconnect()
            raise
        finally:
            channel._in_poll = None
            flush = getattr(channel, "_flush_brpop_reauth", None)
            if flush is not None:
                flush()
        if asked is None:
            raise Empty
        if reply == 0:
            # The session has run out: main takes a new incarnation before it takes messages.
            self._worker.wake()
            self._idle.not_now(NO_SESSION_PAUSE_SECONDS)
            raise Empty
        if not reply:
            self._idle.nothing(asked.plan.lists)
            raise Empty
        position, message = reply
        self._idle.found(asked.plan.lists[position - 1])
        self._deliver(asked.tag, asked.plan.queues[position - 1], message)
        return True

    def _deliver(self, tag: str, queue: str, message: bytes) -> None:
        channel = self._channel
        if channel._closing:
            self._worker.hand_over_later([tag])
            return
        channel._queue_cycle.rotate(queue)
        if queue not in channel.connection._callbacks:
            # The consumer was cancelled while the answer was under way.
            self._worker.hand_over_later([tag])
            return
        try:
            payload = json.loads(message)
            payload["properties"]["delivery_tag"] = tag
            if not isinstance(payload["body"], str):
                # Celery would fall over it when it reports that it cannot decode it, and the worker would end.
                raise TypeError(f"its body is no text but {type(payload['body']).__name__}")
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            self._refuse(tag, queue, exc)
            return
        try:
            channel.connection._deliver(payload, queue)
        except Exception as exc:
            if tag in self._qos._delivered:
                raise
            # Not even a message could be made of it: its body is cut short, say.
            self._refuse(tag, queue, exc)

    def _refuse(self, tag: str, queue: str, exc: Exception) -> None:
        logger.error("a message in queue %s cannot be read: %s: %s", queue, type(exc).__name__, exc)
        self._worker.dead_letter_raw(tag, death_of_bytes(exc, queue=queue, worker=self._worker.node))

    def _load(self) -> str:
        with self._channel.conn_or_acquire() as client:
            return str(client.script_load(source("celery_selfheal.sessions", "fetch")))

    # -- settling them

    def _append(self, message: Any, tag: str) -> None:
        self._worker.remember(tag, message)
        if session_of_tag(tag) is None:
            # Not taken by the script: a broadcast, say.
            self._original_append(message, tag)
            return
        if self._qos._dirty:
            self._qos._flush()
        self._qos._delivered[tag] = message

    def _ack(self, tag: str) -> None:
        session = session_of_tag(tag)
        if session is None:
            self._original_ack(tag)
            return
        if self._worker.is_pending(tag) or self._worker.acknowledges_in_bulk(tag):
            self._forget(tag)
            return
        try:
            self._deliveries.acknowledge(tag, session=session)
        except StoreError as exc:
            logger.warning("acknowledgement will be repeated: %s", exc)
            self._worker.acknowledge_later(tag)
        self._forget(tag)

    def _reject(self, tag: str, requeue: bool = False) -> None:
        session = session_of_tag(tag)
        if session is None:
            self._original_reject(tag, requeue=requeue)
            return
        if not requeue:
            self._ack(tag)
            return
        self._forget(tag)
        if self._worker.is_pending(tag):
            return
        try:
            for delivery in self._deliveries.named(session, [tag]):
                self._deliveries.settle(delivery, session=session, message=delivery.message, dead=False, front=False)
        except StoreError as exc:
            logger.warning("a rejected message will be requeued later: %s", exc)
            self._worker.hand_over_later([tag])

    def _forget(self, tag: str) -> None:
        """Give its prefetch slot free."""
        self._qos._dirty.add(tag)

    def _restore_unacked(self, client: Any = None) -> Sequence[Any]:
        """The channel closes: running tasks keep their deliveries, everything else goes back at once."""
        delivered = dict(self._qos._delivered)
        self._qos._delivered.clear()
        self._qos._dirty.clear()
        waiting = []
        for tag, message in delivered.items():
            if session_of_tag(tag) is None:
                self._qos.restore_by_tag(tag)
            elif not self._worker.is_running(message):
                waiting.append(tag)
        self._worker.hand_over_later(waiting)
        return ()
