"""A body's result as it is stored: plain JSON values that every database gives back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from celery_selfheal.errors import UnrecoverableError

MAX_PAYLOAD_BYTES = 1024 * 1024  # what a duplicate's answer may cost a database; MariaDB's packets end at 16 MiB

# What a JSON column would change, or refuse: MySQL turns larger integers into floats, PostgreSQL large floats into
# integers, and MariaDB knows no more than 32 levels.
_MAX_INTEGER = 2**63 - 1
_MAX_FLOAT = 1e15
_MAX_LEVELS = 30

_TEXT = "__selfheal_json__"
"""Only member of an object that holds JSON as text, since as values it would not come back as it was."""

Dumps = Callable[[Any], str]
Loads = Callable[[str], Any]


def encode(result: Any, *, task_name: str, dumps: Dumps) -> Any:
    """Turn a result into plain JSON values.

    Args:
        dumps: The application's own JSON serializer; what it raises for a type that it cannot write is told on.

    Raises:
        UnrecoverableError: the result cannot be stored. No retry can help, the task must be changed.
    """
    try:
        text = dumps(result)
        plain = json.loads(text, parse_constant=_refuse_constant)
    except Exception as exc:  # whatever the application's serializer raises
        raise _refused(task_name, f"of type {_named(result)}, which is not JSON serializable ({exc})") from exc
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > MAX_PAYLOAD_BYTES:
        raise _refused(
            task_name, f"of type {_named(result)} with {size_bytes} bytes of JSON, and {MAX_PAYLOAD_BYTES} is the most"
        )
    for leaf in _texts(plain):
        if "\0" in leaf:
            raise _refused(task_name, f"of type {_named(result)} with a NUL character, which PostgreSQL does not store")
        if not _is_unicode(leaf):
            raise _refused(task_name, f"of type {_named(result)} with half a surrogate pair, which is no Unicode")
    return plain if _comes_back(plain, levels=_MAX_LEVELS) else {_TEXT: text}


def decode(payload: Any, *, loads: Loads) -> Any:
    """Turn what ``encode`` returned, after its way through a database, into the result again."""
    if isinstance(payload, dict) and payload.keys() == {_TEXT}:
        return loads(payload[_TEXT])
    return loads(json.dumps(payload))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _refused(task_name: str, what: str) -> UnrecoverableError:
    return UnrecoverableError(
        f"task {task_name} returned a result {what}: return something else, or set store_result=False on the task"
    )


def _named(result: Any) -> str:
    kind = type(result)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _texts(plain: Any) -> Iterator[str]:
    waiting = [plain]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield from value
            waiting += value.values()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _comes_back(plain: Any, *, levels: int) -> bool:
    if isinstance(plain, (list, dict)):
        if not levels or (isinstance(plain, dict) and _TEXT in plain):
            return False
        inner = plain if isinstance(plain, list) else plain.values()
        return all(_comes_back(value, levels=levels - 1) for value in inner)
    if isinstance(plain, float):
        return (plain == 0 and str(plain) == "0.0") or 1e-5 <= abs(plain) < _MAX_FLOAT
    return not isinstance(plain, int) or abs(plain) <= _MAX_INTEGER
