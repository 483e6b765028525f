"""A depot, written as a user would write it, whose workers heal."""

import json
import os

import bodies
from celery import Celery

from celery_selfheal import SelfHealTask

app = Celery("depot", broker=os.environ["DEPOT_BROKER"], backend=os.environ["DEPOT_RESULTS"])
app.conf.update(json.loads(os.environ["DEPOT_SETTINGS"]))


@app.task(bind=True, base=SelfHealTask)
def ship(self, seconds=0):
    return bodies.ship(self, seconds)


@app.task(bind=True, base=SelfHealTask)
def load(self, gate):
    return bodies.load(self, gate)
