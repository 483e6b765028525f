"""The Celery application: where its broker is, and what a dead worker may cost."""

from __future__ import annotations

import os

from celery import Celery
from kombu import Queue

REDIS_URL = os.environ.get("SHOP_REDIS_URL", "redis://localhost:6379/0")

app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL, include=["example_project.tasks"])

app.conf.update(
    task_default_queue="payments",
    task_queues=[Queue("payments", routing_key="payments"), Queue("statements", routing_key="statements")],
    task_routes={"example_project.tasks.import_statement": {"queue": "statements"}},
    # Shorter than the defaults (10, 3), so that you need not wait long for the paused worker: after 6 seconds without
    # a heartbeat its tasks go to others. A killed worker is noticed sooner, by the others on its machine.
    selfheal_lease_ttl=6,
    selfheal_heartbeat_interval=2,
    # A task that kills its process is started three times, never a fourth. This is the default.
    selfheal_max_stalls=2,
    # Workers look for dead ones by themselves; beat may remind them, and need not run.
    beat_schedule={
        "heal": {"task": "celery_selfheal.reap", "schedule": 10.0, "options": {"expires": 10}},
    },
)
