"""Signals of healing, in Celery's style: ``@task_stalled.connect``.

Each is sent in the process that noticed, at least once, with ``sender`` the application and the keyword arguments
``task_name``, ``task_id``, ``reason``, ``owner`` and ``age`` (seconds) besides those named here;
``task_dead_lettered`` has its own. Receivers must be quick: those of a worker's main process run in the thread that
keeps its leases alive.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = (
    "duplicate_suppressed",
    "lease_lost",
    "message_set_aside",
    "task_dead_lettered",
    "task_recovered",
    "task_stalled",
)

#: A start neither finished nor was handed over; ``unfinished_starts`` counts those of the task.
task_stalled = Signal(name="task_stalled", providing_args={"unfinished_starts"})

#: The message that a dead worker held is back in its queue; ``started`` tells whether its body had begun there.
task_recovered = Signal(name="task_recovered", providing_args={"started"})

#: Another start has taken the lease of a start that still runs here.
lease_lost = Signal(name="lease_lost", providing_args=set())

#: A message of the outbox cannot be sent; ``owner`` tells its row, which is kept and tried again after a minute.
message_set_aside = Signal(name="message_set_aside", providing_args=set())

#: A message was moved to a dead letter queue. Sent with ``task_name``, ``task_id``, ``queue`` and ``death``, the
#: envelope (``celery_selfheal.dead_letter.Death``).
task_dead_lettered = Signal(name="task_dead_lettered", providing_args={"death", "queue"})

#: A message came again whose effect was there already; ``owner`` is the id of the task whose effect it is.
duplicate_suppressed = Signal(name="duplicate_suppressed", providing_args=set())
