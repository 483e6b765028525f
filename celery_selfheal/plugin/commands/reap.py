"""``celery selfheal reap``: heal once, or for ever."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_selfheal import witness
from celery_selfheal.errors import SelfHealError, StoreError
from celery_selfheal.plugin.install import plugin_of, reaper_of
from celery_selfheal.plugin.outbox import courier_of
from celery_selfheal.sessions.port import Session


@click.command(cls=CeleryCommand)
@click.option("--loop", is_flag=True, help="Sweep again and again until SIGINT or SIGTERM.")
@click.option("--interval", type=click.FloatRange(min=0.1), help="Seconds between sweeps [selfheal_reaper_interval].")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output (one a sweep with --loop).")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is untyped
def reap(ctx: Any, loop: bool, interval: float | None, as_json: bool) -> None:
    """Restore what dead workers hold, and send what was left in the outbox, now.

    Workers do this by themselves; use it where none runs, or from a scheduler. Any number may run at once.
    """
    app = ctx.obj.app
    try:
        plugin = plugin_of(app)
        # No session of its own: it leads each sweep, and asks this machine's kernel like a worker.
        me = Session(name="", node="", identity=witness.identify())
        reaper = reaper_of(plugin, plugin.stores, lambda: me)
        courier = courier_of(plugin)
        pause = interval or plugin.settings.reaper_interval.total_seconds()
        stop = _stopped_by_signals() if loop else threading.Event()
        while True:
            try:
                report = reaper.sweep()
                delivered = None if courier is None else courier.deliver()
            except StoreError as exc:
                if not loop:
                    raise
                click.echo(f"{exc}; trying again", err=True)
            else:
                found = {"sessions": report.sessions, "stalls": report.stalls, "restored": report.restored}
                if delivered is not None:
                    found["outbox"] = delivered.sent
                if as_json:
                    click.echo(json.dumps(found))
                elif report or not loop or found.get("outbox"):
                    line = "{restored} messages restored, {sessions} dead sessions, {stalls} stalls"
                    line += ", {outbox} sent from the outbox" if courier is not None else ""
                    click.echo(line.format(**found))
            if not loop or stop.wait(pause):
                return
    except SelfHealError as exc:
        raise click.ClickException(str(exc)) from exc


def _stopped_by_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
