"""Messages and calls that wait for a commit: those of a running start, and those of a producer's session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, _state
from celery.canvas import Signature
from celery.exceptions import Reject
from celery.local import Proxy

from celery_selfheal.errors import SettingsError, StoreError
from celery_selfheal.plugin.install import Plugin, plugin_of
from celery_selfheal.plugin.outbox import outbox_of
from celery_selfheal.plugin.sending import send, send_within
from celery_selfheal.plugin.unsent import Unsent, make_unsent

if TYPE_CHECKING:
    from celery_selfheal.database.tables import OutboxMessage

logger = logging.getLogger("celery_selfheal")

PRODUCER_PATIENCE = timedelta(seconds=1)  # as Celery's own publish policy, roughly: a request waits for it


class AfterCommit:
    """What one start does after its commit: calls first, then messages, each in the order in which it was asked for.

    Nothing is sent before ``run``. With ``selfheal_outbox`` the messages are rows of the transaction (``store``): what
    a crash or a broker that is away keeps from being sent, the sweep sends. Without it, a death between commit and
    ``run`` loses them.

    Args:
        task: The task that runs. In eager mode messages are applied in this process, and never stored.
    """

    def __init__(self, task: Task, plugin: Plugin) -> None:
        self._plugin = plugin
        self._is_eager = bool(task.request.is_eager)
        self._calls: list[Callable[[], object]] = []
        self._signatures: list[Signature] = []
        self._messages: list[Unsent] = []
        self._rows: list[OutboxMessage] = []
        self._stored = 0

    def __bool__(self) -> bool:
        return bool(self._calls or self._signatures or self._messages)

    def add(self, call: Callable[[], object]) -> None:
        """Call ``call()`` after the commit.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(call):
            raise TypeError(f"on_commit needs a function without arguments, got a {type(call).__name__}")
        self._calls.append(call)

    def send(self, signature: Signature) -> Any:
        """Send a signature, or a whole canvas, after the commit.

        The messages are made now, with their ids: arguments that cannot be serialized fail here, before the commit.

        Returns:
            What ``apply_async`` returns: the result that will be. In eager mode the same, and it is ready afterwards
            only if ``task_store_eager_result`` is on.

        Raises:
            TypeError: it is no signature.
            SettingsError: it belongs to no application, or to another one than the outbox.
        """
        _check_app(self._plugin, signature, "send_on_commit")
        # The configuration is looked at only here: most starts send nothing, and each would pay for it.
        if self._is_eager or self._plugin.app.conf.task_always_eager:
            result = signature.freeze()
            self._signatures.append(signature)
            return result
        result, messages = make_unsent(self._plugin.app, signature.apply_async)
        self._messages += messages
        return result

    def store(self, session: Any) -> None:
        """Write the messages as rows of the session's transaction, just before its commit.

        Nothing without ``selfheal_outbox`` or without messages. A second call writes what came since the first.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database refuses.
        """
        new = self._messages[self._stored :]
        if not new or not self._plugin.settings.outbox:
            return
        self._rows += _add_rows(session, new)
        self._stored = len(self._messages)
        session.flush()

    def run(self) -> None:
        """After the commit: make the calls, send the messages, forget both. A second call does nothing.

        What a call raises is logged, and the others are made: the effect is committed, so the task has succeeded,
        whatever comes after. The same holds for messages in the outbox: when the broker does not answer, the sweep
        sends them.

        Raises:
            Reject: without the outbox, the broker did not answer for one lease TTL: the message of this start comes
                back. Its body then runs again, unless a dedup row answers for it: then the messages are lost, which
                is what the outbox is for.
        """
        calls, signatures, messages, ids = self._calls, self._signatures, self._messages, _ids_of(self._rows)
        is_stored = bool(ids)
        self.clear()
        for call in calls:
            try:
                call()
            except Exception:
                logger.exception("a function that was to be called after the commit failed; what it is about is done")
        for signature in signatures:
            signature.apply()
        if is_stored:
            send_stored(self._plugin, ids)
        elif messages:
            try:
                refusals = send_within(self._plugin.publisher, messages, patience=self._plugin.settings.lease_ttl)
            except StoreError as exc:
                raise Reject(f"messages could not be sent after the commit: {exc}", requeue=True) from exc
            tell_refused(messages, refusals)

    def clear(self) -> None:
        """Forget everything: the transaction was rolled back."""
        self._calls, self._signatures, self._messages, self._rows, self._stored = [], [], [], [], 0


def apply_on_commit(session: Any, signature: Signature) -> Any:
    """Send a signature after the outermost commit of an SQLAlchemy session, and only then.

    For producers: a worker that is quicker than the commit would not find the row. A rollback drops the message, that
    of a savepoint drops what was added inside it. The messages of a canvas are made now, with their ids: arguments
    that cannot be serialized fail here.

    With ``selfheal_outbox`` the messages are rows of ``selfheal_outbox`` in the same transaction, and sent right after
    the commit; what a crash or a broker that is away keeps from being sent, a worker of the same application sends
    some seconds later, as the same message: at least once. Without it, such a message is lost.

    Args:
        session: A ``Session``, a ``scoped_session``, an ``AsyncSession`` or its ``sync_session``.
        signature: ``task.s(...)``, ``chain``, ``group``, ``chord``.

    Returns:
        What ``apply_async`` returns: the result that will be, if the session commits.

    Raises:
        TypeError: one of the two is something else.
        SettingsError: the signature belongs to no application; or, with the outbox, the session writes to another
            database than the application's, or there is no such table.
        StoreError: only from the session's ``commit()``, and only without the outbox: the data are committed, and the
            broker did not answer.
    """
    from celery_selfheal.outbox.session import Pending, check_same_database, session_of

    target = session_of(session)
    plugin = plugin_of(_app_of(signature, "apply_on_commit"))
    if plugin.app.conf.task_always_eager:
        result = signature.freeze()
        Pending.of(target, _run_all).add(target, _Asked(plugin, call=signature.apply_async))
        return result
    use_outbox = plugin.settings.outbox
    if use_outbox:
        from celery_selfheal.database.engines import database_of

        database = database_of(plugin.settings)
        check_same_database(target, database.engine, setting=database.setting)
    result, messages = make_unsent(plugin.app, signature.apply_async)
    if messages:
        rows = _add_rows(target, messages) if use_outbox else []
        Pending.of(target, _run_all).add(target, _Asked(plugin, messages=messages, rows=rows))
    return result


def send_stored(plugin: Plugin, ids: Sequence[int]) -> None:
    """Send rows that were just committed, and remove them. Raises nothing: what fails is left to the sweep."""
    try:
        with outbox_of(plugin).hold_these(ids) as held:
            messages = [Unsent.decode(row.message) for row in held.rows]
            refusals = send(plugin.publisher, messages)
            held.remove([row.id for row, refusal in zip(held.rows, refusals, strict=True) if not refusal])
    except StoreError as exc:
        logger.warning("messages in the outbox are left to the sweep: %s", exc)
    # A refusal is told by the sweep, which tries again.


def tell_refused(messages: Sequence[Unsent], refusals: Sequence[str]) -> None:
    """Log messages that the broker will not take, and that nobody keeps."""
    for message, refusal in zip(messages, refusals, strict=True):
        if refusal:
            logger.error("message lost after the commit: %s[%s]: %s", message.task_name, message.task_id, refusal)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one ``apply_on_commit`` has asked for."""

    plugin: Plugin
    messages: Sequence[Unsent] = ()
    rows: Sequence[OutboxMessage] = ()
    call: Callable[[], object] | None = None


def _run_all(asked: list[_Asked]) -> None:
    """Do all that one transaction has asked for, each application's messages at once; raises the first failure."""
    failed: list[Exception] = []
    for plugin in dict.fromkeys(one.plugin for one in asked):
        mine = [one for one in asked if one.plugin is plugin]
        ids = [_ids_of(one.rows) for one in mine]
        stored = [number for numbers in ids for number in numbers]
        # With the outbox: rows that were taken out of the session before they were flushed.
        loose = [message for one, numbers in zip(mine, ids, strict=True) if not numbers for message in one.messages]
        calls = [one.call for one in mine if one.call is not None]
        if stored:
            calls.append(partial(send_stored, plugin, stored))
        if loose:
            calls.append(partial(_send_now, plugin, loose))
        for call in calls:
            try:
                call()
            except Exception as exc:  # noqa: BLE001  # raised below: the others must not be lost over it
                failed.append(exc)
    if failed:
        raise failed[0]


def _send_now(plugin: Plugin, messages: Sequence[Unsent]) -> None:
    tell_refused(messages, send_within(plugin.publisher, messages, patience=PRODUCER_PATIENCE))


def _add_rows(session: Any, messages: Sequence[Unsent]) -> list[OutboxMessage]:
    from celery_selfheal.outbox.store import add_rows

    return add_rows(session, [(one.task_id, one.encode()) for one in messages])


def _ids_of(rows: Sequence[OutboxMessage]) -> list[int]:
    if not rows:
        return []
    from celery_selfheal.outbox.store import ids_of

    return ids_of(rows)


def _check_app(plugin: Plugin, signature: Any, caller: str) -> None:
    app = _app_of(signature, caller)
    if app is not plugin.app:
        raise SettingsError(
            f"{caller}: {signature!r} belongs to the application {app.main!r}, and this one is {plugin.app.main!r}:"
            f" send it by name, app.signature({str(getattr(signature, 'task', ''))!r}, ...)"
        )


def _app_of(signature: Any, caller: str) -> Celery:
    """The application that a signature would be sent by.

    Raises:
        TypeError: it is no signature.
        SettingsError: there is none but that which Celery makes up.
    """
    if not isinstance(signature, Signature):
        remedy = f": write {signature.__name__}.s(...)" if isinstance(signature, Task) else ", such as task.s(...)"
        raise TypeError(f"{caller} needs a signature{remedy}, got {signature!r}")
    if not signature.get("task"):
        raise SettingsError(f"{caller}: the signature {signature!r} names no task: write task.s(...)")
    app: Celery = signature.app
    if isinstance(app, Proxy):
        app = app._get_current_object()
    # The one that Celery makes up where there is none: it would send to a broker that nobody has named.
    if app is _state.default_app and app.main == "default" and "_selfheal" not in app.__dict__ and not app.configured:
        raise SettingsError(
            f"{caller}: the signature {signature!r} belongs to no Celery application: make it from a task,"
            f" task.s(...), or by app.signature({signature['task']!r}, ...)"
        )
    return app
