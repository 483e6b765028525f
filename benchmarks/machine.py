"""On what was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("celery", "kombu", "billiard", "redis", "celery_selfheal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and versions.

    Attributes:
        cores: Those that this process may use.
        load: Average of the last minute when the run began: what else the machine was busy with.
        server: Name and version of the server that was started; empty where there was none.
    """

    system: str
    processor: str
    cores: int
    load: float
    python: str
    server: str
    versions: dict[str, str]

    def __str__(self) -> str:
        parts = [f"{name} {version}" for name, version in self.versions.items()]
        return ", ".join(
            [
                f"{self.processor} x {self.cores}, load {self.load:.1f}",
                self.system,
                f"Python {self.python}",
                *filter(None, [self.server]),
                *parts,
            ]
        )


def describe_machine(client: Any | None = None) -> Machine:
    """Describe this machine and the server behind ``client``, if there is one."""
    server = client.info("server") if client else {}
    name = server.get("server_name", "redis")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        python=platform.python_version(),
        server=f"{name} {server.get(f'{name}_version', server['redis_version'])}" if server else "",
        versions={name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
