"""Entries in a ledger whose effect must happen once; ``note`` and ``die_at`` alone are there for the tests."""

import functools
import importlib
import json
import os
import signal
import time
from pathlib import Path

from celery import Celery, current_task
from sqlalchemy import text

from celery_selfheal import SelfHealTask

app = Celery(os.environ["LEDGER_NAME"], broker=os.environ["LEDGER_BROKER"], backend=os.environ["LEDGER_RESULTS"])
app.conf.update(json.loads(os.environ["LEDGER_SETTINGS"]))

PAUSE_SECONDS = 5
FOLDER = Path(os.environ["LEDGER_FOLDER"])


def note(event, task_id, **more):
    """Append one whole line to the diary: it is there before the body goes on, whatever is killed next."""
    line = {"event": event, "id": task_id, "pid": os.getpid(), "at": time.monotonic(), **more}
    with open(FOLDER / "diary.jsonl", "ab", buffering=0) as diary:
        diary.write(json.dumps(line).encode() + b"\n")


def die_at(point):
    """Let the process die of SIGKILL at one step of each task whose id names the point, once for each.

    A point is ``child package.module:Class.function before``, or ``main``, or ``after``; ``pause`` instead of these
    stays there for a while. The id of a task is
    ``<number of the point>-<round>``; those of other tasks go through.
    """
    number, who, path, when = point.split(" ")
    module, _, name = path.partition(":")
    owner = importlib.import_module(module)
    *parents, name = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    step = getattr(owner, name)

    def die(args):
        task_id = task_of(args) if who == "main" else current_task and current_task.request.id
        if not task_id or not task_id.startswith(f"{number}-"):
            return
        died = FOLDER / f"died.{task_id}"
        if not died.exists():
            died.touch()
            if when == "pause":
                time.sleep(PAUSE_SECONDS)
                return
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(step)
    def dying(*args, **kwargs):
        if when in ("before", "pause"):
            die(args)
        result = step(*args, **kwargs)
        if when == "after":
            die(args)
        return result

    setattr(owner, name, dying)


def task_of(args):
    """The task id that a step of main is about: of its request, or of what it has just made of a message."""
    for arg in args:
        task_id = getattr(arg, "id", None) or getattr(arg, "headers", {}).get("id")
        if task_id is not None:
            return task_id
    return None


for given in filter(None, os.environ.get("LEDGER_DIE_AT", "").split(";")):
    die_at(given)


@app.task(bind=True, base=SelfHealTask, dedup="transaction")
def book(self, amount):
    """Book an amount under the id of the task, and return it."""
    note("start", self.request.id, fence=self.lease.fence)
    self.session.execute(
        text("INSERT INTO entries (name, amount) VALUES (:name, :amount)"),
        {"name": self.request.id, "amount": amount},
    )
    note("written", self.request.id)
    wait_for_gate(self.request.id)
    return amount


@app.task(bind=True, base=SelfHealTask, dedup="transaction", max_runtime=2, retry_backoff=0.1)
def book_in_time(self, amount):
    """Ends soon, or not at all."""
    self.session.execute(
        text("INSERT INTO entries (name, amount) VALUES (:name, :amount)"),
        {"name": self.request.id, "amount": amount},
    )
    note("written", self.request.id)
    wait_for_gate(self.request.id)
    return amount


@app.task(bind=True, base=SelfHealTask, dedup="transaction")
def add(self, amount, more):
    """A later link of a chain."""
    self.session.execute(
        text("INSERT INTO entries (name, amount) VALUES (:name, :amount)"),
        {"name": f"{self.request.id}", "amount": more},
    )
    return amount + more


@app.task(bind=True, base=SelfHealTask, dedup="transaction")
def total(self, amounts):
    """The body of a chord."""
    self.session.execute(
        text("INSERT INTO entries (name, amount) VALUES (:name, :amount)"),
        {"name": self.request.id, "amount": sum(amounts)},
    )
    return sum(amounts)


@app.task(bind=True, base=SelfHealTask, dedup="transaction", idempotency_key="order:{order}")
def book_order(self, order, amount=1):
    """The same, under a key of its own: other ids may ask for it, too."""
    note("start", self.request.id)
    self.session.execute(
        text("INSERT INTO entries (name, amount) VALUES (:name, :amount)"), {"name": order, "amount": amount}
    )
    return [order, amount]


@app.task(bind=True, base=SelfHealTask)
def count(self, things):
    return len(things)


@app.task(bind=True, base=SelfHealTask, dedup="transaction", retry_backoff=0.1)
def fail_then_book(self, failures):
    """Fails after it has written, as often as asked for."""
    self.session.execute(
        text("INSERT INTO entries (name, amount) VALUES (:name, :amount)"), {"name": self.request.id, "amount": 1}
    )
    if self.request.retries < failures:
        raise ConnectionError("no bank")
    return self.request.retries


@app.task(bind=True, base=SelfHealTask, dedup="claim", idempotency_key="mail:{address}", retry_backoff=0.1)
def mail(self, address):
    """An effect that no rollback undoes."""
    note("mail", address)
    fail_once(address)
    wait_for_gate(self.request.id)
    return f"sent to {address}"


@app.task(bind=True, base=SelfHealTask, dedup="claim", on_in_doubt="hold", idempotency_key="letter:{address}")
def letter(self, address):
    note("mail", address)
    fail_once(address)
    wait_for_gate(self.request.id)
    return f"sent to {address}"


@app.task(bind=True, base=SelfHealTask, dedup="redis", idempotency_key="text:{number}", retry_backoff=0.1)
def send_text(self, number):
    note("text", number)
    fail_once(number)
    wait_for_gate(self.request.id)
    return f"sent to {number}"


def wait_for_gate(task_id):
    """Stay in the body while the test has put a gate before this task."""
    while (FOLDER / f"gate.{task_id}").exists():
        time.sleep(0.02)


def fail_once(name):
    """Fail if the test asks for it."""
    wish = FOLDER / f"fail.{name}"
    if wish.exists():
        wish.unlink()
        raise ConnectionError("no post office")
