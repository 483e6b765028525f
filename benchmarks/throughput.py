"""No-op tasks a second, beside plain Celery with late acknowledgement and beside a lock taken in the body."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import click

from benchmarks.emptying import Run, empty
from benchmarks.machine import describe_machine
from benchmarks.report import Figure, Report, progress
from benchmarks.spread import spread
from benchmarks.stage import Stage
from benchmarks.tasks import make_app


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run a task.

    Attributes:
        plain: The plugin is not there at all.
    """

    name: str
    about: str
    task: str
    plain: bool


CONTENDERS = (
    Contender(name="plain", about="plain Celery, late ack", task="nothing", plain=True),
    Contender(name="ours", about="ours", task="nothing", plain=False),
    Contender(
        name="fetch", about="plain tasks, late ack, in a worker with our fetch", task="nothing_plain", plain=False
    ),
    Contender(
        name="plain_result", about="plain Celery, late ack, result stored", task="nothing_with_result", plain=True
    ),
    Contender(name="ours_result", about="ours, result stored", task="nothing_with_result", plain=False),
    Contender(name="lock", about="plain Celery, a redis-py Lock in the body", task="nothing_under_lock", plain=True),
)
# Against whom, and what the design promises of the ratio.
PAIRS = (
    ("ours", "plain", 0.85),
    ("ours_result", "plain_result", 0.85),
    ("fetch", "plain", 1.0),
    ("ours", "lock", 1.0),
)


def run(stage: Stage, contender: Contender, *, tasks: int, concurrency: int) -> Run:
    """Let a new worker empty a full queue."""
    broker = stage.client()
    broker.flushall()
    app = make_app(stage.url, plain=contender.plain)
    task = app.tasks[contender.task]
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(tasks):
            task.apply_async(producer=producer)
    # As Celery's own default: at INFO both would mostly write logs.
    worker = stage.worker(plain=contender.plain, concurrency=concurrency, args=["-l", "WARNING"])
    return empty(worker, broker, tasks=tasks, about=contender.about)


def figures(runs: dict[str, list[Run]]) -> list[Figure]:
    """Each contender's rate, the promised ratios, and what a task costs."""
    medians = {name: spread([run.rate for run in done]).p50 for name, done in runs.items()}
    about = {contender.name: contender.about for contender in CONTENDERS}
    found = [
        Figure(name=name, about=about[name], value=median, unit="tasks/s", part="p50")
        for name, median in medians.items()
    ]
    for name, other, at_least in PAIRS:
        if name in medians and other in medians:
            found.append(
                Figure(
                    name=f"{name}_to_{other}",
                    about=f"{about[name]} against {about[other]}, ratio of medians",
                    value=medians[name] / medians[other],
                    at_least=at_least,
                )
            )
    found += [
        Figure(
            name=f"{name}_cpu_{who}",
            about=f"{about[name]}, processor a task: {who}",
            value=spread([run.cpu[who] for run in done]).p50,
            unit="ms",
            part="p50",
        )
        for name, done in runs.items()
        for who in done[0].cpu
    ]
    found += [
        Figure(
            name=f"{name}_cpu",
            about=f"{about[name]}, processor a task: all of them",
            value=spread([sum(run.cpu.values()) for run in done]).p50,
            unit="ms",
            part="p50",
        )
        for name, done in runs.items()
        if done[0].cpu
    ]
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Runs of each contender.")
@click.option("--tasks", type=click.IntRange(100), default=3_000, show_default=True, help="Tasks of each run.")
@click.option("--concurrency", type=click.IntRange(1), default=2, show_default=True, help="Children of the worker.")
@click.option("--quick", is_flag=True, help="Two runs of 1000 tasks.")
@click.option(
    "--only", type=click.Choice([one.name for one in CONTENDERS]), multiple=True, help="Only this one; several times."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, tasks: int, concurrency: int, quick: bool, only: tuple[str, ...], as_json: bool) -> None:
    """Let workers empty queues of no-op tasks, one contender after the other, in another order each round.

    A no-op is the worst case: the longer a task takes, the less our calls weigh.
    """
    rounds, tasks = (2, 1_000) if quick else (rounds, tasks)
    contenders = [one for one in CONTENDERS if not only or one.name in only]
    runs: dict[str, list[Run]] = defaultdict(list)
    chance = random.Random(1)
    with Stage() as stage:
        machine = describe_machine(stage.client())
        for n in range(rounds):
            # Shuffled: a machine that gets slower or faster favours nobody.
            for contender in chance.sample(contenders, len(contenders)):
                done = run(stage, contender, tasks=tasks, concurrency=concurrency)
                runs[contender.name].append(done)
                progress(f"round {n + 1} of {rounds}: {done.rate:5.0f} tasks/s, {contender.about}")
    Report(
        benchmark="throughput",
        machine=machine,
        conditions={"rounds": rounds, "tasks": tasks, "concurrency": concurrency},
        figures=figures({one.name: runs[one.name] for one in contenders}),
        samples={name: [run.rate for run in done] for name, done in runs.items()},
    ).show(as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.throughput")
