"""``celery selfheal dlq ...``: look at dead letters, send them back, delete them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_selfheal.agents.dead_letters import DeadLetter, printable
from celery_selfheal.agents.replay import ReplayReport
from celery_selfheal.dead_letter import Reason
from celery_selfheal.plugin.commands.options import Duration, app_of, as_json, with_plain_errors
from celery_selfheal.plugin.commands.terminal import (
    INTERRUPTED,
    LISTED,
    print_array,
    print_table,
    progress_bar,
    show_audit_lines,
)
from celery_selfheal.plugin.dead_letters import DeadLetterQueue, FilterOptions

_F = TypeVar("_F", bound=Callable[..., Any])

BODY_CHARACTERS = 2_000

HEADINGS = ("id", "task", "reason", "exception", "text", "attempts", "stalls", "replays", "queue", "died at")


@click.group(name="dlq")
def dlq() -> None:
    """Messages that have failed for good: look at them, send them back, delete them."""


def _filtered(command: _F) -> _F:
    """Options that say which dead letters are meant."""
    for option in reversed(
        (
            click.option("--id", "ids", multiple=True, help="Id of the message; more than once for more."),
            click.option("--task", help="Name of the task; * and ? match as in a shell."),
            click.option("--reason", type=click.Choice([reason.value for reason in Reason]), help="Why it died."),
            click.option("--exception", help="Name of the exception's class; * and ? match as in a shell."),
            click.option("--older-than", type=Duration(), help="Died longer ago: 30m, 2h, 7d."),
            click.option("--newer-than", type=Duration(), help="Died since then: 30m, 2h, 7d."),
            click.option("--limit", type=click.IntRange(min=1), help="So many at most."),
        )
    ):
        command = option(command)
    return command


def _command(**settings: Any) -> Callable[[_F], Any]:
    """A command on one queue of the application."""

    def decorate(function: _F) -> Any:
        wrapped = click.pass_context(handle_preload_options(with_plain_errors(function)))
        option = click.option("--queue", help="Another dead letter queue than selfheal_dlq.")
        return dlq.command(cls=CeleryCommand, **settings)(option(wrapped))

    return decorate


@_command(name="list")
@_filtered
@as_json
def list_(ctx: Any, queue: str | None, limit: int | None, as_json: bool, **options: Any) -> None:
    """Show dead letters, oldest first. Nothing is taken out of the queue.

    Without --limit the first 100 are shown, with --json all.
    """
    letters = DeadLetterQueue(app_of(ctx), queue)
    filters, ids = _filters(**options)
    found = _Counted(letters.list(limit=limit or (None if as_json else LISTED), **filters))
    if as_json:
        print_array(_summary(letter) for letter in found)
    else:
        print_table(HEADINGS, map(_row, found))
        if limit is None and found.count == LISTED:
            click.echo(f"the first {LISTED}; {len(letters)} messages are in {printable(letters.queue)}", err=True)
    _exit_if_missing(ctx, ids, found.count)


@_command()
@click.argument("task_id", metavar="ID")
@as_json
def show(ctx: Any, queue: str | None, task_id: str, as_json: bool) -> None:
    """Show all that is known of one dead letter, its message included."""
    letter = DeadLetterQueue(app_of(ctx), queue).get(task_id)
    if letter is None:
        raise click.ClickException(f"no dead letter has the id {printable(task_id)}")
    if as_json:
        click.echo(json.dumps({**letter.about(), "message": letter.message}))
        return
    for name, value in letter.about().items():
        if name != "trace":
            click.echo(f"{name:14}{printable(str(value))}")
    click.echo("headers:")
    for name, value in (letter.message.get("headers") or {}).items():
        if name != "selfheal-death":
            click.echo(f"  {printable(str(name))}: {printable(json.dumps(value))}")
    body = letter.body
    click.echo(f"body ({len(body)} bytes, {printable(str(letter.message.get('content-type')))}):")
    click.echo(f"  {printable(body.decode('utf-8', 'backslashreplace')[:BODY_CHARACTERS])}")
    if letter.trace:
        click.echo("trace:")
        for line in letter.trace.splitlines():
            click.echo(f"  {printable(line)}")


@_command()
@_filtered
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second [as fast as possible].")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--force", is_flag=True, help="Also what was replayed selfheal_max_replays times.")
@as_json
def replay(
    ctx: Any,
    queue: str | None,
    limit: int | None,
    rate: float | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send messages back to the queues in which they died, oldest first.

    They keep their id and begin anew with all their attempts. After Ctrl-C, or worse, run it again: it goes on with
    what is left, and nothing is lost or sent twice. Exit status 1: one that was meant was not there, was refused since
    it was replayed too often, or has no queue to go to any more.
    """
    letters = DeadLetterQueue(app_of(ctx), queue)
    filters, ids = _filters(**options)
    report = ReplayReport()
    show_audit_lines()
    total = limit if limit or filters else len(letters)
    try:
        with progress_bar("replay", total=total) as move:

            def progress(now: ReplayReport) -> None:
                nonlocal report
                report = now
                move(now.matched)

            letters.replay(limit=limit, rate=rate, dry_run=dry_run, force=force, progress=progress, **filters)
    except KeyboardInterrupt:
        _print_report(report, dry_run=dry_run, as_json=as_json)
        click.echo("stopped; run it again for the rest", err=True)
        ctx.exit(INTERRUPTED)
    _print_report(report, dry_run=dry_run, as_json=as_json)
    _exit_if_missing(ctx, ids, report.matched)
    if not report.is_complete:
        ctx.exit(1)


@_command()
@_filtered
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def drop(
    ctx: Any, queue: str | None, limit: int | None, dry_run: bool, yes: bool, as_json: bool, **options: Any
) -> None:
    """Delete dead letters for good. Asks first, unless --id or --yes is given."""
    letters = DeadLetterQueue(app_of(ctx), queue)
    filters, ids = _filters(**options)
    if not (dry_run or yes or ids):
        if as_json or not sys.stdin.isatty():
            raise click.UsageError("nobody is there to be asked: say --yes, or which by --id")
        count = letters.drop(limit=limit, dry_run=True, **filters)
        click.confirm(f"Delete {count} dead letters from {printable(letters.queue)} for good?", abort=True, err=True)
    show_audit_lines()
    dropped = letters.drop(limit=limit, dry_run=dry_run, **filters)
    if as_json:
        click.echo(json.dumps({"dropped": dropped, "dry_run": dry_run}))
    else:
        click.echo(f"{dropped} {'would be ' if dry_run else ''}dropped")
    _exit_if_missing(ctx, ids, dropped)


@_command()
@_filtered
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a line for each.")
def export(ctx: Any, queue: str | None, limit: int | None, as_json: bool, **options: Any) -> None:
    """Write dead letters to standard output, one a line, in JSON.

    Each line has all that is known and, as "message", the whole message: its body in base64, its headers and
    properties. Nothing is taken out of the queue.
    """
    filters, ids = _filters(**options)
    lines = _Counted(DeadLetterQueue(app_of(ctx), queue).export(limit=limit, **filters))
    if as_json:
        print_array(map(json.loads, lines))
    else:
        for line in lines:
            click.echo(line)
    _exit_if_missing(ctx, ids, lines.count)


class _Counted:
    """Counts what passes through."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self.count = 0

    def __iter__(self) -> Any:
        for item in self._items:
            self.count += 1
            yield item


def _filters(
    *,
    ids: tuple[str, ...],
    task: str | None,
    reason: str | None,
    exception: str | None,
    older_than: timedelta | None,
    newer_than: timedelta | None,
) -> tuple[FilterOptions, frozenset[str]]:
    given: FilterOptions = {
        "id": ids or None,
        "task": task,
        "reason": reason,
        "exception": exception,
        "older_than": older_than,
        "newer_than": newer_than,
    }
    # Without those that say nothing, so that an empty one means: all.
    return {name: value for name, value in given.items() if value is not None}, frozenset(ids)  # type: ignore[return-value]  # the same keys


def _exit_if_missing(ctx: Any, ids: frozenset[str], found: int) -> None:
    if found < len(ids):
        missing = "no dead letter has that id" if not found else f"{len(ids) - found} of these ids have no dead letter"
        click.echo(f"Error: {missing}", err=True)
        ctx.exit(1)


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return {name: value for name, value in letter.about().items() if name != "trace"}


def _row(letter: DeadLetter) -> tuple[object, ...]:
    text = letter.text if len(letter.text) <= 60 else f"{letter.text[:57]}..."
    return (
        *(letter.id, letter.task, letter.reason, letter.exception, text),
        *(letter.attempts, letter.stalls, letter.replays, letter.queue, letter.died_at[:19]),
    )


def _print_report(report: ReplayReport, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**asdict(report), "dry_run": dry_run}))
        return
    click.echo(f"{report.replayed} {'would be ' if dry_run else ''}replayed")
    for count, why in (
        (report.refused, "refused: replayed too often (selfheal_max_replays); --force replays them"),
        (report.unroutable, "stay: their queue or exchange is gone, or unknown"),
        (report.gone, "were taken by somebody else"),
    ):
        if count:
            click.echo(f"{count} {why}")
