"""The benchmarks can be started, and sum up rightly. What they measure is no test: it depends on the machine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def _from_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of the package; all else is tested as it is installed."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize("name", ["dedup", "latency", "recovery", "roundtrips", "sweep", "throughput"])
def test_each_benchmark_says_how_it_is_used(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in ("--json", "--rounds", "--quick"))


@pytest.mark.usefixtures("_from_checkout")
@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (5, 1), (6, 2), (50, 10), (95, 19), (96, 20), (99, 20), (100, 20)]
)
def test_a_percentile_is_the_nearest_rank_whatever_the_order(percent: int, expected: int) -> None:
    from benchmarks.spread import percentile

    samples = [float(number) for number in range(20, 0, -1)]

    assert percentile(samples, percent) == expected


@pytest.mark.usefixtures("_from_checkout")
def test_a_spread_is_made_of_samples_that_were_measured() -> None:
    from benchmarks.spread import Spread, spread

    summed_up = spread([3.0, 1.0, 2.0, 10.0])

    assert summed_up == Spread(count=4, least=1.0, p50=2.0, p95=10.0, p99=10.0, most=10.0)


@pytest.mark.usefixtures("_from_checkout")
@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_nothing_is_summed_up_to_a_number(samples: list[float], percent: int) -> None:
    from benchmarks.spread import percentile

    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, percent)


@pytest.mark.usefixtures("_from_checkout")
@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "is_kept"),
    [
        (1.0, 1.0, None, True),
        (1.1, 1.0, None, False),
        (1.0, None, 1.0, True),
        (0.9, None, 1.0, False),
        (1.2, 1.0, 1.0, False),
        (float("nan"), 1.0, None, False),
        (1.0, None, None, None),
    ],
)
def test_a_figure_says_whether_its_promise_is_kept(
    value: float, at_most: float | None, at_least: float | None, is_kept: bool | None
) -> None:
    from benchmarks.report import Figure

    figure = Figure(name="one", about="one", value=value, at_most=at_most, at_least=at_least)

    assert figure.is_kept is is_kept


@pytest.mark.usefixtures("_from_checkout")
def test_commands_inside_scripts_and_transactions_are_no_calls_of_their_own() -> None:
    from benchmarks.roundtrips import Call, calls_of

    def sent(command: str, port: str) -> dict[str, str]:
        return {"client_type": "tcp", "client_port": port, "command": command}

    def inside(command: str) -> dict[str, str]:
        return {"client_type": "lua", "client_port": "", "command": command}

    recorded = [
        sent("EVALSHA abc 1 queue", "1"),
        inside("LINDEX queue -1"),
        inside("RPOP queue"),
        sent("MULTI", "2"),
        sent("EVALSHA abc 1 queue", "1"),
        inside("LINDEX queue -1"),
        sent("ZREM index tag", "2"),
        sent("HDEL unacked tag", "2"),
        sent("EXEC", "2"),
        sent("get key", "3"),
    ]

    calls = list(calls_of(recorded, {"abc": "fetch"}))

    assert calls == [
        Call(port=1, name="fetch", took=True),
        Call(port=1, name="fetch"),
        Call(port=2, name="MULTI ZREM HDEL"),
        Call(port=3, name="GET"),
    ]


@pytest.mark.usefixtures("_from_checkout")
def test_dedup_may_add_two_statements_and_neither_more_nor_fewer() -> None:
    from benchmarks.statements import TASKS, statement_figures

    def added(**statements: int) -> Any:
        body = Counter(BEGIN=TASKS, INSERT=TASKS, COMMIT=TASKS)
        ours = body + Counter(statements)
        return {one.name: one for one in statement_figures({"body": body, "ours": ours})}["statements_added"]

    assert added(WITH=TASKS, UPDATE=TASKS).is_kept is True
    assert added(WITH=TASKS, UPDATE=TASKS, SELECT=1).is_kept is False
    assert added(UPDATE=TASKS).is_kept is False


@pytest.mark.usefixtures("_from_checkout")
def test_dedup_is_compared_by_rate_and_by_processor_time() -> None:
    from benchmarks.dedup import figures
    from benchmarks.emptying import Run

    def run(rate: float, children: float) -> Run:
        return Run(rate=rate, cpu={"main": 1.0, "children": children})

    found = {
        figure.name: figure
        for figure in figures(
            {
                "ours": [run(90.0, 3.0), run(10.0, 3.0), run(95.0, 9.0)],
                "by_hand": [run(100.0, 2.0)],
                "plain": [run(200.0, 1.0)],
            }
        )
    }

    assert found["ours_to_by_hand"].value == 0.9
    assert found["ours_to_by_hand"].is_kept is True
    assert found["ours_to_by_hand_cpu"].value == 0.75
    assert found["ours_to_by_hand_cpu"].is_kept is False
    assert found["ours_to_plain"].is_kept is None
