"""``dedup="transaction"``: the dedup row and the body commit together, or neither does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import sleep
from typing import Any, TypeVar

from celery.exceptions import Ignore, Reject
from kombu.utils.json import dumps
from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session

from celery_selfheal.clock import jitter, monotonic
from celery_selfheal.database.drivers import shown
from celery_selfheal.database.migrate import check
from celery_selfheal.dedup import lock_fence, transaction
from celery_selfheal.dedup.backends import LOCK_WAIT
from celery_selfheal.dedup.faults import Fault, fault_of, said
from celery_selfheal.dedup.payload import encode
from celery_selfheal.dedup.port import Answer, Doubtful, Finished, Granted, Held, Job, Mismatch
from celery_selfheal.dedup.record import unseen
from celery_selfheal.dedup.takeover import TakeOver
from celery_selfheal.errors import InDoubt, PayloadMismatch, StoreError, UnrecoverableError
from celery_selfheal.plugin.duplicates import (
    Replaced,
    answer,
    leave_parked,
    replaced_payload,
    send_replacement,
    where_of,
)
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.next_attempt import STORE_PAUSE_SECONDS
from celery_selfheal.plugin.running import Running

ROLLED_BACK_MEANWHILE = 3  # so often may whoever has the key vanish between two of our statements

_T = TypeVar("_T")

logger = logging.getLogger("celery_selfheal")

_BODY_OF = "selfheal_body_of"  # in the session's info: whose body runs in it


def run_in_transaction(
    task: Any, plugin: Plugin, running: Running, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run the body in a transaction that its own row has opened, or end as the row says.

    A new session for each start, closed on every way out. Waits a second for another transaction with the same key.

    Raises:
        Ignore: the message was parked, or its effect is there and nothing is left to do.
        PayloadMismatch: the key belongs to other arguments.
        InDoubt: another mode has put the key in doubt.
        Reject: the database did not answer, or the lease was lost: the message goes back, uncounted.
    """
    with plugin.database.new_session() as session:
        with _handing_back():
            found = _take(plugin, session, running, job)
        if isinstance(found, Granted):
            return _effect(task, plugin, running, session, job, args, kwargs)
    if isinstance(found, Finished):
        return answer(task, plugin, running, job, found)
    if isinstance(found, Mismatch):
        raise PayloadMismatch(task.name, job.key)
    if isinstance(found, Doubtful):
        raise InDoubt(task.name, job.key)
    raise leave_parked(task, plugin, running, LOCK_WAIT)


def look(plugin: Plugin, job: Job, *, patience: timedelta) -> Answer | None:
    """What the committed row says.

    Raises:
        StoreError: the database does not answer.
    """

    def ask() -> Answer | None:
        with plugin.database.new_session() as session:
            return transaction.look(session, job)

    return _patiently(plugin, ask, patience=patience)


def mark_dispatched(plugin: Plugin, job: Job) -> None:
    """Remember that the callbacks of a finished job were sent."""
    with plugin.database.new_session() as session:
        transaction.mark_dispatched(session, job)


def _take(plugin: Plugin, session: Session, running: Running, job: Job) -> Answer:
    """Open the transaction with the row; what stands in the way and is gone is removed once."""
    found = _open(plugin, session, running, job)
    if not isinstance(found, Held):
        return found
    if found.token:
        # Committed in progress: by another mode, or by another system with this table.
        decision = plugin.takeover(job, found)
        if isinstance(decision, TakeOver) and _inherit(session, running, job, found):
            return Granted(taken_over=True)
        session.rollback()
        return found
    if running.is_confirmed() and _end_overtaken(session.get_bind().engine, running, job):
        logger.warning("%s[%s]: ended the connection of an earlier start that is gone", job.task_name, job.task_id)
        found = _open(plugin, session, running, job)
    return found


def _open(plugin: Plugin, session: Session, running: Running, job: Job) -> Answer:
    """The fence of the lock key, if the task has one, and then the row; both in one transaction, or neither."""

    def open_once() -> Answer | None:
        fence = _pass_fence(session, running, job)
        return transaction.take(session, job) if isinstance(fence, Granted) else fence

    for _ in range(ROLLED_BACK_MEANWHILE):
        found = _patiently(plugin, open_once)
        if found is not None:
            return found
    return unseen()


def _pass_fence(session: Session, running: Running, job: Job) -> Answer:
    lock_key = running.start.lock_key
    if lock_key is None:
        return Granted()
    found = lock_fence.pass_fence(session, job, lock_key)
    if found is None:
        raise running.lost("fence of its lock key refused")
    return found


def _inherit(session: Session, running: Running, job: Job, held: Held) -> bool:
    # Its transaction was rolled back with the insertion that found the row.
    return isinstance(_pass_fence(session, running, job), Granted) and transaction.inherit(session, job, held)


def _end_overtaken(engine: Engine, running: Running, job: Job) -> bool:
    lock_key = running.start.lock_key
    if lock_key is not None and lock_fence.end_overtaken(engine, job, lock_key):
        return True
    return transaction.end_overtaken(engine, job)


@contextmanager
def _handing_back() -> Iterator[None]:
    """Whatever has begun is undone, or nobody knows: the message comes back, and its row tells."""
    try:
        yield
    except StoreError as exc:
        raise Reject(str(exc), requeue=True) from exc


def _patiently(plugin: Plugin, step: Callable[[], _T], *, patience: timedelta | None = None) -> _T:
    """Try for one TTL, or for ``patience``; a database that is away is no failure of the task."""
    give_up_at = monotonic() + (plugin.settings.lease_ttl if patience is None else patience).total_seconds()
    while True:
        try:
            return step()
        except DBAPIError as exc:
            if fault_of(exc) not in (Fault.AWAY, Fault.BROKEN):
                check(plugin.database.engine)
                raise
            if monotonic() >= give_up_at:
                raise StoreError(shown(plugin.database.engine.url), said(exc)) from exc
        sleep(jitter().uniform(*STORE_PAUSE_SECONDS))


def _effect(
    task: Any,
    plugin: Plugin,
    running: Running,
    session: Session,
    job: Job,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    where = where_of(task)
    opened = session.get_transaction()
    running.session = session
    left_by: Ignore | None = None
    result = payload = None
    try:
        with _uncommitted(session, where):
            try:
                result = running.body.run(task.run, *args, **kwargs)
                payload = encode(result, task_name=task.name, dumps=dumps) if task.store_result else None
            except Replaced as replaced:
                left_by, payload = replaced, replaced_payload(replaced)
            except Ignore as ignored:
                if not task.commit_on_ignore:
                    raise
                left_by = ignored
            session.flush()
        if session.get_transaction() is not opened:
            raise UnrecoverableError(
                f"{where} has ended the transaction by itself, which is committed with its dedup row: leave"
                " self.session.rollback() and close() out, and raise an exception to roll back"
            )
        running.after_commit.store(session)
        is_mine = transaction.complete(session, job, payload)
    except (DBAPIError, PendingRollbackError) as exc:
        meant = _meant_by(exc, running, where)
        if meant is None:
            raise
        raise meant from exc
    finally:
        running.session = None
    if not is_mine:
        raise running.lost("commit refused")
    with _handing_back():
        _commit(plugin, session, running, job)
    running.job = job
    running.after_commit.run()
    if isinstance(left_by, Replaced):
        send_replacement(running, left_by.signature)
    if left_by is not None:
        raise left_by
    return result


@contextmanager
def _uncommitted(session: Session, where: str) -> Iterator[None]:
    """Let no body commit: its effect would be there without the row that says so."""
    # One listener for all sessions of a kind, which looks for ours: to set one up for each start takes longer than the
    # statements' way to the database and back.
    if not event.contains(type(session), "before_commit", _refuse_commit):
        event.listen(type(session), "before_commit", _refuse_commit)
    session.info[_BODY_OF] = where
    try:
        yield
    finally:
        del session.info[_BODY_OF]


def _refuse_commit(session: Session) -> None:
    where = session.info.get(_BODY_OF)
    if where is not None and not session.in_nested_transaction():
        raise UnrecoverableError(
            f"{where} commits by itself: leave self.session.commit() out, the transaction is committed with the"
            " dedup row when the task returns (self.session.begin_nested() makes a savepoint)"
        )


def _meant_by(exc: DBAPIError | PendingRollbackError, running: Running, where: str) -> Exception | None:
    """What a database error in the body means; ``None`` for what it says by itself."""
    if isinstance(exc, PendingRollbackError) or fault_of(exc) is Fault.ABORTED:
        return UnrecoverableError(
            f"{where} caught an error of the database and went on, but the transaction is aborted: put what may fail"
            " into 'with self.session.begin_nested():'"
        )
    # Ended from outside: by a successor, or the network.
    if exc.connection_invalidated and running.is_overtaken():
        return running.lost("connection ended by its successor")
    return None


def _commit(plugin: Plugin, session: Session, running: Running, job: Job) -> None:
    """Commit; where the answer is lost, the row says what became of it."""
    try:
        session.commit()
    except (SystemExit, KeyboardInterrupt):
        # The process goes down: whoever gets the message next finds the row, or not.
        raise
    except BaseException as exc:
        session.invalidate()
        if not _is_committed(plugin, running, job):
            if isinstance(exc, DBAPIError) and exc.connection_invalidated and running.is_overtaken():
                raise running.lost("commit refused") from exc
            raise
        logger.warning("%s[%s]: the commit went through, though its answer was lost", job.task_name, job.task_id)


def _is_committed(plugin: Plugin, running: Running, job: Job) -> bool:
    def ask() -> bool:
        with plugin.database.new_session() as session:
            return transaction.is_committed(session, job)

    return _patiently(plugin, ask)
