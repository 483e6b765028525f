"""A worker empties a full queue: how fast, and for how much of the processor."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.tasks import QUEUE
from celery_selfheal.testing import WorkerProcess
from celery_selfheal.testing.processes import children

WARM_UP_SHARE = 0.1  # of the tasks: until then children import and connect
POLL_SECONDS = 0.01
STUCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One emptied queue.

    Attributes:
        rate: Tasks a second, once the worker is warm.
        cpu: Milliseconds of processor for each task, by who used them; unlike the rate, other programs on the machine
            hardly change it. Empty where there is no ``/proc``.
    """

    rate: float
    cpu: dict[str, float]

    @property
    def whole_cpu(self) -> float:
        """Milliseconds of processor for each task, by all together."""
        return sum(self.cpu.values())


def empty(worker: WorkerProcess, broker: Any, *, tasks: int, about: str, databases: int | None = None) -> Run:
    """Wait until a worker that was just started has emptied a queue of so many tasks, and end it.

    Args:
        about: Names the worker, if it is stuck.
        databases: Process id of a database server whose processor counts, too.
    """
    warm_at, warm_left = 0.0, 0
    before: dict[str, float] = {}
    moved_at, left = time.monotonic(), tasks
    while left:
        time.sleep(POLL_SECONDS)
        with broker.pipeline(transaction=True) as pipe:
            waiting, unacked = pipe.llen(QUEUE).hlen("unacked").execute()
        now = time.monotonic()
        if waiting + unacked < left:
            moved_at = now
        elif now - moved_at > STUCK_SECONDS:
            raise click.ClickException(f"{about}: stuck with {left} tasks left")
        left = waiting + unacked
        if not warm_at and left <= tasks * (1 - WARM_UP_SHARE):
            warm_at, warm_left = now, left
            before = _cpu_ms(worker, broker, databases)
    after = _cpu_ms(worker, broker, databases)
    worker.stop(grace=0)
    return Run(
        rate=warm_left / (moved_at - warm_at),
        cpu={who: (spent - before[who]) / warm_left for who, spent in after.items()},
    )


def _cpu_ms(worker: WorkerProcess, broker: Any, databases: int | None) -> dict[str, float]:
    """Milliseconds of processor that main, children and servers have used so far."""
    if not Path("/proc/self/stat").exists():
        return {}
    server = broker.info("cpu")
    spent = {
        "main": _process_ms(worker.pid),
        "children": sum(_process_ms(pid) for pid in worker.child_pids()),
        "server": (server["used_cpu_user"] + server["used_cpu_sys"]) * 1000,
    }
    if databases is not None:
        # One process a connection: those that have ended count with their parent.
        spent["database"] = _process_ms(databases, reaped=True) + sum(_process_ms(pid) for pid in children(databases))
    return spent


def _process_ms(pid: int, *, reaped: bool = False) -> float:
    """User and system time of a process; with ``reaped``, that of its ended children, too."""
    # The command in field 2 may itself hold spaces and parentheses; no field after it does.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11 : 15 if reaped else 13])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")
