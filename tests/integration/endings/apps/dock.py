"""A dock, written as a user would write it; ``note`` alone is there for the tests."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.worker.control import control_command

from celery_selfheal import SelfHealTask, UnrecoverableError

app = Celery(os.environ["DOCK_NAME"], broker=os.environ["DOCK_BROKER"], backend=os.environ["DOCK_RESULTS"])
app.conf.update(json.loads(os.environ["DOCK_SETTINGS"]))


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


class Noted(SelfHealTask):
    """Notes how its bodies are left."""

    abstract = True


@app.task(bind=True, base=Noted, name="dock.load")
def load(self, seconds=0.0, gate=None):
    """Sleep in small pieces, until the time is over or the gate opens."""
    note("start", self)
    over = time.monotonic() + seconds
    try:
        while time.monotonic() < over and not (gate and Path(gate).exists()):
            time.sleep(0.02)
    except BaseException as exc:
        note("left", self, by=kind(exc))
        raise
    note("end", self)
    return "loaded"


@app.task(bind=True, base=Noted, name="dock.sleep")
def sleep_whole(self, seconds, gate):
    """One call that waits, unless the gate is open."""
    note("start", self)
    try:
        time.sleep(0 if Path(gate).exists() else seconds)
    except BaseException as exc:
        note("left", self, by=kind(exc))
        raise
    note("end", self)


@app.task(bind=True, base=Noted, name="dock.deaf")
def deaf(self, seconds):
    """Swallow whatever tells it to end."""
    note("start", self)
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        try:
            time.sleep(0.02)
        except BaseException as exc:  # noqa: BLE001  # that is what it is for
            note("left", self, by=kind(exc))
    note("end", self)


@app.task(bind=True, base=Noted, name="dock.compute")
def compute(self, gate):
    """One call of C that keeps the interpreter's lock for ever, unless the gate is open."""
    note("start", self)
    if not Path(gate).exists():
        sum(range(10**12))
    note("end", self)


@app.task(bind=True, base=Noted, name="dock.polite")
def polite(self, seconds):
    """Come to an end when the worker stops."""
    note("start", self)
    over = time.monotonic() + seconds
    while time.monotonic() < over and not self.is_draining:
        time.sleep(0.02)
    note("end", self, draining=self.is_draining, check=self.check())
    return "early"


@app.task(bind=True, base=Noted, name="dock.step")
def step(self, progress, quiet):
    """Go on from the last progress."""
    last = self.last_progress
    note("start", self, last=last)
    if last is None:
        self.heartbeat(progress)
        time.sleep(quiet)
    note("end", self)


@app.task(bind=True, base=Noted, name="dock.leave", max_retries=1, retry_backoff=0.1, soft_time_limit=2)
def leave(self, way):
    """End in the way that is asked for."""
    is_first = not Path(os.environ["DOCK_DIARY"]).read_text().count(f'"start", "id": "{self.request.id}"')
    note("start", self)
    if way == "raises, attempts used up" or (way == "raises, attempts left" and is_first):
        raise ConnectionError(way)
    if way == "raises, unrecoverable":
        raise UnrecoverableError(way)
    if way == "retries by hand" and is_first:
        raise self.retry(countdown=0)
    if way == "is ignored":
        raise Ignore
    if way == "is rejected":
        raise Reject(way, requeue=False)
    if way == "is requeued" and is_first:
        raise Reject(way, requeue=True)
    if way in ("soft time limit", "is revoked and terminated"):
        time.sleep(60)
    if way == "memory is used up":
        raise MemoryError(way)
    if way == "its process is killed" or (way == "its process is killed once" and is_first):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "leaves its process":
        sys.exit(3)
    note("end", self)
    return way


@control_command(args=[("seconds", float)])
def hang(state, seconds):
    """Keep the worker's loop from turning."""
    time.sleep(seconds)


def kind(exc):
    """Name of the class that we know it by."""
    names = [one.__name__ for one in type(exc).__mro__]
    return "LeaseLost" if "LeaseLost" in names else names[0]
