"""The next attempt of a task whose child can send none: it was killed at its time limit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import Task

from celery_selfheal import headers as names
from celery_selfheal.classify import Verdict, classify
from celery_selfheal.clock import jitter, utc_now
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.next_attempt import NextAttempt, replace_delivery
from celery_selfheal.plugin.publisher import least_countdown
from celery_selfheal.plugin.retry import age_of, policy_now

if TYPE_CHECKING:
    from celery_selfheal.plugin.worker import Worker

logger = logging.getLogger("celery_selfheal")


def retry_in_main(request: Any, exc: Exception, worker: Worker) -> bool:
    """Send the next attempt in place of the held message, if the task's policy has one left for this failure.

    Called by Celery's loop. On Redis the agents' thread sends it; elsewhere it is published now, then acknowledged.
    """
    task, context, attempt = request.task, request.context_of_start, int(request.request_dict.get("retries") or 0)
    policy = policy_now(task)
    plugin = plugin_of(task.app)
    age = age_of(context["first_published_at"])
    if classify(exc, policy, attempt=attempt, age=age, unrecoverable=plugin.unrecoverable) is not Verdict.RETRY:
        return False
    start = request.start
    signature = Task.signature_from_request(
        task,
        request._context,
        countdown=policy.delay(attempt, chance=jitter()).total_seconds(),
        retries=attempt + 1,
        headers={
            **names.of_the_user(request._context.headers or {}),
            names.PREDECESSOR: start.token,
            names.FIRST_PUBLISHED: context["first_published_at"],
            names.FIRST_FAILURE: context["first_failure_at"] or utc_now().isoformat(),
            names.REPLAYS: context["replays"],
        },
    )
    stores = worker.stores
    if stores.deliveries is not None and plugin.layout is not None and start.tag is not None:
        deliveries, layout = stores.deliveries, plugin.layout
        request.acknowledged = True
        forget = getattr(request.message.channel, "selfheal_forget", None)
        if forget is not None:
            forget(start.tag)

        def send() -> None:
            next_attempt = NextAttempt.of(signature, {})
            replace_delivery(
                task.app, next_attempt, deliveries=deliveries, session=start.session, tag=start.tag, layout=layout
            )

        worker.settle_later(send, tag=start.tag)
    else:
        try:
            signature.set(countdown=least_countdown(task.app, signature.options.get("countdown")))
            with plugin.publisher.producer() as producer:
                signature.apply_async(producer=producer)
        except Exception as error:  # noqa: BLE001  # whatever keeps the broker from taking it
            logger.warning(
                "retry of %s[%s] could not be sent, its message goes back: %s", task.name, start.task_id, error
            )
            request.reject(requeue=True)
            return True
        request.acknowledge()
    if request.store_errors:
        task.backend.mark_as_retry(request.id, exc, "", request=request._context)
    logger.warning("%s[%s] will be retried: %s", task.name, start.task_id, exc)
    worker.ended_from_outside(start, state="retry")
    return True
