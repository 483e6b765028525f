"""Tasks of a reusable package: they are defined before there is any application."""

from celery import shared_task
from diary import note

from celery_selfheal import SelfHealTask

POLICY = {"autoretry_for": (OSError,), "max_retries": 2, "retry_backoff": 0.4, "retry_jitter": False}


class Patient(SelfHealTask):
    abstract = True
    autoretry_for = (OSError,)
    max_retries = 2
    retry_backoff = 0.4
    retry_jitter = False

    def run(self):
        note("start", self)
        raise ConnectionError("away")


@shared_task(bind=True, base=SelfHealTask, name="bank.shared", **POLICY)
def shared(self):
    note("start", self)
    raise ConnectionError("away")
