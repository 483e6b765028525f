"""How the next attempt of a task takes the place of the one that has just failed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import sleep
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps

from celery_selfheal.clock import jitter, monotonic
from celery_selfheal.errors import StoreError
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin import eager
from celery_selfheal.plugin.brokers.layout import RedisLayout, list_of, queue_of
from celery_selfheal.plugin.brokers.unsent import message_of
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.publisher import least_countdown
from celery_selfheal.sessions.redis import RedisDeliveryStore

if TYPE_CHECKING:
    from celery_selfheal.plugin.running import Running

logger = logging.getLogger("celery_selfheal")

STORE_PAUSE_SECONDS = (0.1, 0.5)  # between two tries of a store that is away


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """A retry that waits until the body has ended.

    Attributes:
        signature: Celery's, with all that the attempt before carried.
        route: Where the caller of ``retry`` wants it: ``queue``, or ``exchange`` and ``routing_key``; empty for where
            it came from.
    """

    signature: Any
    route: Mapping[str, Any]

    @classmethod
    def of(cls, signature: Any, options: Mapping[str, Any]) -> NextAttempt:
        """Pick the route out of the options of ``retry``."""
        route = {name: options[name] for name in ("queue", "exchange", "routing_key") if options.get(name)}
        return cls(signature, route)


def send_retries(task: Any, plugin: Plugin, running: Running, *, raised: Exception | None) -> None:
    """Send what ``self.retry()`` asked for, in place of the held delivery where the broker can do that.

    Args:
        raised: What the body is left by; an eager ``Retry`` is followed up by ``apply``.
    """
    waiting, running.retries = running.retries, []
    if task.request.is_eager:
        for attempt in waiting:
            if attempt.signature is not getattr(raised, "sig", None):
                args, kwargs, options = eager.caught(attempt.signature)
                task.apply(args, kwargs, **options)
        return
    give_up_at = monotonic() + plugin.settings.lease_ttl.total_seconds()
    start = running.start
    for number, attempt in enumerate(waiting):
        # The instance's own apply_async was the net that caught it.
        vars(attempt.signature).pop("apply_async", None)
        while True:
            try:
                with as_a_producer(task.request):
                    sent = _send_retry(task, plugin, attempt, start, in_place=number == 0)
                break
            except (StoreError, OperationalError) as exc:
                if monotonic() >= give_up_at:
                    # Unsettled, so the message comes back and the attempt is made again: late, but not lost.
                    logger.warning("retry of %s[%s] could not be sent: %s", task.name, start.task_id, exc)
                    raise Reject(str(exc), requeue=True) from exc
                sleep(jitter().uniform(*STORE_PAUSE_SECONDS))
        if not sent:
            running.is_disowned = True
            raise Ignore("the message was given to another worker, which retries by itself")


def _send_retry(task: Any, plugin: Plugin, attempt: NextAttempt, start: Start, *, in_place: bool) -> bool:
    deliveries = plugin.stores.deliveries
    if in_place and deliveries is not None and plugin.layout is not None and start.tag is not None:
        return replace_delivery(
            task.app,
            attempt,
            deliveries=deliveries,
            session=start.session,
            tag=start.tag,
            layout=plugin.layout,
        )
    signature = attempt.signature
    signature.set(countdown=least_countdown(task.app, signature.options.get("countdown")))
    with plugin.publisher.producer() as producer:
        signature.apply_async(producer=producer)
    return True


@contextmanager
def as_a_producer(request: Any) -> Iterator[None]:
    """Publish as from outside of any task: else Celery makes a retry without a parent its own child."""
    request.called_directly = True
    try:
        yield
    finally:
        request.called_directly = False


def replace_delivery(
    app: Any, attempt: NextAttempt, *, deliveries: RedisDeliveryStore, session: str, tag: str, layout: RedisLayout
) -> bool:
    """Let the next attempt take the place of the held delivery, in one step.

    Without a route of its own it goes into the very queue that it came from: looked up anew, a message of a topic
    exchange would go to every queue that is bound, or to none, since a pool process does not know the exchange.

    Returns:
        ``False`` when the delivery is not ours any more: then nothing was sent.

    Raises:
        StoreError: Redis did not answer; a repeat is safe.
    """
    message = message_of(app, attempt.signature)
    held = deliveries.named(session, [tag])
    if not held:
        return False
    own = queue_of(held[0].list_key, layout)
    queue = _queue_named_by(app, attempt.route) or own
    list_key = list_of(queue, message["properties"].get("priority"), layout)
    return deliveries.settle(
        replace(held[0], list_key=list_key),
        session=session,
        message=dumps(message).encode(),  # type: ignore[no-untyped-call]  # kombu is untyped
        dead=False,
        front=False,
    )


def _queue_named_by(app: Any, route: Mapping[str, Any]) -> str | None:
    """Name of the queue to which a route leads, as far as this application's queues tell."""
    names = {key: getattr(value, "name", value) for key, value in route.items()}
    if "queue" in names or not names:
        return names.get("queue")
    if not names.get("exchange"):
        return names.get("routing_key")
    for queue in app.amqp.queues.values():
        if queue.exchange.name == names["exchange"] and queue.routing_key == names.get("routing_key"):
            return str(queue.name)
    logger.error("no queue is known for a retry to %s: it goes to where it came from", names)
    return None
