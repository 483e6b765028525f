"""What people see: a live display in a terminal, plain lines elsewhere, and the verdict."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from example_project.verdict import Verdict

STATE_STYLES = {"running": "green", "starting": "cyan", "killed": "bold red", "paused": "bold yellow"}
MARKS = {True: Text("ok", "green"), False: Text("WRONG", "bold red"), None: Text("")}
STEPS = 10  # so many plain lines tell of the progress


class Display:
    """Shows a run. Without a terminal it prints a line for each event and for each tenth of the orders.

    Args:
        orders: How many there will be.
        aside: Use standard error, because standard output is for something else.
    """

    def __init__(self, orders: int, *, aside: bool) -> None:
        stream = sys.stderr if aside else sys.stdout
        self._console = Console(file=stream, highlight=False, width=None if stream.isatty() else 110)
        self._is_live = self._console.is_terminal
        self._began = time.monotonic()
        self._orders = orders
        self._tenths_told = 0
        self._progress = Progress(
            TextColumn("{task.description:>8}"), BarColumn(50), MofNCompleteColumn(), console=self._console
        )
        self._bars = [self._progress.add_task(name, total=orders) for name in ("charges", "receipts")]
        self._live = Live(console=self._console, refresh_per_second=8, transient=True) if self._is_live else None

    def __enter__(self) -> Display:
        (self._live or nullcontext()).__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        (self._live or nullcontext()).__exit__(*exc)

    def tell(self, text: str, style: str = "") -> None:
        """Say what happened, with the seconds since the beginning."""
        clock = Text(f"{time.monotonic() - self._began:6.1f} s  ", "dim")
        self._console.print(clock + Text(text, style), soft_wrap=True)

    def update(self, charges: int, receipts: int, states: Mapping[str, str], starts: Mapping[str, int]) -> None:
        """Show how far the orders are, what each worker is doing, and how many tasks it has started."""
        if self._live is not None:
            for bar, completed in zip(self._bars, (charges, receipts), strict=True):
                self._progress.update(bar, completed=completed)
            self._live.update(Group(Text(), self._progress, _workers(states, starts)))
            return
        tenths = (charges + receipts) * STEPS // (2 * self._orders)
        if tenths > self._tenths_told:
            self._tenths_told = tenths
            self.tell(f"{charges} orders charged, {receipts} receipts written")

    def show(self, verdict: Verdict) -> None:
        """Print the verdict as a table."""
        table = Table(title="Verdict", title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
        table.add_column("")
        table.add_column("what")
        table.add_column("found")
        table.add_column("must be")
        for line in verdict.lines:
            table.add_row(MARKS[line.is_right], line.label, line.found, Text(line.rule, "dim"))
        self._console.print()
        self._console.print(table)
        self._console.print()
        if verdict.is_right:
            self._console.print("Workers died, and every task finished.", style="bold green")
        else:
            self._console.print("Something was lost, stuck, doubled or wrong: see the lines in red.", style="bold red")


def _workers(states: Mapping[str, str], starts: Mapping[str, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, state in states.items():
        table.add_row(f"{name:>8}", Text(f"{state:8}", STATE_STYLES.get(state, "dim")), f"{starts[name]} tasks started")
    return table
