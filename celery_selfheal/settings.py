"""Every setting: its default, its unit, its rule, and what follows from it."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import ModuleType
from typing import Any

from celery_selfheal.errors import SettingsError
from celery_selfheal.retry_budget import RetryBudget

PREFIX = "selfheal_"
MIN_DONE_TTL = timedelta(hours=1)  # Celery's own default visibility timeout on Redis

_ZERO = timedelta(0)
_MILLISECOND = timedelta(milliseconds=1)  # Redis expires no key sooner

_Rule = Callable[[object], object]
"""Turns what the user wrote into what we keep, or raises ``_RuleBroken``."""


class _RuleBroken(Exception):
    """Its text ends the sentence "<setting> must be ..."."""


def _duration(*, least: timedelta, none_means: str = "") -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if value is None and none_means:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                value = timedelta(seconds=value)
            except (ValueError, OverflowError):
                raise _RuleBroken("a finite number of seconds" + or_none) from None
        if not isinstance(value, timedelta):
            raise _RuleBroken("a number of seconds or a timedelta" + or_none)
        if value < least:
            raise _RuleBroken(f"at least {least.total_seconds():g} seconds" + or_none)
        return value

    or_none = f" (or None: {none_means})" if none_means else ""
    return {"rule": rule}


def _count() -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _RuleBroken("a whole number, 0 or more")
        return value

    return {"rule": rule}


def _one_of(*choices: str) -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if value not in choices:
            raise _RuleBroken(" or ".join(map(repr, choices)))
        return value

    return {"rule": rule}


def _switch() -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if not isinstance(value, bool):
            raise _RuleBroken("True or False")
        return value

    return {"rule": rule}


def _text(what: str, *, none_means: str) -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise _RuleBroken(f"{what} or None ({none_means})")
        return value

    return {"rule": rule}


def _budget() -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if value is None:
            return None
        if not isinstance(value, str):
            raise _RuleBroken("a text like '20% + 10/s' or None (no limit)")
        try:
            RetryBudget.parse(value)
        except SettingsError as exc:
            raise _RuleBroken(exc.message.partition(" must ")[2].removeprefix("be ").partition(", got")[0]) from None
        return value

    return {"rule": rule}


def _url(example: str, *, none_means: str) -> dict[str, Any]:
    def rule(value: object) -> object:
        if value is not None and (not isinstance(value, str) or "://" not in value):
            raise _RuleBroken(f"a URL like {example} or None ({none_means})")
        return value

    return {"rule": rule, "secret": True}


def _object(what: str) -> dict[str, Any]:
    def rule(value: object) -> object:
        # Whether it is one shows when it is resolved: SQLAlchemy is loaded only where a database is used.
        is_plain = isinstance(value, (bool, int, float, bytes, Mapping, list, tuple, set, frozenset))
        is_path = isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.\w+)*([.:]\w+)(\.\w+)*", value) is not None
        if is_plain or (isinstance(value, str) and not is_path):
            raise _RuleBroken(f"{what}, its dotted path ('package.module:name'), a callable that returns it, or None")
        return value

    return {"rule": rule, "secret": True}


def _key_prefix() -> dict[str, _Rule]:
    def rule(value: object) -> object:
        # Braces would end the hash tag that keeps a script's keys together in a cluster.
        if not isinstance(value, str) or not value.isprintable() or not value or set(value) & set(" {}"):
            raise _RuleBroken("a text without spaces, braces and control characters, not empty")
        return value

    return {"rule": rule}


def _exceptions() -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if not isinstance(value, (tuple, list)):
            raise _RuleBroken("a tuple of exception classes, as in (OSError,): mind the comma")
        for one in value:
            is_class = isinstance(one, type) and issubclass(one, BaseException)
            is_path = isinstance(one, str) and "." in one and all(part.isidentifier() for part in one.split("."))
            if not is_class and not is_path:
                raise _RuleBroken(f"a tuple of exception classes or their paths ('package.module.Error'), not {one!r}")
        return tuple(value)

    return {"rule": rule}


def _names() -> dict[str, _Rule]:
    def rule(value: object) -> object:
        if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
            raise _RuleBroken("a tuple of texts, as in ('name',): mind the comma")
        return tuple(value)

    return {"rule": rule}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfHealSettings:
    """Every setting. Celery key: ``selfheal_`` + field name; a duration is a number of seconds there, or a timedelta.

    Raises:
        SettingsError: a value breaks its rule, or two of them do not fit together.
    """

    #: URL of the Redis that holds the leases. None: the broker's if that is Redis, else the result backend's; it is an
    #: error if neither is.
    redis_url: str | None = field(
        default=None,
        repr=False,
        metadata=_url("redis://localhost:6379/0", none_means="the broker's or the result backend's"),
    )
    #: First part of every Redis key. With the app's name it must be unique in its database: two apps that share both
    #: take each other's leases.
    key_prefix: str = field(default="selfheal", metadata=_key_prefix())
    #: What keeps the leases: "redis", or "postgres" for a fleet without Redis: tables in the database of
    #: ``database_url``, ``engine`` or ``sessionmaker``, which must be a PostgreSQL.
    lease_backend: str = field(default="redis", metadata=_one_of("redis", "postgres"))
    #: Seconds that a lease outlives its last heartbeat: the longest that a task of a vanished host waits unnoticed.
    #: Shorter heals sooner; too short takes a slow worker for a dead one.
    lease_ttl: timedelta = field(default=timedelta(seconds=10), metadata=_duration(least=_MILLISECOND))
    #: Seconds between heartbeats, at most a third of ``lease_ttl``, so that two in a row may fail.
    heartbeat_interval: timedelta = field(default=timedelta(seconds=3), metadata=_duration(least=_MILLISECOND))
    #: Seconds between sweeps for dead workers: how long a dead worker on a living machine stays unnoticed.
    reaper_interval: timedelta = field(default=timedelta(seconds=2), metadata=_duration(least=_MILLISECOND))
    #: Starts of one task that may die before it goes to the dead letter queue: 2 allows three starts, never a fourth.
    max_stalls: int = field(default=2, metadata=_count())
    #: Seconds that one start may run; then its lease is not renewed any more and it is ended. None: the task's or the
    #: app's ``time_limit``; without that, no limit, and a task is reported as overdue after an hour.
    max_runtime: timedelta | None = field(
        default=None, metadata=_duration(least=_MILLISECOND, none_means="time_limit, if that is set")
    )
    #: Seconds that a start which lost its lease has to obey; then its process is killed. 0 kills at once.
    loss_grace: timedelta = field(default=timedelta(seconds=2), metadata=_duration(least=_ZERO))
    #: Seconds that running tasks have to end after SIGTERM; then they are rolled back and handed over. Keep it below
    #: the platform's own patience (Kubernetes: 30). None waits for ever.
    shutdown_grace: timedelta | None = field(
        default=timedelta(seconds=25), metadata=_duration(least=_ZERO, none_means="wait for ever")
    )
    #: Seconds that a finished start is remembered, so that a late copy of its message does not run again. None: an
    #: hour or the broker's visibility timeout, whichever is longer.
    done_ttl: timedelta | None = field(
        default=None,
        metadata=_duration(least=_MILLISECOND, none_means="an hour or the visibility timeout, whichever is longer"),
    )
    #: What running starts do while the lease store does not answer: "continue" (no answer is no loss) or "interrupt"
    #: (for lock keys that guard something that knows no fence).
    on_store_outage: str = field(default="continue", metadata=_one_of("continue", "interrupt"))
    #: Exceptions (classes or dotted paths) that are retried.
    autoretry_for: tuple[type[BaseException] | str, ...] = field(default=(Exception,), metadata=_exceptions())
    #: Exceptions (classes or dotted paths) that no retry can help: straight to the dead letter queue. Adds to the
    #: built-in list.
    unrecoverable: tuple[type[BaseException] | str, ...] = field(default=(), metadata=_exceptions())
    #: Retries that the whole fleet may send for one task name, as a share of its starts plus a rate. Above it a retry
    #: waits longer. None: no such limit.
    retry_budget: str | None = field(default="20% + 10/s", metadata=_budget())
    #: Name of the dead letter queue. None: "<app>.dlq".
    dlq: str | None = field(default=None, metadata=_text("a queue's name", none_means="'<app>.dlq'"))
    #: How often one dead letter may be replayed; more needs force.
    max_replays: int = field(default=3, metadata=_count())
    #: SQLAlchemy URL of the database with ``processed_jobs``: PostgreSQL, MySQL, MariaDB or SQLite. None: no database,
    #: unless an engine or a sessionmaker is given.
    database_url: str | None = field(
        default=None, repr=False, metadata=_url("postgresql://localhost/shop", none_means="no database")
    )
    #: SQLAlchemy engine to use instead of ``database_url``: the engine, its dotted path ("package.module:name") or a
    #: callable that returns it. None: one is made from ``database_url``.
    engine: Any = field(default=None, metadata=_object("an SQLAlchemy engine"))
    #: SQLAlchemy sessionmaker that makes ``self.session``, with its own options and engine; given like ``engine``.
    #: None: one is made for the engine.
    sessionmaker: Any = field(default=None, metadata=_object("an SQLAlchemy sessionmaker"))
    #: Seconds after which a claim is taken over although its lease cannot be asked (the store was emptied).
    takeover_after: timedelta = field(default=timedelta(minutes=10), metadata=_duration(least=_MILLISECOND))
    #: Seconds that rows of ``processed_jobs`` are kept. Must exceed every way a message can come late: visibility
    #: timeout, ETA, retries, replay.
    retention: timedelta = field(default=timedelta(days=7), metadata=_duration(least=_MILLISECOND))
    #: Seconds that an idempotency key is kept with ``dedup="redis"``: after that it may run again.
    idempotency_ttl: timedelta = field(default=timedelta(days=1), metadata=_duration(least=_MILLISECOND))
    #: Whether messages sent on commit are rows of the same transaction, so that a crash right after it loses none.
    outbox: bool = field(default=False, metadata=_switch())
    #: Whether messages are taken from Redis and recorded as ours in one step. False: kombu's own way, which loses
    #: messages when a worker is killed.
    redis_reliable_fetch: bool = field(default=True, metadata=_switch())
    #: Checks of ``doctor``, by name, that may fail.
    allow: tuple[str, ...] = field(default=(), metadata=_names())

    def __post_init__(self) -> None:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in _validated(values, {}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_conf(cls, keys_and_values: Mapping[str, object], *, namespace: str | None) -> SelfHealSettings:
        """Read the settings from all keys of a Celery configuration; keys of others are left alone.

        Three spellings are understood, in any case: ``selfheal_lease_ttl``, ``<namespace>_selfheal_lease_ttl``, and a
        dictionary ``selfheal`` (or ``<namespace>_selfheal``) with the key ``lease_ttl``.

        Raises:
            SettingsError: a setting is unknown, is given twice with different values, or breaks its rule. It names
                the setting as the user wrote it.
        """
        values: dict[str, Any] = {}
        written: dict[str, str] = {}
        for spelling, name, given in _ours(keys_and_values, namespace):
            value = _checked(name, given, spelling)
            if name in values and values[name] != value:
                raise SettingsError(
                    f"{written[name]} and {spelling} are the same setting with different values: keep one", spelling
                )
            values[name], written[name] = value, spelling
        defaults = {one.name: one.default for one in fields(cls)}
        return cls(**_validated({**defaults, **values}, written))

    @classmethod
    def describe(cls) -> list[tuple[str, str, str]]:
        """List Celery key, default as one would write it, and comment of each setting, for tables in the docs."""
        comments: dict[str, str] = {}
        comment: list[str] = []
        for line in inspect.getsource(cls).splitlines():
            text = line.strip()
            if text.startswith("#:"):
                comment.append(text[2:].strip())
            elif comment:
                comments[text.partition(":")[0]] = " ".join(comment)
                comment = []
        return [(PREFIX + one.name, _as_written(one.default), comments[one.name]) for one in fields(cls)]

    @property
    def has_database(self) -> bool:
        """Whether a database is set at all."""
        return any(one is not None for one in (self.database_url, self.engine, self.sessionmaker))

    def done_ttl_for(self, visibility_timeout: timedelta) -> timedelta:
        """How long a done marker is kept on a broker with this visibility timeout."""
        return self.done_ttl if self.done_ttl is not None else max(MIN_DONE_TTL, visibility_timeout)


_FIELDS = {one.name: one for one in fields(SelfHealSettings)}


def _checked(name: str, value: object, spelling: str) -> Any:
    metadata = _FIELDS[name].metadata
    try:
        return metadata["rule"](value)
    except _RuleBroken as exc:
        # A URL may hold a password, even if it is none.
        got = f"a {type(value).__name__} that is none" if metadata.get("secret") else repr(value)
        raise SettingsError(f"{spelling} must be {exc}, got {got}", spelling) from None


def _validated(values: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """Check every value and how they fit together; errors use the names as ``written``."""

    def named(name: str) -> str:
        return written.get(name, PREFIX + name)

    checked = {name: _checked(name, value, named(name)) for name, value in values.items()}
    ttl, interval = checked["lease_ttl"], checked["heartbeat_interval"]
    if interval > ttl / 3:
        raise SettingsError(
            f"{named('heartbeat_interval')} must be at most a third of {named('lease_ttl')}"
            f" ({_as_written(ttl)} seconds), got {_as_written(interval)}:"
            f" lower it to {_as_written(ttl / 3 // _MILLISECOND * _MILLISECOND)}"
            f" or raise {named('lease_ttl')} to {_as_written(interval * 3)}",
            named("heartbeat_interval"),
        )
    has_database = any(checked[name] is not None for name in ("database_url", "engine", "sessionmaker"))
    for name, asks in (("lease_backend", "postgres"), ("outbox", True)):
        if checked[name] == asks and not has_database:
            raise SettingsError(
                f"{named(name)} is {asks!r} and so needs a database:"
                f" set {PREFIX}database_url, {PREFIX}engine or {PREFIX}sessionmaker",
                named(name),
            )
    return checked


def _ours(conf: Mapping[str, object], namespace: str | None) -> list[tuple[str, str, object]]:
    """Spelling, name and value of every key that is meant for us; refuses unknown names."""
    stem = PREFIX.removesuffix("_")
    space = f"{namespace.lower().removesuffix('_')}_" if namespace else ""
    found: list[tuple[str, str, object]] = []
    for key, value in conf.items():
        if _is_our_own_code(value):
            continue
        lower = key.lower()
        name = lower.removeprefix(space)
        if name == stem:
            if not isinstance(value, Mapping):
                raise SettingsError(f"{key} must be a dictionary of settings, got {value!r}", key)
            found += [(f"{key}[{inner!r}]", str(inner).lower().removeprefix(PREFIX), value[inner]) for inner in value]
        elif name.startswith(PREFIX):
            found.append((key, name.removeprefix(PREFIX), value))
        elif not space and lower.startswith(f"celery_{PREFIX}"):
            raise SettingsError(
                f"{key} is not read, since this app has no namespace: write {lower.removeprefix('celery_')},"
                " or give namespace='CELERY' to config_from_object",
                key,
            )
    for spelling, name, _ in found:
        if name not in _FIELDS:
            raise SettingsError(f"unknown setting {spelling}{_remedy(spelling, name)}", spelling)
    return found


def _is_our_own_code(value: object) -> bool:
    # A configuration module that imports our package or, say, selfheal_schedule lists these names among its keys.
    owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    is_ours = isinstance(owner, str) and owner.partition(".")[0] == "celery_selfheal"
    return is_ours and (isinstance(value, ModuleType) or callable(value))


def _remedy(spelling: str, name: str) -> str:
    close = difflib.get_close_matches(name, _FIELDS, n=1)
    if not close:
        return ": the settings are listed in the README and at celery_selfheal.settings.SelfHealSettings"
    meant = close[0].upper() if spelling.isupper() else close[0]
    start = spelling.lower().rindex(name)
    return f", did you mean {spelling[:start]}{meant}{spelling[start + len(name) :]}?"


def _as_written(value: object) -> str:
    """Value as one would write it in a configuration."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return repr(int(seconds) if seconds.is_integer() else seconds)
    if isinstance(value, tuple):
        inner = ", ".join(one.__name__ if isinstance(one, type) else repr(one) for one in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
