"""What a SQLAlchemy session is to do after its outermost commit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, event, inspect
from sqlalchemy.exc import SQLAlchemyError, UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction

from celery_selfheal.database.drivers import is_same, shown
from celery_selfheal.database.migrate import REMEDY
from celery_selfheal.database.tables import OutboxMessage
from celery_selfheal.errors import SettingsError

_KEY = "celery_selfheal.after_commit"  # in Session.info

T = TypeVar("T")


def session_of(given: object) -> Session:
    """The plain session that is meant: that of this thread, or the one inside an asynchronous session.

    Raises:
        TypeError: it is none of these.
    """
    # By what they have: SQLAlchemy's asynchronous ones cannot even be imported everywhere.
    registry = getattr(given, "registry", None)
    session: Any = registry() if callable(registry) else given
    session = getattr(session, "sync_session", session)
    if not isinstance(session, Session):
        raise TypeError(
            "apply_on_commit needs an SQLAlchemy Session (or a scoped_session, or an AsyncSession) first,"
            f" got a {type(given).__name__}"
        )
    return session


def check_same_database(session: Session, engine: Engine, *, setting: str) -> None:
    """Refuse a session whose rows nobody would look for.

    Args:
        engine: Where the sweep reads.
        setting: Where that comes from.

    Raises:
        SettingsError: the session writes to another database, to none, or to one without our table.
    """
    try:
        bind = session.get_bind(OutboxMessage)
    except UnboundExecutionError:
        raise SettingsError(
            "selfheal_outbox is on, but the session is bound to no engine for the table selfheal_outbox: bind it, or"
            " add celery_selfheal.database.tables.Base to its binds",
            "selfheal_outbox",
        ) from None
    own = bind.engine
    in_memory = own.url.get_backend_name() == "sqlite" and own.url.database in (None, "", ":memory:")
    if own is not engine and (in_memory or not is_same(own.url, engine.url)):
        raise SettingsError(
            f"selfheal_outbox is on, but the session writes to {shown(own.url)} and the sweep reads {setting}"
            f" ({shown(engine.url)}): use one database for both, or switch selfheal_outbox off",
            "selfheal_outbox",
        )
    # Without it the commit would fail, and it would be the driver that says so.
    if engine in _known:
        return
    has_table = _has_table(session, bind, engine)
    if has_table is False:
        raise SettingsError(
            f"selfheal_outbox is on, but the database {shown(engine.url)} has no table selfheal_outbox: {REMEDY}",
            "selfheal_outbox",
        )
    if has_table:
        _known.add(engine)


_known: weakref.WeakSet[Engine] = weakref.WeakSet()


def _has_table(session: Session, bind: Engine | Connection, engine: Engine) -> bool | None:
    try:
        # The session's own connection: another one might have to wait for it. An asynchronous one cannot be asked here.
        where: Any = engine if bind.dialect.is_async else session.connection(bind_arguments={"mapper": OutboxMessage})
        return bool(inspect(where).has_table(OutboxMessage.__tablename__))
    except SQLAlchemyError:
        # It does not answer: the application's own statements will say so, in words that it knows.
        return None


class Pending(Generic[T]):
    """What was asked for inside a session's transaction, to be done after its outermost commit.

    It is dropped when that transaction is rolled back or closed without a commit; what was added inside a savepoint
    is dropped with the savepoint. One for each session; lives as long as that.

    Args:
        run: Gets all of one transaction, in order, once it is committed and its connection is given back. What it
            raises comes out of ``commit()``.
    """

    def __init__(self, session: Session, run: Callable[[list[T]], None]) -> None:
        self._run = run
        self._by_transaction: dict[SessionTransaction, list[T]] = {}
        self._committed: list[T] = []
        event.listen(session, "after_commit", self._after_commit)
        event.listen(session, "after_transaction_end", self._after_end)

    @classmethod
    def of(cls, session: Session, run: Callable[[list[T]], None]) -> Pending[T]:
        """That of a session, made at the first call; ``run`` is that of the first call."""
        pending: Pending[T] | None = session.info.get(_KEY)
        if pending is None:
            pending = session.info[_KEY] = cls(session, run)
        return pending

    def add(self, session: Session, entry: T) -> None:
        """Ask for something inside the session's innermost transaction, which is begun if there is none."""
        transaction = _innermost(session) or session.begin()
        self._by_transaction.setdefault(transaction, []).append(entry)

    def _after_commit(self, session: Session) -> None:
        transaction = _innermost(session)
        entries = self._by_transaction.pop(transaction, []) if transaction is not None else []
        if transaction is None or not entries:
            return
        outer = transaction.parent
        while outer is not None and outer.parent is not None and not outer.nested:
            outer = outer.parent
        if outer is None:
            self._committed = entries
        else:
            self._by_transaction.setdefault(outer, []).extend(entries)

    def _after_end(self, session: Session, transaction: SessionTransaction) -> None:
        # What is still there was not committed.
        self._by_transaction.pop(transaction, None)
        if transaction.parent is None and self._committed:
            # Before it runs: it may use the session again.
            entries, self._committed = self._committed, []
            self._run(entries)


def _innermost(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()
