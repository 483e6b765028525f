"""The depot before it knew of self-healing: same name, queue and tasks, plain Celery with late acknowledgement."""

import json
import os

import bodies
from celery import Celery

app = Celery("depot", broker=os.environ["DEPOT_BROKER"], backend=os.environ["DEPOT_RESULTS"])
settings = json.loads(os.environ["DEPOT_SETTINGS"])
app.conf.update({name: value for name, value in settings.items() if not name.startswith("selfheal_")})


@app.task(bind=True, name="depot.ship", acks_late=True)
def ship(self, seconds=0):
    return bodies.ship(self, seconds)


@app.task(bind=True, name="depot.load", acks_late=True)
def load(self, gate):
    return bodies.load(self, gate)
