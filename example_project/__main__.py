"""``python -m example_project``: the demo."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import click

from celery_selfheal import SelfHealError
from example_project.demo import Director
from example_project.display import Display
from example_project.orders import read_orders

TERMINATED = 128 + signal.SIGTERM


@click.command()
@click.option("--orders", "count", type=click.IntRange(1), default=500, show_default=True, help="So many orders.")
@click.option("--seed", type=int, help="Chooses who is struck and when; another one each time by default.")
@click.option("--keep", is_flag=True, help="Keep ledger, receipts and logs, and say where.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document, and nothing else.")
def main(count: int, seed: int | None, keep: bool, as_json: bool) -> None:
    """Charge a day's orders while workers are killed and paused, and show that none is lost.

    Exit status: 0 if all went well, 1 if anything was lost, stuck, doubled or wrong.
    """
    signal.signal(signal.SIGTERM, _leave)
    orders = read_orders()[:count]
    if seed is None:
        seed = random.randrange(10_000)
    folder = Path(tempfile.mkdtemp(prefix="celery-selfheal-demo-"))
    is_kept = keep
    try:
        with Display(len(orders), aside=as_json) as display:
            verdict = Director(orders, seed=seed, folder=folder, display=display).run()
        is_kept = keep or not verdict.is_right
        if as_json:
            click.echo(json.dumps({"seed": seed, **verdict.as_document()}, indent=2))
        else:
            display.show(verdict)
    except (SelfHealError, OSError) as exc:
        # No Redis to be had, or a worker that does not start.
        is_kept = True
        raise click.ClickException(str(exc)) from exc
    finally:
        if is_kept:
            click.echo(f"Ledger, receipts and logs are in {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if verdict.is_right else 1)


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(TERMINATED)


if __name__ == "__main__":
    main(prog_name="python -m example_project")
