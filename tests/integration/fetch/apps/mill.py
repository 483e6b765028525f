"""Short tasks, and what they wrote down; with the plugin, or on Celery as it is."""

import json
import os
import time
from pathlib import Path

from celery import Celery, Task

from celery_selfheal import SelfHealTask, install

app = Celery("mill", broker=os.environ["MILL_BROKER"])
app.conf.update(json.loads(os.environ["MILL_SETTINGS"]))
install(app)
STOCK = {"base": Task, "acks_late": True}
BASE = STOCK if os.environ.get("MILL_STOCK") else {"base": SelfHealTask}


def note(event, task):
    """Append one whole line: it is there before the body goes on, whatever is killed next."""
    line = f"{event} {task.request.id} {time.monotonic()} {task.request.hostname}\n"
    with open(os.environ["MILL_DIARY"], "ab", buffering=0) as diary:
        diary.write(line.encode())


@app.task(bind=True, name="grind", ignore_result=True, **BASE)
def grind(self, seconds=0.0):
    note("start", self)
    if seconds:
        time.sleep(seconds)
    note("end", self)


@app.task(bind=True, name="weigh", ignore_result=True, **BASE)
def weigh(self, sack, size):
    note("start", self)
    assert len(sack) == size
    note("end", self)


@app.task(bind=True, name="hold", ignore_result=True, **BASE)
def hold(self, gate):
    note("start", self)
    while not Path(gate).exists():
        time.sleep(0.02)
    note("end", self)


@app.task(bind=True, name="hear", ignore_result=True, **STOCK)
def hear(self):
    """For broadcasts: each worker runs the same message, so none may hold a lease on it."""
    note("start", self)
    note("end", self)
