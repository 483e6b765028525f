"""Orders and their parcels: a producer that can be killed at a named step, and tasks that note what they did."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from celery_selfheal import SelfHealTask, apply_on_commit

app = Celery(os.environ["OUTLET_NAME"], broker=os.environ["OUTLET_BROKER"], backend=os.environ["OUTLET_RESULTS"])
app.conf.update(json.loads(os.environ["OUTLET_SETTINGS"]))

FOLDER = Path(os.environ["OUTLET_FOLDER"])


def note(event, task_id, **more):
    """Append one whole line to the diary: it is there before the body goes on, whatever is killed next."""
    line = {"event": event, "id": task_id, "at": time.monotonic(), **more}
    with open(FOLDER / "diary.jsonl", "ab", buffering=0) as diary:
        diary.write(json.dumps(line).encode() + b"\n")


@app.task(bind=True, base=SelfHealTask, name="outlet.parcel")
def parcel(self, order):
    """An effect outside of any transaction."""
    note("parcel", self.request.id, order=order)
    return order


@app.task(bind=True, base=SelfHealTask, dedup="transaction", name="outlet.order")
def order(self, name):
    """A task that is itself a producer."""
    self.session.execute(text("INSERT INTO orders (name) VALUES (:name)"), {"name": name})
    self.on_commit(lambda: note("called", self.request.id, order=name))
    self.send_on_commit(parcel.s(name).set(task_id=f"parcel-{name}"))
    return name


def die(*_, **__):
    """Once: the second time that a task comes here, it lives."""
    died = FOLDER / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die_at(point):
    """Let this process die of SIGKILL at one step of the way from the commit to the removal of the row."""
    from celery_selfheal.outbox.store import Held
    from celery_selfheal.plugin import on_commit

    if point == "before publishing":
        send_stored = on_commit.send_stored
        on_commit.send_stored = lambda *args: (die(), send_stored(*args))
    elif point == "before removing":
        remove = Held.remove
        Held.remove = lambda *args: (die(), remove(*args))


def produce(names):
    """Place orders in one transaction."""
    with Session(create_engine(app.conf.selfheal_database_url)) as session:
        for name in names:
            session.execute(text("INSERT INTO orders (name) VALUES (:name)"), {"name": name})
            apply_on_commit(session, parcel.s(name).set(task_id=f"parcel-{name}"))
        session.commit()


if os.environ.get("OUTLET_DIE_AT"):
    die_at(os.environ["OUTLET_DIE_AT"])
if __name__ == "__main__":
    produce(sys.argv[1:])
