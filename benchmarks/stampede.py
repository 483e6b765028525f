"""``python -m benchmarks.stampede``: how many retries start at once when a crowd of tasks fails together."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
from celery import Celery
from celery.utils.time import get_exponential_backoff_interval

from benchmarks.machine import describe_machine
from benchmarks.report import Figure, Report, progress
from benchmarks.spread import spread
from celery_selfheal import SelfHealTask
from celery_selfheal.backoff import RetryPolicy

TASKS = 1_000
OUTAGE_SECONDS = 20.0
WINDOW_SECONDS = 0.1
MOST_STARTS = 200  # in any window; what the design promises

Wait = Callable[[int, random.Random], float]
"""Seconds before the retry of an attempt, counted from 0."""


@dataclass(frozen=True)
class Crowd:
    """What became of tasks that failed together at instant 0.

    Attributes:
        starts: Instants of all retries, in order.
        done: Instants at which the tasks succeeded, in order.
    """

    starts: Sequence[float]
    done: Sequence[float]


def policies() -> dict[str, RetryPolicy]:
    """The default of the plugin and its other kinds of jitter, as tasks get them."""
    app = Celery("stampede", set_as_current=False)

    def call() -> None:
        """Call the dependency."""

    found = {}
    for jitter in ("full", "equal", "decorrelated"):
        app.task(call, base=SelfHealTask, name=f"stampede.{jitter}", retry_jitter=jitter, shared=False)
        found[jitter] = app.tasks[f"stampede.{jitter}"].retry_policy
    return found


def ours(policy: RetryPolicy) -> Wait:
    """As a worker of ours draws it."""
    return lambda attempt, chance: policy.delay(attempt, chance=chance).total_seconds()


def celerys(attempt: int, chance: random.Random) -> float:
    """As Celery draws it for ``retry_backoff=True``; its helper has no source of chance but the module's own."""
    random.seed(chance.getrandbits(64))
    return get_exponential_backoff_interval(factor=1, retries=attempt, maximum=600, full_jitter=True)


def simulate(wait: Wait, chance: random.Random, *, tasks: int, outage_seconds: float) -> Crowd:
    """Let all tasks fail at 0 and try again until the dependency is back; bodies and queues take no time."""
    due = [(wait(0, chance), number, 1) for number in range(tasks)]
    heapq.heapify(due)
    starts, done = [], []
    while due:
        now, number, attempt = heapq.heappop(due)
        starts.append(now)
        if now < outage_seconds:
            heapq.heappush(due, (now + wait(attempt, chance), number, attempt + 1))
        else:
            done.append(now)
    return Crowd(starts, done)


def most_in_a_window(instants: Sequence[float], seconds: float) -> int:
    """The most of them within any half-open span of so many seconds; they must be in order."""
    most, window = 0, deque[float]()
    for instant in instants:
        window.append(instant)
        while window[0] <= instant - seconds:
            window.popleft()
        most = max(most, len(window))
    return most


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Crowds of each kind.")
@click.option("--quick", is_flag=True, help="Three rounds.")
@click.option("--tasks", type=click.IntRange(1), default=TASKS, show_default=True, help="Tasks in a crowd.")
@click.option("--seed", type=int, default=1, show_default=True, help="Decides every draw.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, quick: bool, tasks: int, seed: int, as_json: bool) -> None:
    """Simulate a crowd that fails together against a dependency that is down, and count its busiest tenth of a second.

    The waits are drawn by the very policy object that tasks have, and beside it by Celery's own helper. Nothing is
    timed and no server is needed. Tasks have as many attempts as they need, so that none drops out of the crowd.
    """
    rounds = 3 if quick else rounds
    waits: dict[str, Wait] = {name: ours(policy) for name, policy in policies().items()}
    waits["celery"] = celerys
    most: dict[str, list[float]] = {}
    found: list[Figure] = []
    for name, wait in waits.items():
        crowds = [
            simulate(wait, random.Random(f"{seed}-{number}"), tasks=tasks, outage_seconds=OUTAGE_SECONDS)
            for number in range(rounds)
        ]
        most[name] = [most_in_a_window(crowd.starts, WINDOW_SECONDS) for crowd in crowds]
        late = spread([instant - OUTAGE_SECONDS for crowd in crowds for instant in crowd.done])
        about = "Celery's whole seconds" if name == "celery" else f"{name} jitter"
        found += [
            Figure(
                name=f"{name}_most_starts",
                about=f"{about}, most starts in any {WINDOW_SECONDS:g} s",
                value=max(most[name]),
                at_most=MOST_STARTS if name == "full" and tasks == TASKS else None,
            ),
            Figure(name=f"{name}_late_p50", about=f"{about}, done after the outage, p50", value=late.p50, unit="s"),
            Figure(name=f"{name}_late_max", about=f"{about}, done after the outage, max", value=late.most, unit="s"),
        ]
        progress(f"{about}: {max(most[name]):.0f} starts in the busiest {WINDOW_SECONDS:g} s of {rounds} rounds")
    Report(
        benchmark="stampede",
        machine=describe_machine(),
        conditions={"tasks": tasks, "rounds": rounds, "seed": seed, "outage": OUTAGE_SECONDS},
        figures=found,
        samples={f"{name}_most_starts": samples for name, samples in most.items()},
    ).show(as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.stampede")
