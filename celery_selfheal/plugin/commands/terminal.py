"""What people see: tables and progress bars, with the library ``rich`` where it is installed, else plain text."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import click

from celery_selfheal.agents.dead_letters import printable

LISTED = 100  # rows without --limit: a screen or two
INTERRUPTED = 130  # what a shell calls the end by Ctrl-C
CHUNK_ROWS = 100  # widths are chosen anew after so many: nothing longer is kept in memory


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
    """Print rows as they come, and return how many. A pipe gets whole values, a terminal what fits."""
    count = 0
    remaining = iter(rows)
    while chunk := [[printable(str(cell)) for cell in row] for row in islice(remaining, CHUNK_ROWS)]:
        _print_chunk(headings, chunk, is_first=not count)
        count += len(chunk)
    return count


def print_array(items: Iterable[Any]) -> int:
    """Print one JSON array, written as it comes, and return how many items it has."""
    count = 0
    for item in items:
        click.echo(f"{',' if count else '['}\n{json.dumps(item)}", nl=False)
        count += 1
    click.echo("\n]" if count else "[]")
    return count


@contextmanager
def progress_bar(what: str, *, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, moved by calls with the number that is done. Nothing where no terminal is."""
    rich_progress = _rich("progress") if sys.stderr.isatty() else None
    if rich_progress is None:
        yield lambda done: None
        return
    console = _rich("console").Console(stderr=True)
    columns = (
        rich_progress.TextColumn(what),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def show_audit_lines() -> None:
    """Write what is replayed and dropped to standard error, unless logging is set up or a bar shows it."""
    logger = logging.getLogger("celery_selfheal.dlq")
    if logger.hasHandlers() or (sys.stderr.isatty() and _rich("progress") is not None):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _print_chunk(headings: Sequence[str], rows: Sequence[Sequence[str]], *, is_first: bool) -> None:
    rich_table = _rich("table") if sys.stdout.isatty() else None
    if rich_table is not None:
        table = rich_table.Table(*headings, box=_rich("box").SIMPLE, show_header=is_first)
        for row in rows:
            # Not as markup: a payload must not colour the screen.
            table.add_row(*map(_rich("text").Text, row))
        _rich("console").Console().print(table)
        return
    lines = [headings, *rows] if is_first else rows
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _rich(module: str) -> Any:
    """A module of rich; ``None`` without the extra ``cli``."""
    try:
        return importlib.import_module(f"rich.{module}")
    except ImportError:
        return None
