"""A shop, written as a user would write it; ``note`` alone is there for the tests."""

import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from celery import Celery

from celery_selfheal import SelfHealTask

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
app.conf.update(json.loads(os.environ["SHOP_SETTINGS"]))


def note(event, task):
    """Append one whole line to the diary: it is there before the body goes on, whatever is killed next."""
    line = {"event": event, "id": task.request.id, "pid": os.getpid(), "at": time.monotonic(), "clock": time.time()}
    with open(os.environ["SHOP_DIARY"], "ab", buffering=0) as diary:
        diary.write(json.dumps(line).encode() + b"\n")


@app.task(bind=True, base=SelfHealTask)
def charge(self, cents, seconds=0):
    note("start", self)
    time.sleep(seconds)
    note("end", self)
    return cents


@app.task(bind=True, base=SelfHealTask)
def wait_for(self, gate):
    note("start", self)
    while not Path(gate).exists():
        time.sleep(0.02)
    note("end", self)
    return gate


@app.task(bind=True, base=SelfHealTask)
def compute(self, seconds):
    """One call of C that keeps the interpreter's lock; returns for how long no other thread had a turn."""
    moments = [time.monotonic()]
    ended = threading.Event()

    def take_turns():
        while not ended.wait(0.05):
            moments.append(time.monotonic())

    threading.Thread(target=take_turns, daemon=True).start()
    note("start", self)
    ctypes.PyDLL(None).sleep(seconds)
    ended.set()
    note("end", self)
    moments.append(time.monotonic())
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


@app.task(bind=True, base=SelfHealTask)
def poison(self, victim):
    """Kill the process that runs the body, or the worker's main process if that is another one, or just leave it."""
    note("start", self)
    if victim == "exit":
        sys.exit(0)
    os.kill({"self": os.getpid(), "parent": os.getppid()}[victim], signal.SIGKILL)
    time.sleep(60)


@app.task(bind=True, base=SelfHealTask)
def total(self, parts):
    note("start", self)
    return parts


@app.task(bind=True, base=SelfHealTask)
def tell_support(self, *about):
    note("start", self)
