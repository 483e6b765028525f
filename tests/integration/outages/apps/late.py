"""The depot with a configuration that is loaded when it is first needed."""

import os

import bodies
from celery import Celery

from celery_selfheal import SelfHealTask

app = Celery("depot", broker=os.environ["DEPOT_BROKER"], backend=os.environ["DEPOT_RESULTS"])
app.config_from_object("late_settings")


@app.task(bind=True, base=SelfHealTask)
def ship(self, seconds=0):
    return bodies.ship(self, seconds)
