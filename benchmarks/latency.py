"""How soon an idle worker starts a task, beside plain Celery and beside a lock taken in the body; and how it idles.

As an application of its workers, ``celery -A benchmarks.latency``, it is what the environment asks for.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import redis
from celery import Celery, Task

from benchmarks.machine import describe_machine
from benchmarks.report import Figure, Report, figures_of, progress
from benchmarks.spread import spread
from benchmarks.stage import ROOT, Stage
from celery_selfheal import SelfHealTask
from celery_selfheal.leases.scripts import Script
from celery_selfheal.testing import WorkerProcess

LANE_VARIABLE = "BENCHMARK_LATENCY_LANE"
URL_VARIABLE = "BENCHMARK_LATENCY_URL"
TOLD = "told"
"""List in the lane's database: how long each task was under way, in seconds."""

STUCK_SECONDS = 30
LONGEST_IDLE_SECONDS = 0.3  # between two tasks of a lane, at the least; so that each comes at another phase
QUIET_SECONDS = 2.0  # until the last task's acknowledgement is out of the way
WAITS = ("BRPOP", "BLMOVE", "fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One idle worker, in a database of its own.

    Attributes:
        plain: Celery's own task class.
        lock: Whether the body takes a redis-py Lock before it says that it runs.
        steps: Kombu's ``priority_steps``; ``None`` for its default of four.
        idle_at_most: Commands a second that the design allows.
    """

    name: str
    about: str
    plain: bool
    lock: bool = False
    steps: tuple[int, ...] | None = None
    idle_at_most: float | None = None


LANES = (
    Lane(name="plain", about="plain Celery, late ack, no priorities", plain=True, steps=(0,)),
    Lane(name="ours", about="ours, no priorities", plain=False, steps=(0,), idle_at_most=2),
    Lane(
        name="lock", about="plain Celery, a redis-py Lock in the body, no priorities", plain=True, lock=True, steps=(0,)
    ),
    Lane(name="plain_steps", about="plain Celery, late ack, default priority steps", plain=True),
    Lane(name="ours_steps", about="ours, default priority steps", plain=False, idle_at_most=15),
)
# Against whom, and by how many milliseconds the design lets it be later at the median.
PAIRS = (("ours", "plain", 5.0), ("ours", "lock", None), ("ours_steps", "plain_steps", None))


def make_app(lane: Lane, url: str) -> Celery:
    """Make the application of a lane."""
    app = Celery("latency", broker=url, set_as_current=False)
    options = {} if lane.steps is None else {"priority_steps": list(lane.steps)}
    app.conf.update(broker_transport_options=options, broker_connection_retry_on_startup=True)
    kind: dict[str, Any] = {"base": Task, "acks_late": True} if lane.plain else {"base": SelfHealTask}
    clients: dict[int, Any] = {}

    @app.task(name="tell", ignore_result=True, shared=False, bind=True, **kind)
    def tell(self: Any, sent_at: float) -> None:
        # By process: a forked child must not talk on its parent's connection.
        client = clients.setdefault(os.getpid(), redis.Redis.from_url(url))
        if lane.lock:
            with client.lock(f"lock:{self.request.id}", timeout=10):
                started_at = time.monotonic()
        else:
            started_at = time.monotonic()
        client.rpush(TOLD, started_at - sent_at)

    return app


if LANE_VARIABLE in os.environ:
    app = make_app(next(one for one in LANES if one.name == os.environ[LANE_VARIABLE]), os.environ[URL_VARIABLE])


class Runner:
    """A lane with its worker.

    Attributes:
        db: Number of its database.
    """

    def __init__(self, lane: Lane, stage: Stage, folder: Path, *, db: int) -> None:
        self.lane = lane
        self.db = db
        url = stage.server.url(db)
        self._client = stage.client(db)
        self._task = make_app(lane, url).tasks["tell"]
        self.worker = WorkerProcess(
            "benchmarks.latency",
            cwd=ROOT,
            log=folder / f"{lane.name}.log",
            name=lane.name.replace("_", "-"),
            env={LANE_VARIABLE: lane.name, URL_VARIABLE: url},
        )

    def measure(self) -> float:
        """Milliseconds from before publishing until the body runs, on the one monotonic clock of this machine."""
        self._task.apply_async((time.monotonic(),))
        told = self._client.blpop([TOLD], timeout=STUCK_SECONDS)
        if told is None:
            raise click.ClickException(f"{self.lane.about}: a task did not start in {STUCK_SECONDS} s")
        return float(told[1]) * 1000


def watch(stage: Stage, *, seconds: float, databases: Sequence[int]) -> dict[int, Counter[str]]:
    """Count what clients send to each database; what runs inside a script is not counted."""
    fetch = Script(stage.client(), "celery_selfheal.sessions", "fetch", address="").sha
    sent: dict[int, Counter[str]] = {db: Counter() for db in databases}
    client = stage.client()
    with client.monitor() as monitor:
        # Else a server that is asked nothing would be waited for.
        end = threading.Timer(seconds, lambda: stage.client().echo("end"))
        end.start()
        for command in monitor.listen():
            name, _, rest = command["command"].partition(" ")
            if name.upper() == "ECHO":
                break
            if command["client_type"] != "lua" and command["db"] in sent:
                sent[command["db"]]["fetch" if rest.startswith(fetch) else name.upper()] += 1
    return sent


def figures(waited: dict[str, list[float]], idle: dict[str, Counter[str]], *, idle_seconds: float) -> list[Figure]:
    """Each lane's latency, the differences of medians, and what idling costs."""
    lanes = {lane.name: lane for lane in LANES if lane.name in waited}
    found: list[Figure] = []
    for name, lane in lanes.items():
        found += figures_of(name, lane.about, waited[name], unit="ms")
    for name, other, at_most in PAIRS:
        if name in lanes and other in lanes:
            found.append(
                Figure(
                    name=f"{name}_after_{other}",
                    about=f"{lanes[name].about}: later than {lanes[other].about}",
                    value=spread(waited[name]).p50 - spread(waited[other]).p50,
                    unit="ms",
                    part="p50",
                    at_most=at_most,
                )
            )
    for name, lane in lanes.items():
        waits = sum(count for command, count in idle[name].items() if command in WAITS)
        for part, count, at_most in (("waiting", waits, lane.idle_at_most), ("all", idle[name].total(), None)):
            found.append(
                Figure(
                    name=f"{name}_idle_{part}",
                    about=f"{lane.about}: commands while idle",
                    value=count / idle_seconds,
                    unit="1/s",
                    part=part,
                    at_most=at_most,
                )
            )
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=100, show_default=True, help="Tasks for each worker.")
@click.option(
    "--idle", type=click.FloatRange(1), default=20.0, show_default=True, help="Seconds to watch idle workers."
)
@click.option("--quick", is_flag=True, help="Twenty tasks and five seconds.")
@click.option(
    "--only", type=click.Choice([one.name for one in LANES]), multiple=True, help="Only this one; several times."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, idle: float, quick: bool, only: tuple[str, ...], as_json: bool) -> None:
    """Send single tasks to idle workers, one worker after the other, in another order each round.

    All workers are there all the time, so whatever else the machine does favours nobody.
    """
    rounds, idle = (20, 5.0) if quick else (rounds, idle)
    lanes = [one for one in LANES if not only or one.name in only]
    chance = random.Random(1)
    waited: dict[str, list[float]] = {lane.name: [] for lane in lanes}
    with Stage() as stage, tempfile.TemporaryDirectory(prefix="selfheal-latency-") as folder, ExitStack() as stack:
        machine = describe_machine(stage.client())
        runners = [Runner(lane, stage, Path(folder), db=db) for db, lane in enumerate(lanes)]
        for runner in runners:
            stack.enter_context(runner.worker)
            runner.measure()  # until then the child imports and connects
        for n in range(rounds):
            for runner in chance.sample(runners, len(runners)):
                time.sleep(chance.uniform(0, LONGEST_IDLE_SECONDS))
                waited[runner.lane.name].append(runner.measure())
            if (n + 1) % 10 == 0:
                progress(f"{n + 1} of {rounds} tasks for each worker")
        time.sleep(QUIET_SECONDS)
        progress(f"{idle:g} s of idling")
        sent = watch(stage, seconds=idle, databases=[runner.db for runner in runners])
        idled = {runner.lane.name: sent[runner.db] for runner in runners}
    progress(json.dumps(idled))
    Report(
        benchmark="latency",
        machine=machine,
        conditions={"rounds": rounds, "idle_seconds": idle},
        figures=figures(waited, idled, idle_seconds=idle),
        samples=waited,
    ).show(as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.latency")
