"""A task's arguments in one canonical form, and the keys that are made of them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from string import Formatter
from typing import Any, TypeAlias

from celery_selfheal.errors import SettingsError, UnrecoverableError

KeyTemplate: TypeAlias = str | Callable[..., str]

MAX_KEY_CHARACTERS = 128
_DIGEST_CHARACTERS = 64


def bind(body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name every argument, whatever the call style, defaults included; those of ``**kwargs`` stand beside the others.

    Raises:
        UnrecoverableError: the body does not take these arguments.
    """
    signature = _signature(body)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as exc:
        raise UnrecoverableError(f"{getattr(body, '__qualname__', body)}: {exc}") from exc
    bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name))
    return named


@lru_cache(maxsize=1024)  # tasks of an application; a body that changes is another one
def _signature(body: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(body)


def body_of(task: type) -> Callable[..., Any]:
    """The body of a task class as it is called: without ``self``, also where it is bound to the task."""
    run = inspect.getattr_static(task, "run")
    if isinstance(run, staticmethod):
        return run.__func__
    return partial(run, None)


def template_of(task: Any, option: str) -> KeyTemplate | None:
    """A key's template as a task declares it: a function among its options is no method of it."""
    declared: Any = inspect.getattr_static(task, option)
    return declared.__func__ if isinstance(declared, staticmethod) else declared


def check_template(where: str, option: str, template: object, body: Callable[..., Any]) -> None:
    """Check a key's template when the task is defined.

    Args:
        where: For the message: ``task proj.pay``.
        option: ``idempotency_key`` or ``lease_key``.

    Raises:
        SettingsError: it is neither text nor callable, is empty, or names an argument that the body does not have.
    """
    if callable(template):
        return
    if not isinstance(template, str) or not template:
        raise SettingsError(
            f"{where}: {option} must be a template over the task's arguments, like 'payment:{{payment_id}}',"
            f" or a callable, got {template!r}",
            option,
        )
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as exc:
        raise SettingsError(f"{where}: {option} = {template!r} is no template: {exc}", option) from exc
    parameters = inspect.signature(body).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for field in fields:
        name = field.split(".")[0].split("[")[0]
        if name not in parameters:
            raise SettingsError(
                f"{where}: {option} = {template!r} names the argument {name!r},"
                f" but the task takes {', '.join(parameters) or 'none'}",
                option,
            )


def key_of(
    where: str, option: str, template: KeyTemplate, body: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> str:
    """Make the key of one start. The same arguments give the same key, whatever the call style.

    A callable gets what the body gets. A key that is too long keeps its readable start and ends in its SHA-256.

    Raises:
        UnrecoverableError: the template fails for these arguments, or gives no text, or an empty one.
    """
    try:
        key: Any = template(*args, **kwargs) if callable(template) else template.format(**bind(body, args, kwargs))
    except UnrecoverableError:
        raise
    except Exception as exc:  # whatever a user's callable or format may raise
        raise UnrecoverableError(f"{where}: {option} fails for the arguments of this message: {exc!r}") from exc
    if not isinstance(key, str) or not key.strip():
        raise UnrecoverableError(f"{where}: {option} must give a text that is not empty, got {key!r}")
    if "\0" in key or not _is_unicode(key):
        raise UnrecoverableError(f"{where}: {option} gives {key!r}, with a character that no database stores")
    return shortened(key)


def shortened(key: str) -> str:
    """The key itself, or where no database would keep it as it is a readable start of it and its SHA-256."""
    # MariaDB compares without the spaces at the end.
    if len(key) <= MAX_KEY_CHARACTERS and not key.endswith(" "):
        return key
    readable = key[: MAX_KEY_CHARACTERS - _DIGEST_CHARACTERS - 1].rstrip()
    return f"{readable}:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def payload_hash(
    task_name: str, body: Callable[..., Any], args: Sequence[Any], kwargs: Any, *, dumps: Callable[[Any], str]
) -> str | None:
    """SHA-256 of task name and arguments; ``None`` for arguments that have no form which can be compared.

    Args:
        dumps: JSON with sorted keys; raises ``TypeError`` or ``ValueError`` for what it cannot write.
    """
    try:
        text = dumps([task_name, bind(body, args, kwargs)])
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
