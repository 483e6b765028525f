"""The command group; each command is a module of its own."""

from __future__ import annotations

import click

from celery_selfheal.plugin.commands.db import db
from celery_selfheal.plugin.commands.dlq import dlq
from celery_selfheal.plugin.commands.reap import reap


@click.group(name="selfheal")
def selfheal() -> None:
    """Look at and operate self-healing workers."""


selfheal.add_command(reap)
selfheal.add_command(dlq)
selfheal.add_command(db)
