"""Settings that are an object, the dotted path of one, or a callable that returns it."""

from __future__ import annotations

import importlib
from typing import Any

from celery_selfheal.errors import SettingsError


def resolve(given: object, wanted: type[Any] | tuple[type[Any], ...], *, setting: str, what: str) -> Any:
    """Return the object that is meant; ``None`` stays ``None``.

    Args:
        given: The object, its path (``package.module:name`` or ``package.module.name``; further dots are attributes),
            or a callable without arguments that returns the object or its path.
        what: What it must be, for the error.

    Raises:
        SettingsError: it cannot be imported or called, or is something else.
    """
    if given is None or isinstance(given, wanted):
        return given
    found = _load(given, setting) if isinstance(given, str) else given
    written = f"{setting} = {given!r}" if isinstance(given, str) else setting
    if not isinstance(found, wanted) and callable(found):
        try:
            found = found()
        except Exception as exc:  # the application's own, whatever it raises
            raise SettingsError(f"{written} was called for {what} and raised {_named(exc)}", setting) from exc
        if isinstance(found, str):
            found = _load(found, setting)
    if not isinstance(found, wanted):
        raise SettingsError(
            f"{written} must be {what}, its dotted path or a callable that returns it, got a {type(found).__name__}",
            setting,
        )
    return found


def _load(path: str, setting: str) -> object:
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module or not name:
        raise SettingsError(f"{setting} = {path!r} is no dotted path: write package.module:name", setting)
    try:
        found: Any = importlib.import_module(module)
    except Exception as exc:  # the application's own, whatever it raises
        raise SettingsError(f"{setting} = {path!r} cannot be imported: {_named(exc)}", setting) from exc
    for part in name.split("."):
        if not hasattr(found, part):
            raise SettingsError(f"{setting} = {path!r}: {module} has no {name}", setting)
        found = getattr(found, part)
    return found


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
