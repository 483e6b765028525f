"""Effects once in one transaction, beside the same transaction written by hand; and a purge beside running tasks."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import click

from benchmarks.books import LOG, Books
from benchmarks.crew import start_worker
from benchmarks.emptying import Run, empty
from benchmarks.ledger import make_app, publish
from benchmarks.machine import describe_machine
from benchmarks.purging import purge_beside_tasks
from benchmarks.report import Figure, Report, progress
from benchmarks.spread import spread
from benchmarks.stage import Stage
from benchmarks.statements import count_statements, statement_figures
from celery_selfheal.testing.postgres import PostgresServer

AT_LEAST = 0.9
CONCURRENCY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to make an effect happen once.

    Attributes:
        plain: Celery's own task class.
        table: Where its rows are.
    """

    name: str
    about: str
    task: str
    plain: bool
    table: str


CONTENDERS = (
    Contender(name="ours", about='ours, dedup="transaction"', task="ours", plain=False, table="processed_jobs"),
    Contender(name="by_hand", about="ours, transaction by hand", task="by_hand", plain=False, table="by_hand"),
    Contender(
        name="plain", about="plain Celery, late ack, transaction by hand", task="by_hand", plain=True, table="by_hand"
    ),
)


# Against whom, and what the design promises of the ratio. Plain Celery has no leases, which `throughput` measures.
PAIRS = (("ours", "by_hand", AT_LEAST), ("ours", "plain", None))


def run(stage: Stage, postgres: PostgresServer, books: Books, contender: Contender, *, tasks: int) -> Run:
    """Let a new worker empty a full queue."""
    broker = stage.client()
    broker.flushall()
    books.clear()
    task = make_app(stage.url, books.url, plain=contender.plain).tasks[contender.task]
    publish(task, tasks)
    worker = start_worker(stage, books, plain=contender.plain, concurrency=CONCURRENCY)
    done = empty(worker, broker, tasks=tasks, about=contender.about, databases=postgres.pid)
    for table in ("entries", contender.table):
        rows = books.count_rows(table)
        if rows != tasks:
            raise click.ClickException(f"{contender.about}: {rows} rows in {table} after {tasks} tasks")
    return done


def figures(runs: dict[str, list[Run]]) -> list[Figure]:
    """Each contender's rate, what a task costs, and the promised ratios."""
    about = {contender.name: contender.about for contender in CONTENDERS}
    rates = {name: spread([run.rate for run in done]).p50 for name, done in runs.items()}
    costs = {name: spread([run.whole_cpu for run in done]).p50 for name, done in runs.items()}
    found = [
        Figure(name=name, about=about[name], value=rate, unit="tasks/s", part="p50") for name, rate in rates.items()
    ]
    for name, other, at_least in PAIRS:
        pair = f"{about[name]} against {about[other]}"
        found.append(
            Figure(
                name=f"{name}_to_{other}",
                about=f"{pair}, ratio of medians",
                value=rates[name] / rates[other],
                at_least=at_least,
            )
        )
        if costs[name]:
            found.append(
                Figure(
                    name=f"{name}_to_{other}_cpu",
                    about=f"{pair}, the other's processor time to ours",
                    value=costs[other] / costs[name],
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
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Runs of each contender.")
@click.option("--tasks", type=click.IntRange(100), default=3_000, show_default=True, help="Tasks of each run.")
@click.option("--rows", type=click.IntRange(0), default=1_000_000, show_default=True, help="To purge; 0: no purge.")
@click.option("--quick", is_flag=True, help="Two runs of 500 tasks, and at most 20000 rows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, tasks: int, rows: int, quick: bool, as_json: bool) -> None:
    """Let workers do tasks with one INSERT, under the dedup and with the same statements written by hand.

    The contenders take turns, in another order each round. Then their statements are counted on the server, and old
    rows are purged beside running tasks.
    """
    rounds, tasks, rows = (2, 500, min(rows, 20_000)) if quick else (rounds, tasks, rows)
    runs: dict[str, list[Run]] = defaultdict(list)
    chance = random.Random(1)
    with Stage() as stage, PostgresServer(config=LOG) as postgres:
        machine = describe_machine(stage.client())
        books = Books(postgres)
        for n in range(rounds):
            # Shuffled: a machine that gets slower or faster favours nobody.
            for contender in chance.sample(CONTENDERS, len(CONTENDERS)):
                done = run(stage, postgres, books, contender, tasks=tasks)
                runs[contender.name].append(done)
                progress(
                    f"round {n + 1} of {rounds}: {done.rate:5.0f} tasks/s, {done.whole_cpu:.2f} ms a task,"
                    f" {contender.about}"
                )
        found = figures({one.name: runs[one.name] for one in CONTENDERS})
        found += statement_figures(count_statements(stage, postgres))
        samples = {name: [run.rate for run in done] for name, done in runs.items()}
        if rows:
            purging = purge_beside_tasks(stage, books, rows=rows)
            found += purging.figures()
            samples |= purging.samples()
    Report(
        benchmark="dedup",
        machine=machine,
        conditions={"rounds": rounds, "tasks": tasks, "rows": rows},
        figures=found,
        samples=samples,
    ).show(as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.dedup")
