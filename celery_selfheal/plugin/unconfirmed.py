"""Dead letters on brokers without one-step moves: the message is kept until its letter is confirmed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery_selfheal import headers as names
from celery_selfheal.dead_letter import DEATH_HEADER, Death
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.telemetry.events import TaskDeadLettered

logger = logging.getLogger("celery_selfheal")

PUBLISH_PAUSE_SECONDS = 2.0  # between two tries of a dead letter that the broker does not confirm


class UnconfirmedLetters:
    """Dead letters for brokers without one-step moves: published with confirm, then acknowledged by Celery.

    What cannot be published keeps its message unacknowledged, and is tried again by the worker's timer. When the
    message's channel is gone the broker delivers it again, and the copy finds in the done marker what is left to do: a
    letter from here would be the second one.

    Args:
        timer: Celery's timer of the current connection.
        queue_of: The queue that a message was consumed from, where the connection can tell.
    """

    def __init__(self, plugin: Plugin, *, timer: Callable[[], Any], queue_of: Callable[[Any], str | None]) -> None:
        self._plugin = plugin
        self._queue_of = queue_of
        self._timer = timer

    def add_acknowledged(self, message: Any, death: Death, queue: str) -> None:
        """Publish the letter of a message that was acknowledged early: nobody delivers it again."""
        try:
            self._publish(message, death, queue)
        except Exception as exc:  # noqa: BLE001  # whatever keeps the broker from confirming
            logger.error("dead letter of %s[%s] waits: %s", death.task, death.id, exc)
            self._again(lambda: self._publish(message, death, queue), None)

    def add(self, message: Any, death: Death, queue: str) -> None:
        """Publish now, in Celery's own thread: the acknowledgement that follows uses its connection."""
        if _is_redelivered(message):
            return
        try:
            self._publish(message, death, queue)
        except Exception as exc:  # noqa: BLE001  # whatever keeps the broker from confirming
            logger.error("dead letter of %s[%s] waits: %s", death.task, death.id, exc)
            settle = message._selfheal_settle = HeldMessage(message)
            self._again(lambda: self._publish(message, death, queue), settle)

    def _publish(self, message: Any, death: Death, queue: str) -> None:
        death = replace(death, queue=self._queue_of(message) or death.queue)
        headers = dict(names.of_the_user(message.headers or {}), **{DEATH_HEADER: death.header()})
        self._plugin.publisher.send_raw(message, headers=headers, queue=queue, declare=True)
        self._plugin.tell(TaskDeadLettered(task_name=death.task, task_id=death.id, death=death, queue=queue))

    def _again(self, publish: Callable[[], None], held: HeldMessage | None) -> None:
        def attempt() -> None:
            if held is not None and held.is_redelivered:
                return
            try:
                publish()
            except Exception as exc:  # noqa: BLE001  # as above
                logger.error("a dead letter still waits: %s", exc)
                self._again(publish, held)
            else:
                if held is not None:
                    held.let_go()

        self._timer().call_after(PUBLISH_PAUSE_SECONDS, attempt)


class HeldMessage:
    """Keeps a message unacknowledged until its dead letter is confirmed."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self._ack = message.ack
        message.ack = message.reject = lambda *args, **kwargs: None

    @property
    def is_redelivered(self) -> bool:
        """Its channel is gone: the message is the broker's again."""
        return _is_redelivered(self._message)

    def let_go(self) -> None:
        """Acknowledge, on the channel from which the message came."""
        self._ack()


def _is_redelivered(message: Any) -> bool:
    channel = message.channel
    # Kombu's own channels say that they are closed; one of the AMQP library's has lost its connection.
    return bool(getattr(channel, "closed", False)) or getattr(channel, "connection", channel) is None
