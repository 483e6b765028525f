"""From the three settings of a database to an engine and its sessions: one of each for a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from sqlalchemy import URL, Engine, Pool, QueuePool, create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_selfheal.database import LOADED_IN, drivers
from celery_selfheal.database.dotted import resolve
from celery_selfheal.errors import SettingsError
from celery_selfheal.settings import PREFIX, SelfHealSettings

SQLITE_BUSY_SECONDS = 30.0  # it has one writer at a time, and every start writes

SessionFactory: TypeAlias = Callable[[], Session]


@dataclass(frozen=True, slots=True)
class Database:
    """What one process works with.

    Attributes:
        setting: The setting that it comes from, for errors.
    """

    engine: Engine
    new_session: SessionFactory
    setting: str


_lock = threading.Lock()
_opened: dict[tuple[Any, ...], Database] = {}
_pid = os.getpid()
# Never closed, not even by the garbage collector: a driver would say good-bye in the name of the parent.
_inherited: list[Pool] = []


def database_of(settings: SelfHealSettings) -> Database:
    """Engine and sessions of this process, made on first use; connects to nothing.

    A second call returns the same. After a fork the child gets its own: it lets go of the connections that it has
    inherited without a word to the server, since they are still its parent's. So it does with those of the
    application's own engine.

    Raises:
        SettingsError: no database is set, one of the settings cannot be used, or two contradict each other.
    """
    global _lock, _pid  # one of each for a process
    if _pid != os.getpid():
        # Before anything else: a thread of the parent may have held the lock when the fork came.
        _lock, _pid = threading.Lock(), os.getpid()
        for database in _opened.values():
            _let_go(database.engine)
        _opened.clear()
    which = (settings.database_url, _identity(settings.engine), _identity(settings.sessionmaker))
    with _lock:
        if which not in _opened:
            _opened[which] = _open(settings)
        return _opened[which]


def engine_of(settings: SelfHealSettings) -> Engine:
    """This process' engine; as ``database_of``."""
    return database_of(settings).engine


def session_factory(settings: SelfHealSettings) -> SessionFactory:
    """What makes this process' sessions: a new one for each call, to be closed by the caller; as ``database_of``."""
    return database_of(settings).new_session


def close_all() -> None:
    """Close what this process has opened and nobody uses just now. The next use opens it anew."""
    with _lock:
        for database in _opened.values():
            if database.setting == f"{PREFIX}database_url":
                database.engine.dispose()
        _opened.clear()


def _identity(given: object) -> object:
    # Objects are kept by the key itself, so that no other can get their id.
    return given if isinstance(given, str) else _ById(given)


@dataclass(frozen=True, slots=True, eq=False)
class _ById:
    of: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def _open(settings: SelfHealSettings) -> Database:
    url = None if settings.database_url is None else drivers.parse(settings.database_url)
    engine = resolve(settings.engine, Engine, setting=f"{PREFIX}engine", what="an SQLAlchemy Engine (not an async one)")
    factory, bind = _sessions(settings.sessionmaker)
    first = next((one for one in (bind, engine) if one is not None), None)
    if bind is not None and engine is not None and bind is not engine:
        _refuse("sessionmaker", bind, "engine", drivers.shown(engine.url))
    if first is None:
        if url is None:
            raise SettingsError(
                f"no database is set: set {PREFIX}database_url, {PREFIX}engine or {PREFIX}sessionmaker"
                if factory is None
                else f"{PREFIX}sessionmaker is bound to no engine: bind it, or set {PREFIX}engine",
                f"{PREFIX}database_url" if factory is None else f"{PREFIX}sessionmaker",
            )
        first, setting = _create(url), f"{PREFIX}database_url"
    else:
        setting = f"{PREFIX}sessionmaker" if bind is not None else f"{PREFIX}engine"
        if url is not None and not drivers.is_same(url, first.url):
            _refuse(setting.removeprefix(PREFIX), first, "database_url", drivers.shown(url))
        drivers.check_supported(first.url, setting)
        if _pid != LOADED_IN and not any(first is one.engine for one in _opened.values()):
            _let_go(first)
    if factory is None:
        # What a body gave to on_commit is read after the commit, when nothing may be loaded any more.
        factory = sessionmaker(first, expire_on_commit=False)
    elif bind is None:
        factory = partial(factory, bind=first)
    return Database(first, factory, setting)


def _let_go(engine: Engine) -> None:
    # One that keeps its only connection for ever keeps a database in memory there, and shares no socket.
    if isinstance(engine.pool, QueuePool):
        _inherited.append(engine.pool)
        engine.dispose(close=False)


def _create(url: URL) -> Engine:
    drivers.check_installed(url)
    options: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        if "timeout" not in url.query:
            options["connect_args"] = {"timeout": SQLITE_BUSY_SECONDS}
    else:
        # As many as the pool's threads or greenlets use at once: a limit here would be a second one, and a riddle.
        options.update(pool_size=0, pool_use_lifo=True)
    return create_engine(url, **options)


def _sessions(given: object) -> tuple[Callable[..., Session] | None, Engine | None]:
    """Factory and the engine that it is bound to, if it is."""
    setting = f"{PREFIX}sessionmaker"
    what = "an SQLAlchemy sessionmaker (not an async one)"
    factory = resolve(given, (sessionmaker, scoped_session), setting=setting, what=what)
    if isinstance(factory, scoped_session):
        # Each start has a session of its own: that of the thread may still be in use by whoever called us.
        factory = factory.session_factory
    if factory is None:
        return None, None
    with factory() as session:
        bind = session.bind
    if bind is not None and not isinstance(bind, Engine):
        raise SettingsError(f"{setting} must be bound to an Engine, not to a {type(bind).__name__}", setting)
    return factory, bind


def _refuse(name: str, engine: Engine, other_name: str, other: str) -> None:
    raise SettingsError(
        f"{PREFIX}{name} ({drivers.shown(engine.url)}) and {PREFIX}{other_name} ({other}) name two databases: keep one",
        f"{PREFIX}{name}",
    )
