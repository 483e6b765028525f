"""Figures, and how every benchmark shows them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

from benchmarks.machine import Machine
from benchmarks.spread import spread

SELDOM_SHOWN = ("p99",)  # of twenty samples, the same as the maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number.

    Attributes:
        name: For programs; stays the same between releases.
        about: For people; the parts of one spread share it.
        part: Which part of a spread it is; empty for a number that stands alone.
        at_most: Bound that the design promises, in the same unit.
        at_least: The same, from below.
    """

    name: str
    about: str
    value: float
    unit: str = ""
    part: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_kept(self) -> bool | None:
        """Whether the bound is kept; ``None`` where nothing is promised."""
        if self.at_most is None and self.at_least is None:
            return None
        # NaN keeps no bound.
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def __str__(self) -> str:
        digits = 0 if abs(self.value) >= 100 else 2
        return f"{self.part} {self.value:.{digits}f}".strip()

    @property
    def bound(self) -> str:
        """The promise as people write it; empty without one."""
        if self.at_most is not None and self.at_most == self.at_least:
            return f"{self.part} = {self.at_most:g}".strip()
        bounds = [f"<= {self.at_most:g}"] if self.at_most is not None else []
        bounds += [f">= {self.at_least:g}"] if self.at_least is not None else []
        return " ".join([self.part, *bounds]).strip() if bounds else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of one benchmark.

    Attributes:
        conditions: What was asked for: rounds, sizes, settings.
        samples: Every single measurement, by name and in order.
    """

    benchmark: str
    machine: Machine
    conditions: Mapping[str, object]
    figures: Sequence[Figure]
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def as_document(self) -> dict[str, object]:
        """For ``--json``; figures by name."""
        return {
            "benchmark": self.benchmark,
            "machine": asdict(self.machine),
            "conditions": dict(self.conditions),
            "figures": {figure.name: {**asdict(figure), "is_kept": figure.is_kept} for figure in self.figures},
            "samples": {name: [round(sample, 6) for sample in samples] for name, samples in self.samples.items()},
        }

    def show(self, *, as_json: bool) -> None:
        """Print it: one JSON document, or a table."""
        if as_json:
            print(json.dumps(self.as_document(), indent=2))
        else:
            self._print_table()

    def _print_table(self) -> None:
        from rich.console import Console
        from rich.table import Table

        conditions = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        table = Table(title=f"{self.benchmark}: {conditions}", caption=str(self.machine))
        for column in ("", "measured", "promised", ""):
            table.add_column(column)
        for about, parts in groupby(self.figures, key=lambda figure: figure.about):
            figures = list(parts)
            promised = [figure for figure in figures if figure.is_kept is not None]
            shown = [figure for figure in figures if figure.part not in SELDOM_SHOWN or figure in promised]
            table.add_row(
                about,
                f"{', '.join(str(figure) for figure in shown)} {figures[0].unit}".strip(),
                ", ".join(figure.bound for figure in promised),
                ", ".join("[green]kept[/]" if figure.is_kept else "[red]missed[/]" for figure in promised),
            )
        Console().print(table)


def figures_of(
    name: str,
    about: str,
    samples: Sequence[float],
    *,
    unit: str,
    p50_at_most: float | None = None,
    p95_at_most: float | None = None,
    p99_at_most: float | None = None,
) -> list[Figure]:
    """p50, p95, p99 and maximum of samples, with bounds for some of them."""
    found = spread(samples)
    return [
        Figure(name=f"{name}_{part}", about=about, value=value, unit=unit, part=part, at_most=at_most)
        for part, value, at_most in (
            ("p50", found.p50, p50_at_most),
            ("p95", found.p95, p95_at_most),
            ("p99", found.p99, p99_at_most),
            ("max", found.most, None),
        )
    ]


def progress(text: str) -> None:
    """Say on standard error what goes on."""
    print(text, file=sys.stderr, flush=True)
