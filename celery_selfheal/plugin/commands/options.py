"""Options and errors that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import click
from celery import Celery, _state

from celery_selfheal.errors import SelfHealError

_F = TypeVar("_F", bound=Callable[..., Any])

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A time as people write it: ``30m``, ``2h``, ``1d12h``; a plain number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Read it, or refuse the command line."""
        if isinstance(value, timedelta):
            return value
        text = str(value).strip().lower()
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhdw])", f"{text}s" if re.fullmatch(r"\d+(\.\d+)?", text) else text)
        if not parts or "".join(number + unit for number, unit in parts) not in (text, f"{text}s"):
            self.fail(f"{value!r} is no duration: write 90s, 30m, 2h, 7d, 1d12h or seconds", param, ctx)
        try:
            return timedelta(seconds=sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts))
        except OverflowError:
            self.fail(f"{value!r} is too long", param, ctx)


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")


def app_of(ctx: Any) -> Celery:
    """The application that ``-A`` names: that of a bare ``celery`` has no queues that anybody means."""
    app: Celery = ctx.obj.app
    if app is _state.default_app:
        raise click.UsageError("say which application: celery -A proj selfheal ...")
    return app


def with_plain_errors(command: _F) -> _F:
    """Say our errors in one line, and exit with 1."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SelfHealError as exc:
            raise click.ClickException(str(exc)) from exc

    return run  # type: ignore[return-value]  # the same signature
