"""Fixtures of the acceptance tests: a private server a module, a fleet of real workers a test."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_selfheal.testing import RedisServer
from integration.fleet import Fleet

ROUNDS_VARIABLE = "SELFHEAL_TEST_ROUNDS"
FIGURES = "figures"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A private Redis; each fleet empties it."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def fleet(server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Workers of this test only. When it fails, their logs are in its report."""
    fleet = Fleet(server, tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-60:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture
def rounds() -> Callable[[int], int]:
    """So many rounds as the test says, unless ``SELFHEAL_TEST_ROUNDS`` says how many."""

    def count(usual: int) -> int:
        return int(os.environ.get(ROUNDS_VARIABLE) or usual)

    return count


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[str, list[float]], dict[str, float]]:
    """Show measured seconds in the summary at the end of the run, and return their percentiles."""

    def show(what: str, seconds: list[float]) -> dict[str, float]:
        values = {f"p{p}": percentile(seconds, p) for p in (50, 95, 99)}
        values["max"] = max(seconds)
        text = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
        record_property(FIGURES, f"{what}: n {len(seconds)}  {text} s")
        return values

    return show


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for key in ("passed", "failed") for report in terminalreporter.getreports(key)]
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for report in reports
        if report.when == "call"
        for name, text in report.user_properties
        if name == FIGURES
    ]
    if lines:
        terminalreporter.section("seconds")
        for line in lines:
            terminalreporter.write_line(line)
