"""``celery selfheal db ...``: create and change our tables, look at their rows, delete old ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_selfheal.agents.dead_letters import printable
from celery_selfheal.errors import SettingsError
from celery_selfheal.plugin.commands.options import Duration, app_of, as_json, with_plain_errors
from celery_selfheal.plugin.commands.terminal import INTERRUPTED, LISTED, print_array, print_table, progress_bar
from celery_selfheal.plugin.install import Plugin, plugin_of
from celery_selfheal.plugin.retention import check_retention

_F = TypeVar("_F", bound=Callable[..., Any])

HEADINGS = ("key", "task", "status", "result", "dispatched", "fence", "created", "changed", "owner")
STATUSES = ("IN_DOUBT", "IN_PROGRESS", "COMPLETED")


@click.group(name="db")
def db() -> None:
    """The tables of the dedup in your database: create them, look at them, keep them small."""


def _command(**settings: Any) -> Callable[[_F], Any]:
    def decorate(function: _F) -> Any:
        return db.command(cls=CeleryCommand, **settings)(
            click.pass_context(handle_preload_options(with_plain_errors(function)))
        )

    return decorate


@_command()
@as_json
def upgrade(ctx: Any, as_json: bool) -> None:
    """Create our tables, or change them to what this release needs.

    Run it before the workers of a new release start; those of the last one go on beside it. Any number may run at once,
    and a second run changes nothing. No table of yours is touched.
    """
    from celery_selfheal.database import migrate

    before, now = migrate.upgrade(_engine(plugin_of(app_of(ctx))))
    if as_json:
        click.echo(json.dumps({"before": before, "now": now}))
    else:
        click.echo(f"schema {now}, as before" if before == now else f"schema {now}, before: {before or 'none'}")


@_command()
@as_json
def current(ctx: Any, as_json: bool) -> None:
    """Show the schema in the database and the one that is needed. Exit status 1: workers would refuse it."""
    from celery_selfheal.database import migrate

    engine = _engine(plugin_of(app_of(ctx)))
    found = migrate.current(engine)
    problem = ""
    try:
        migrate.check(engine)
    except SettingsError as exc:
        problem = str(exc)
    if as_json:
        click.echo(json.dumps({"current": found, "needed": migrate.HEAD, "ok": not problem, "problem": problem}))
    else:
        click.echo(f"schema {found or 'none'}, this release needs {migrate.HEAD}")
    if problem:
        click.echo(f"Error: {problem}", err=True)
        ctx.exit(1)


@_command(name="list")
@click.option("--key", "keys", multiple=True, help="Idempotency key; more than once for more.")
@click.option("--task", help="Name of the task; * and ? match as in a shell.")
@click.option("--status", type=click.Choice(STATUSES, case_sensitive=False), help="What is known of the effect.")
@click.option("--older-than", type=Duration(), help="Last changed longer ago: 30m, 2h, 7d.")
@click.option("--limit", type=click.IntRange(min=1), help="So many at most.")
@as_json
def list_(
    ctx: Any,
    keys: tuple[str, ...],
    task: str | None,
    status: str | None,
    older_than: timedelta | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show what idempotency keys did: first what is in doubt, then what is in progress, then the rest, newest first.

    Without --limit the first 100 are shown, with --json all. Exit status 1: a --key has no such row.
    """
    from celery_selfheal.database.jobs import JobFilter, find_jobs

    wanted = JobFilter(keys=keys, task=task, status=status, older_than=older_than)
    found = find_jobs(_ready_engine(ctx), wanted, limit=limit)
    if as_json:
        shown = print_array({name: _plain(value) for name, value in asdict(job).items()} for job in found)
    else:
        shown = print_table(HEADINGS, map(_cells, islice(found, limit or LISTED)))
        if limit is None and next(found, None) is not None:
            click.echo(f"the first {LISTED}; there are more, say --limit", err=True)
    if shown < len(set(keys)):
        click.echo(f"Error: {len(set(keys)) - shown} of these keys have no such row", err=True)
        ctx.exit(1)


@_command()
@click.option("--older-than", type=Duration(), help="Finished longer ago than this [selfheal_retention].")
@click.option("--dry-run", is_flag=True, help="Only count.")
@as_json
def purge(ctx: Any, older_than: timedelta | None, dry_run: bool, as_json: bool) -> None:
    """Delete finished rows for which no message can come any more.

    In batches of at most 1000, each followed by a pause as long as itself, so that tasks go on beside it. Rows in doubt
    or in progress stay. Put it into cron; after Ctrl-C, or worse, run it again.
    """
    from celery_selfheal.database import retention

    plugin = plugin_of(app_of(ctx))
    keep = _retention(plugin, older_than)
    engine = _ready_engine(ctx)
    due = retention.count_due(engine, keep=keep)
    deleted = 0
    try:
        with progress_bar("purge", total=due) as move:
            for rows in () if dry_run else retention.purge(engine, keep=keep):
                deleted += rows
                move(deleted)
    except KeyboardInterrupt:
        _print_purged(deleted, dry_run=False, as_json=as_json)
        click.echo("stopped; run it again for the rest", err=True)
        ctx.exit(INTERRUPTED)
    _print_purged(due if dry_run else deleted, dry_run=dry_run, as_json=as_json)


@_command()
@click.argument("key")
@click.option("--completed", is_flag=True, help="Its effect is there.")
@click.option("--forget", is_flag=True, help="Its effect is not there.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def resolve(ctx: Any, key: str, completed: bool, forget: bool, yes: bool, as_json: bool) -> None:
    """Say of a key in doubt what you have found out: --completed or --forget.

    Then send its dead letter back with `celery selfheal dlq replay`: after --completed that only sends the callbacks,
    without a result; after --forget the task runs. Exit status 1: no such key is in doubt.
    """
    from celery_selfheal.database.jobs import settle

    if completed == forget:
        raise click.UsageError("say what you have found out: --completed or --forget")
    engine = _ready_engine(ctx)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise click.UsageError("nobody is there to be asked: say --yes")
        what = "count as done, its task will not run again" if completed else "be forgotten, its task may run again"
        click.confirm(f"Shall {printable(key)} {what}?", abort=True, err=True)
    if not settle(engine, key, happened=completed):
        raise click.ClickException(f"no row in doubt has the key {printable(key)}")
    done = "COMPLETED" if completed else "forgotten"
    click.echo(json.dumps({"key": key, "resolved": done}) if as_json else f"{printable(key)}: {done}")


def _engine(plugin: Plugin) -> Any:
    from celery_selfheal.database.engines import engine_of

    return engine_of(plugin.settings)


def _ready_engine(ctx: Any) -> Any:
    """Engine of a database that has our tables."""
    from celery_selfheal.database import migrate

    engine = _engine(plugin_of(app_of(ctx)))
    migrate.check(engine)
    return engine


def _retention(plugin: Plugin, older_than: timedelta | None) -> timedelta:
    # With those that only a worker would load: they say how long they retry.
    plugin.app.loader.import_default_modules()
    keep = plugin.settings.retention if older_than is None else older_than
    check_retention(plugin, keep, "selfheal_retention" if older_than is None else "--older-than")
    return keep


def _print_purged(count: int, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"purged": count, "dry_run": dry_run}))
    else:
        click.echo(f"{count} rows {'would be ' if dry_run else ''}deleted")


def _cells(job: Any) -> Sequence[object]:
    return (
        *(job.key, job.task, job.status, "stored" if job.has_result else "-", "yes" if job.dispatched else "-"),
        *(job.fence, f"{job.created_at:%Y-%m-%d %H:%M:%S}", f"{job.updated_at:%Y-%m-%d %H:%M:%S}", job.owner or ""),
    )


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value
