"""Accounts that one task at a time may touch; ``note`` alone is there for the tests."""

import json
import os
import time
from pathlib import Path

from celery import Celery

from celery_selfheal import SelfHealTask

app = Celery(os.environ["DOCK_NAME"], broker=os.environ["DOCK_BROKER"], backend=os.environ["DOCK_RESULTS"])
app.conf.update(json.loads(os.environ["DOCK_SETTINGS"]))

OPTIONS = {"bind": True, "base": SelfHealTask, "lease_key": "account:{account}"}


def note(event, task, **seen):
    """Append one whole line to the diary: it is there before the body goes on, whatever is killed next."""
    line = {
        "event": event,
        "id": task.request.id,
        "node": task.request.hostname.partition("@")[0],
        "pid": os.getpid(),
        "retries": task.request.retries,
        "at": time.monotonic(),
        "clock": time.time(),
        "seen": seen,
    }
    with open(os.environ["DOCK_DIARY"], "ab", buffering=0) as diary:
        diary.write(json.dumps(line).encode() + b"\n")


def work(task, seconds, gate):
    note("start", task, key=task.lease.key)
    over = time.monotonic() + seconds
    try:
        while time.monotonic() < over and not (gate and Path(gate).exists()):
            time.sleep(0.02)
    except BaseException as exc:
        note("left", task, by=type(exc).__name__)
        raise
    note("end", task)


@app.task(name="locks.take", **OPTIONS)
def take(self, account, seconds=0.05, gate=None):
    """Wait for the key."""
    work(self, seconds, gate)
    return account


@app.task(name="locks.skip", lease_busy="skip", **OPTIONS)
def skip(self, account):
    """Do without."""
    work(self, 0, None)


@app.task(name="locks.fail", lease_busy="fail", max_retries=1, retry_backoff=0.1, **OPTIONS)
def fail(self, account):
    """Insist."""
    work(self, 0, None)


@app.task(name="locks.limited", lease_wait_max=2, max_retries=0, **OPTIONS)
def limited(self, account):
    """Wait, but not for ever."""
    work(self, 0, None)


@app.task(name="locks.tell", bind=True, base=SelfHealTask)
def tell(self, before, *more):
    """Say what came before."""
    note("told", self, before=before)
    return before
