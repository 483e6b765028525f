"""A bank, written as its users would write it: tasks that fail in every way."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from celery import Celery
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
from diary import note
from early import POLICY, Patient
from kombu import Exchange, Queue

from celery_selfheal import SelfHealTask, UnrecoverableError

app = Celery("bank", broker=os.environ["BANK_BROKER"], backend=os.environ["BANK_RESULTS"])
app.conf.task_queues = [
    Queue("celery"),
    Queue("slow"),
    Queue("euros", Exchange("payments", type="topic"), routing_key="pay.eur.#"),
]
app.conf.update(json.loads(os.environ["BANK_SETTINGS"]))

QUICK = {"retry_backoff": 0.05, "retry_backoff_max": 0.2}


# -- one policy, in every way that Celery lets a task be defined


@app.task(bind=True, base=SelfHealTask, name="bank.decorated", **POLICY)
def decorated(self):
    note("start", self)
    raise ConnectionError("away")


class Registered(SelfHealTask):
    name = "bank.registered"
    autoretry_for = (OSError,)
    max_retries = 2
    retry_backoff = 0.4
    retry_jitter = False

    def run(self):
        note("start", self)
        raise ConnectionError("away")


class Inherited(Patient):
    name = "bank.inherited"


class Calling(Patient):
    name = "bank.calling"

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


app.register_task(Registered())
app.register_task(Inherited())
app.register_task(Calling())


# -- ways to leave a body


@app.task(bind=True, base=SelfHealTask, autoretry_for=(Exception,), **QUICK)
def leave(self, how):
    note("start", self)
    if how == "reject":
        raise Reject("bad", requeue=False)
    if how == "requeue" and not Path(os.environ["BANK_DIARY"]).with_name("requeued").exists():
        Path(os.environ["BANK_DIARY"]).with_name("requeued").touch()
        raise Reject("not yet", requeue=True)
    if how == "ignore":
        raise Ignore("seen")
    if how == "retry":
        raise Retry("some day")
    if how == "unrecoverable":
        raise UnrecoverableError("no such card")
    note("end", self)
    return how


# -- retries by hand


@app.task(bind=True, base=SelfHealTask, autoretry_for=(), retry_backoff=0.4, retry_jitter=False)
def by_hand(self, fails):
    note("start", self)
    if self.request.retries < fails:
        raise self.retry()
    return "paid"


@app.task(bind=True, base=SelfHealTask, autoretry_for=(), default_retry_delay=0.6)
def by_hand_fixed(self, fails):
    note("start", self)
    if self.request.retries < fails:
        raise self.retry()
    return "paid"


@app.task(bind=True, base=SelfHealTask, autoretry_for=(OSError,), **QUICK)
def by_hand_until(self, max_retries, with_error):
    note("start", self)
    raise self.retry(max_retries=max_retries, exc=KeyError("gone") if with_error else None)


@app.task(bind=True, base=SelfHealTask, max_retries=None, **QUICK)
def for_ever(self, fails):
    note("start", self)
    if self.request.retries < fails:
        raise ConnectionError("away")
    return "paid"


@app.task(bind=True, base=SelfHealTask, **QUICK)
def without_throw(self, swallow):
    note("start", self)
    if self.request.retries < 2:
        if swallow:
            with suppress(Retry):
                self.retry()
        else:
            self.retry(throw=False)
        # Long enough for a worker that would have received the next attempt already.
        time.sleep(0.5)
    note("end", self)
    return self.request.retries


@app.task(bind=True, base=SelfHealTask, retry_kwargs={"max_retries": 7, "queue": "slow"}, **QUICK)
def with_kwargs(self):
    note("start", self, queue=self.request.delivery_info["routing_key"])
    raise ConnectionError("away")


@app.task(bind=True, base=SelfHealTask, max_retries=None, retry_max_age=2, retry_backoff=0.1, retry_backoff_max=0.5)
def too_old(self, by_hand):
    note("start", self)
    if by_hand:
        raise self.retry(exc=KeyError("gone"))
    raise ConnectionError("away")


# -- what is around a task


@app.task(bind=True, base=SelfHealTask, **QUICK)
def fail_until(self, fails, result=1, hand=False):
    note("start", self)
    if self.request.retries < fails:
        if hand:
            raise self.retry(exc=ConnectionError("away"))
        raise ConnectionError("away")
    note("end", self)
    return result


@app.task(bind=True, base=SelfHealTask)
def total(self, parts):
    note("start", self)
    return sum(parts) if isinstance(parts, list) else parts


@app.task(bind=True, base=SelfHealTask)
def tell(self, *about):
    note("start", self)


TRAVELS = (
    "headers",
    "expires",
    "reply_to",
    "correlation_id",
    "root_id",
    "parent_id",
    "group",
    "group_index",
    "chord",
    "chain",
    "callbacks",
    "errbacks",
    "stamped_headers",
    "stamps",
    "shadow",
    "timelimit",
    "origin",
    "args",
    "kwargs",
)


@app.task(bind=True, base=SelfHealTask, max_retries=2, **QUICK)
def travel(self, *args, **kwargs):
    request = self.request
    seen = {name: json.loads(json.dumps(getattr(request, name), default=str)) for name in TRAVELS}
    info = request.delivery_info
    seen["route"] = [info["exchange"], info["routing_key"], info["priority"]]
    note("start", self, seen=seen)
    raise ConnectionError("away")


# -- a crowd


@app.task(bind=True, base=SelfHealTask, max_retries=None, retry_backoff=0.3, retry_backoff_max=1)
def pay(self, fails, gate=""):
    note("start", self)
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    if self.request.retries < fails:
        note("fail", self)
        raise ConnectionError("away")
    note("end", self)
    return "paid"


@app.task(bind=True, base=SelfHealTask, default_retry_delay=4)
def fail_later(self):
    """All retries come together, when all first attempts have been made."""
    note("start", self)
    if not self.request.retries:
        raise ConnectionError("away")
    note("end", self)


@app.task(bind=True, base=SelfHealTask, **QUICK)
def exhausted_by_catching(self):
    note("start", self)
    try:
        self.retry(max_retries=1)
    except MaxRetriesExceededError:
        raise OSError("told support") from None
