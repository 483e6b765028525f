"""Orders that fail in every way there is; ``note`` and ``die_at`` alone are there for the tests."""

import functools
import json
import os
import signal
import time
from pathlib import Path

from amqp import Channel
from celery import Celery
from celery.exceptions import Reject

from celery_selfheal import SelfHealTask, UnrecoverableError
from celery_selfheal.plugin.publisher import Publisher
from celery_selfheal.plugin.settling import Settling

app = Celery(os.environ["ORDERS_NAME"], broker=os.environ["ORDERS_BROKER"], backend=os.environ["ORDERS_RESULTS"])
app.conf.update(json.loads(os.environ["ORDERS_SETTINGS"]))


def note(event, task_id):
    """Append one whole line to the diary: it is there before the body goes on, whatever is killed next."""
    line = {"event": event, "id": task_id, "at": time.monotonic()}
    with open(os.environ["ORDERS_DIARY"], "ab", buffering=0) as diary:
        diary.write(json.dumps(line).encode() + b"\n")


def die_at(owner, name, *, before):
    """Let the process die of SIGKILL at one step of the move, once for this worker and its children."""
    step = getattr(owner, name)
    died = Path(f"{os.environ['ORDERS_DIARY']}.{os.getpid()}.died")

    @functools.wraps(step)
    def dying(*args, **kwargs):
        result = None if before and not died.exists() else step(*args, **kwargs)
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


if os.environ.get("ORDERS_DIE_AT", "") in ("before the move", "after the move"):
    is_before = os.environ["ORDERS_DIE_AT"].startswith("before")
    die_at(Settling, "move_to_dead_letters", before=is_before)
    die_at(Publisher, "send_raw", before=is_before)
if os.environ.get("ORDERS_DIE_AT") == "published, unconfirmed":
    die_at(Channel, "_basic_publish", before=False)
if os.environ.get("ORDERS_DIE_AT") == "child, after its release":
    die_at(SelfHealTask, "end_start", before=False)


@app.task(bind=True, base=SelfHealTask)
def ship(self, order):
    note("start", self.request.id)
    return order


@app.task(bind=True, base=SelfHealTask, max_retries=0)
def charge(self, gate, order):
    """Fails until somebody opens the gate."""
    note("start", self.request.id)
    if not Path(gate).exists():
        raise ConnectionError(f"no bank for order {order}")
    return order


@app.task(bind=True, base=SelfHealTask, max_retries=0)
def charge_when_told(self, told):
    """Fails as soon as somebody says so."""
    note("start", self.request.id)
    while not Path(told).exists():
        time.sleep(0.01)
    note("fail", self.request.id)
    raise ConnectionError("no bank")


@app.task(bind=True, base=SelfHealTask, max_retries=1, retry_backoff=0.1)
def exhaust(self):
    note("start", self.request.id)
    raise ConnectionError("no bank")


@app.task(bind=True, base=SelfHealTask)
def refuse(self):
    note("start", self.request.id)
    raise UnrecoverableError("no such order")


@app.task(bind=True, base=SelfHealTask, acks_late=False, max_retries=0)
def acked_early(self):
    raise ConnectionError("no bank")


@app.task(bind=True, base=SelfHealTask)
def reject(self):
    raise Reject("not ours", requeue=False)


@app.task(bind=True, base=SelfHealTask, time_limit=1, max_retries=0)
def hang(self):
    time.sleep(60)


@app.task(bind=True, base=SelfHealTask)
def poison(self):
    note("start", self.request.id)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@app.task(bind=True, base=SelfHealTask, dead_letter=False, max_retries=0)
def not_kept(self):
    raise ConnectionError("no bank")


@app.task(bind=True, base=SelfHealTask)
def tell_support(self, *about):
    note("support told", self.request.id)
