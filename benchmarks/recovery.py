"""How long after SIGKILL the tasks of a child or of a whole worker go on."""

from __future__ import annotations

import functools
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from benchmarks.machine import describe_machine
from benchmarks.report import Figure, Report, figures_of, progress
from benchmarks.stage import Stage
from benchmarks.tasks import QUEUE, TOLD, make_app
from celery_selfheal.settings import SelfHealSettings
from celery_selfheal.testing import WorkerProcess

NAP_SECONDS = 0.2
RESERVED = 3
HEAL_SECONDS = 60.0  # then the round is given up: the task is lost or stuck
POLL_SECONDS = 0.02

SETTINGS = SelfHealSettings()
SWEEP_SECONDS = SETTINGS.reaper_interval.total_seconds()
TTL_SECONDS = SETTINGS.lease_ttl.total_seconds()
BEAT_SECONDS = SETTINGS.heartbeat_interval.total_seconds()
PATTERN_SECONDS = SWEEP_SECONDS * BEAT_SECONDS
"""Beats and sweeps meet again after so long: a kill at a random instant of this meets all that can be."""


@dataclass(slots=True)
class Case:
    """Seconds of each round of one kind of kill.

    Attributes:
        detected: From the kill until Celery said that the child was gone.
        again: From the kill (child: from its detection) until the running task was started again, less the time that
            tasks before it took.
        finished: From the kill until the last reserved task had finished, less what the tasks themselves took.
        extra_starts: Starts that no kill explains.
    """

    detected: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    extra_starts: int = 0


class Round:
    """One task that runs and holds, and a few that are reserved behind it."""

    def __init__(self, stage: Stage, app: Any, name: str) -> None:
        self._broker = stage.client()
        self._told = stage.client(1)
        self._nap = app.tasks["nap"]
        self._running = f"{name}-running"
        self._reserved = [f"{name}-reserved-{n}" for n in range(RESERVED)]

    def begin(self) -> None:
        """Publish, and wait until the only worker runs one and holds the others."""
        self._told.delete(TOLD)
        self._nap.delay(self._running, True, NAP_SECONDS)
        self._await(lambda: len(self._times("started", self._running)) == 1)
        for name in self._reserved:
            self._nap.delay(name, False, NAP_SECONDS)
        self._await(lambda: self._broker.llen(QUEUE) == 0 and self._broker.hlen("unacked") == 1 + RESERVED)

    def await_end(self) -> None:
        """Wait until all have ended."""
        self._await(lambda: all(self._times("ended", name) for name in [self._running, *self._reserved]))

    def seconds_to_restart(self, since: float) -> float:
        """From an instant to the second start of the running task, less the naps of others in between."""
        restarted_at = self._times("started", self._running)[1]
        return restarted_at - since - self._napped(until=restarted_at)

    def seconds_to_last(self, since: float) -> float:
        """From an instant to the end of the last reserved task, less all naps in between."""
        ended_at = max(self._times("ended", name)[0] for name in self._reserved)
        return ended_at - since - self._napped(until=ended_at)

    def extra_starts(self) -> int:
        """Starts beyond two of the running task and one of each reserved one."""
        reserved = sum(len(self._times("started", name)) - 1 for name in self._reserved)
        return reserved + len(self._times("started", self._running)) - 2

    def _napped(self, *, until: float) -> float:
        """How long tasks slept that ended before an instant; what a killed start did is not among it."""
        ends = {name: self._times("ended", name)[0] for name in [self._running, *self._reserved]}
        return sum(end - self._times("started", name)[-1] for name, end in ends.items() if end <= until)

    def _times(self, event: str, name: str) -> list[float]:
        told = [json.loads(line) for line in self._told.lrange(TOLD, 0, -1)]
        return [instant for one, who, instant in told if one == event and who == name]

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HEAL_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                told = self._told.lrange(TOLD, 0, -1)
                raise click.ClickException(f"lost or stuck for {HEAL_SECONDS:g} s; all that tasks have told: {told}")
            time.sleep(POLL_SECONDS)


def kill_children(stage: Stage, rounds: int, chance: random.Random) -> Case:
    """SIGKILL the pool child of one worker, again and again."""
    case = Case()
    app = make_app(stage.url, plain=False)
    worker = stage.worker()
    worker.wait_ready()
    for n in range(rounds):
        this = Round(stage, app, f"child-{n}")
        this.begin()
        time.sleep(chance.uniform(0, 1))
        mark = len(worker.log_text())
        killed_at = time.time()
        worker.kill_child()
        detected_at = float(worker.wait_log("exited with", after=mark).split()[0])
        case.detected.append(detected_at - killed_at)
        this.await_end()
        case.again.append(this.seconds_to_restart(detected_at))
        case.finished.append(this.seconds_to_last(killed_at))
        case.extra_starts += this.extra_starts()
        progress(f"child, round {n + 1} of {rounds}: started again {case.again[-1]:.2f} s after its detection")
    worker.stop()
    return case


def kill_workers(stage: Stage, rounds: int, chance: random.Random, *, witness: bool) -> Case:
    """SIGKILL a whole worker while another one is there; the survivor is the next to be killed.

    Args:
        witness: Whether the survivor can ask the kernel what became of the other; else it is as on another machine.
    """
    case = Case()
    app = make_app(stage.url, plain=False)
    victim = _ready(stage, witness=witness)
    for n in range(rounds):
        this = Round(stage, app, f"worker-{witness}-{n}")
        this.begin()
        survivor = _ready(stage, witness=witness)
        time.sleep(chance.uniform(0, PATTERN_SECONDS))
        killed_at = time.time()
        victim.kill_group()
        this.await_end()
        case.again.append(this.seconds_to_restart(killed_at))
        case.finished.append(this.seconds_to_last(killed_at))
        case.extra_starts += this.extra_starts()
        progress(
            f"worker {'with' if witness else 'without'} witness, round {n + 1} of {rounds}:"
            f" started again after {case.again[-1]:.2f} s"
        )
        victim = survivor
    victim.stop()
    return case


def _ready(stage: Stage, *, witness: bool) -> WorkerProcess:
    worker = stage.worker(pid_namespace=not witness)
    worker.wait_ready()
    return worker


CASES: dict[str, Callable[[Stage, int, random.Random], Case]] = {
    "child": kill_children,
    "worker": functools.partial(kill_workers, witness=True),
    "no-witness": functools.partial(kill_workers, witness=False),
}


def figures(cases: dict[str, Case]) -> list[Figure]:
    """What the design promises, beside what was measured."""
    found: list[Figure] = []
    bounds: dict[str, dict[str, float]] = defaultdict(
        dict,
        {
            "child": {"p95_at_most": 1.0},
            "worker": {"p95_at_most": SWEEP_SECONDS + 1},
            "no-witness": {"p99_at_most": TTL_SECONDS + SWEEP_SECONDS + 1},
        },
    )
    for name, case in cases.items():
        if case.detected:
            found += figures_of(f"{name}_detected", f"{name} killed, Celery notices", case.detected, unit="s")
        since = "since Celery noticed" if case.detected else "since the kill"
        found += figures_of(
            f"{name}_running",
            f"{name} killed, task starts again {since}, less the time of tasks before it",
            case.again,
            unit="s",
            **bounds[name],
        )
        found += figures_of(
            f"{name}_reserved",
            f"{name} killed, last reserved task has ended, less the tasks' own time",
            case.finished,
            unit="s",
            # Celery's own detection is in it, and is not ours to promise.
            **({} if case.detected else bounds[name]),
        )
        found.append(
            Figure(
                name=f"{name}_extra_starts",
                about=f"{name} killed, starts that no kill explains",
                value=case.extra_starts,
                at_most=0,
            )
        )
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Kills of each kind.")
@click.option("--quick", is_flag=True, help="Three rounds.")
@click.option("--case", "names", type=click.Choice(list(CASES)), multiple=True, help="Only this kind; several times.")
@click.option("--seed", type=int, default=1, show_default=True, help="Decides the instants of the kills.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, quick: bool, names: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Kill children and workers, and take the time until their tasks go on.

    A worker has one child, one running and three reserved tasks, and default settings. "no-witness" gives each worker a
    pid namespace of its own, as if it were on another machine. Exit status 1 if a task is lost.
    """
    rounds = 3 if quick else rounds
    names = names or tuple(CASES)
    if "no-witness" in names and shutil.which("unshare") is None:
        raise click.UsageError("no-witness needs Linux with unshare; choose with --case")
    cases: dict[str, Case] = {}
    with Stage() as stage:
        machine = describe_machine(stage.client())
        for name in names:
            cases[name] = CASES[name](stage, rounds, random.Random(seed))
    Report(
        benchmark="recovery",
        machine=machine,
        conditions={"rounds": rounds, "seed": seed, "ttl": TTL_SECONDS, "sweep": SWEEP_SECONDS, "beat": BEAT_SECONDS},
        figures=figures(cases),
        samples={
            f"{name}_{part}": samples
            for name, case in cases.items()
            for part, samples in (("detected", case.detected), ("running", case.again), ("reserved", case.finished))
            if samples
        },
    ).show(as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.recovery")
