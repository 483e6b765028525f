"""A simulation measures nothing, so what it shows is a test: retries do not stampede."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stampede(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, which is no part of the package; Celery's helper draws from the one source that all share."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import stampede

    state = random.getstate()
    yield stampede
    random.setstate(state)


@pytest.mark.parametrize(
    ("instants", "most"),
    [
        ([], 0),
        ([1.0], 1),
        ([0.0, 0.05, 0.0999, 0.1], 3),
        ([0.0, 0.1, 0.2], 1),
        ([0.0, 0.0, 5.0, 5.0, 5.0], 3),
    ],
)
def test_busiest_window_is_found_wherever_it_begins(instants: list[float], most: int, stampede: Any) -> None:
    assert stampede.most_in_a_window(instants, 0.1) == most


def test_simulated_task_tries_until_the_dependency_is_back(stampede: Any) -> None:
    crowd = stampede.simulate(lambda attempt, _: 2.0**attempt, random.Random(1), tasks=2, outage_seconds=20.0)

    assert crowd.starts == [1, 1, 3, 3, 7, 7, 15, 15, 31, 31]
    assert crowd.done == [31, 31]


@pytest.mark.parametrize("seed", range(5))
def test_crowd_that_fails_together_comes_back_spread_out_and_celerys_does_not(seed: int, stampede: Any) -> None:
    waits = {"ours": stampede.ours(stampede.policies()["full"]), "celery": stampede.celerys}

    most = {
        name: stampede.most_in_a_window(
            stampede.simulate(wait, random.Random(seed), tasks=1_000, outage_seconds=20.0).starts, 0.1
        )
        for name, wait in waits.items()
    }

    assert most["ours"] <= 200
    assert most["celery"] >= 800


def test_same_seed_gives_the_same_document() -> None:
    command = [sys.executable, "-m", "benchmarks.stampede", "--json", "--quick", "--tasks", "50", "--seed", "7"]

    first, second = (
        json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )

    assert first["figures"] == second["figures"]
    assert first["conditions"] == {"tasks": 50, "rounds": 3, "seed": 7, "outage": 20.0}
    assert {"full_most_starts", "celery_most_starts"} <= set(first["figures"])
