"""Sends messages that waited, confirmed and in their order, and tells which ones the broker will not take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import sleep
from typing import Any

from kombu.utils.json import dumps

from celery_selfheal.clock import jitter, monotonic
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin.next_attempt import STORE_PAUSE_SECONDS
from celery_selfheal.plugin.publisher import Publisher
from celery_selfheal.plugin.unsent import Unsent

UNROUTABLE = "no queue takes it"
# What a message causes that cannot be put on the wire at all, besides the errors of a channel.
_UNFIT = (ValueError, TypeError, LookupError, AttributeError)


def send(publisher: Publisher, messages: Sequence[Unsent]) -> list[str]:
    """Send messages in their order.

    Returns:
        For each why it cannot be sent; empty where a queue has it.

    Raises:
        StoreError: the broker does not answer; any of them may have been sent or not.
    """
    if not messages:
        return []
    try:
        with publisher.producer() as producer:
            connection = producer.connection
            unfit = (*connection.channel_errors, *_UNFIT)
            _declare(connection, messages, unfit)
    except Exception as exc:
        raise StoreError("the broker", _said(exc)) from exc
    try:
        return _sent(publisher, messages)
    except unfit as exc:
        if len(messages) == 1:
            return [_said(exc)]
    except Exception as exc:
        raise StoreError("the broker", _said(exc)) from exc
    # One spoils all: the broker closes the channel over it, and does not say which it was.
    return [reason for one in messages for reason in send(publisher, [one])]


def send_within(publisher: Publisher, messages: Sequence[Unsent], *, patience: timedelta) -> list[str]:
    """As ``send``, but tries again for so long; what was sent may be sent again, with the same ids.

    Raises:
        StoreError: the broker did not answer in all that time.
    """
    give_up_at = monotonic() + patience.total_seconds()
    while True:
        try:
            return send(publisher, messages)
        except StoreError:
            if monotonic() >= give_up_at:
                raise
            sleep(jitter().uniform(*STORE_PAUSE_SECONDS))


def _sent(publisher: Publisher, messages: Sequence[Unsent]) -> list[str]:
    return ["" if taken else UNROUTABLE for taken in publisher.send_all([one.outgoing for one in messages])]


def _declare(connection: Any, messages: Sequence[Unsent], unfit: tuple[type[BaseException], ...]) -> None:
    """Make queues that are not there, as Celery does before it sends; once a connection."""
    declared: set[str] = vars(connection).setdefault("_selfheal_declared", set())
    for one in messages:
        name = dumps(one.declares)  # type: ignore[no-untyped-call]  # kombu is untyped
        if name in declared:
            continue
        try:
            # A channel of its own: the broker closes it if the queue is there with other arguments. Whether it takes
            # messages will show.
            with connection.channel() as channel:
                for entity in one.entities():
                    entity(channel).declare()
        except unfit:
            pass
        declared.add(name)


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
