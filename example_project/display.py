"""What people see: a live display in a terminal, plain lines elsewhere, and the verdict."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from example_project.verdict import Verdict

STATE_STYLES = {"running": "green", "starting": "cyan", "killed": "bold red", "paused": "bold yellow"}
PLAIN_STEP = 0.1  # share of the orders between two plain lines


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
        self._told = 0.0
        self._progress = Progress(
            TextColumn("orders"), BarColumn(50), MofNCompleteColumn(), TimeElapsedColumn(), console=self._console
        )
        self._bar = self._progress.add_task("orders", total=orders)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True) if self._is_live else None

    def __enter__(self) -> Display:
        (self._live or nullcontext()).__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        (self._live or nullcontext()).__exit__(*exc)

    def tell(self, text: str, style: str = "") -> None:
        """Say what happened, with the seconds since the beginning."""
        self._console.print(Text(f"{time.monotonic() - self._began:6.1f} s  ", "dim") + Text(text, style), soft_wrap=True)

    def update(self, done: int, states: Mapping[str, str], receipts: Mapping[str, int]) -> None:
        """Show how far the orders are, what each worker is doing, and how many receipts it has written."""
        if self._live is not None:
            self._progress.update(self._bar, completed=done)
            self._live.update(Group(Text(), self._progress, _workers(states, receipts)))
        elif done / self._orders >= self._told + PLAIN_STEP:
            self._told = done / self._orders
            self.tell(f"{done} of {self._orders} orders done")

    def show(self, verdict: Verdict) -> None:
        """Print the verdict as a table."""
        table = Table(title="Verdict", title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
        table.add_column("")
        table.add_column("what")
        table.add_column("found")
        table.add_column("must be")
        for line in verdict.lines:
            mark = Text("ok", "green") if line.is_right else Text("WRONG", "bold red")
            table.add_row(mark, line.label, Text(line.found, "" if line.is_right else "red"), Text(line.rule, "dim"))
        self._console.print()
        self._console.print(table)
        self._console.print()
        if verdict.is_right:
            self._console.print("Workers died, and every task finished.", style="bold green")
        else:
            self._console.print("Something was lost, stuck, doubled or wrong: see the lines in red.", style="bold red")


def _workers(states: Mapping[str, str], receipts: Mapping[str, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, state in states.items():
        table.add_row(name, Text(state, STATE_STYLES.get(state, "dim")), f"{receipts.get(name, 0)} receipts written")
    return table
