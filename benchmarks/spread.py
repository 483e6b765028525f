"""How samples spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What is said of many samples; each is one that was measured, never one between two."""

    count: int
    least: float
    p50: float
    p95: float
    p99: float
    most: float


def spread(samples: Sequence[float]) -> Spread:
    """Sum samples up, in any order.

    Raises:
        ValueError: there are none.
    """
    return Spread(
        count=len(samples),
        least=percentile(samples, 0),
        p50=percentile(samples, 50),
        p95=percentile(samples, 95),
        p99=percentile(samples, 99),
        most=percentile(samples, 100),
    )


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that at least ``percent`` of all samples do not exceed (the nearest rank).

    Raises:
        ValueError: there are no samples, or the percentage is none.
    """
    if not samples or not 0 <= percent <= 100:
        raise ValueError(f"no {percent}th percentile of {len(samples)} samples")
    # In whole numbers: 0.95 * 20 is a little more than 19.
    rank = max(1, math.ceil(percent * len(samples) / 100))
    return sorted(samples)[rank - 1]
