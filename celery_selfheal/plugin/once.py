"""How a body runs so that its effect happens once: as the task's ``dedup`` says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from celery_selfheal.arguments import check_template
from celery_selfheal.dedup.port import Finished, Granted, Job
from celery_selfheal.errors import SettingsError
from celery_selfheal.plugin.claimed import run_claimed
from celery_selfheal.plugin.duplicates import answer, job_of, make_job, where_of
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.running import Running

logger = logging.getLogger("celery_selfheal")

MAX_NAME_CHARACTERS = 255  # of the column job_name
MODES = ("transaction", "claim", "redis")


def check_options(task: Any, where: str, body: Any) -> None:
    """Check what a task declares about its effects, when it is defined.

    Raises:
        SettingsError: names task, option, value and remedy.
    """
    if task.dedup not in (None, *MODES):
        raise SettingsError(f"{where}: dedup must be one of {MODES} or None, got {task.dedup!r}", "dedup")
    if task.dedup is not None and len(task.name) > MAX_NAME_CHARACTERS:
        raise SettingsError(
            f"{where}: with dedup a task's name has {MAX_NAME_CHARACTERS} characters at most, this one has"
            f" {len(task.name)}: give it a shorter name=",
            "name",
        )
    if task.on_in_doubt not in ("takeover", "hold"):
        raise SettingsError(
            f"{where}: on_in_doubt must be 'takeover' or 'hold', got {task.on_in_doubt!r}", "on_in_doubt"
        )
    if task.idempotency_key is not None:
        check_template(where, "idempotency_key", task.idempotency_key, body)
        if task.dedup is None:
            raise SettingsError(
                f"{where}: idempotency_key has no effect without dedup: add dedup='transaction' (or 'claim', 'redis'),"
                " or take it out",
                "idempotency_key",
            )


def check_has_database(app: Any, plugin: Plugin) -> None:
    """Check, when a worker starts, that there is a database for the tasks which need one.

    Not where they are defined: Celery shares tasks among the applications of a process, and another one of them need
    not have it.

    Raises:
        SettingsError: names one of the tasks, and the remedy.
    """
    if plugin.settings.has_database:
        return
    for task in app.tasks.values():
        if getattr(task, "dedup", None) in ("transaction", "claim"):
            raise SettingsError(
                f"{where_of(task)}: dedup={task.dedup!r} needs a database: set selfheal_database_url, selfheal_engine"
                " or selfheal_sessionmaker",
                "dedup",
            )


def run_body(task: Any, plugin: Plugin, running: Running, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the body, and after it what was to wait for its commit."""
    if task.dedup is None:
        result = running.body.run(task.run, *args, **kwargs)
        running.after_commit.run()
        return result
    job = job_of(task, running, args, kwargs)
    if task.dedup == "transaction":
        return _transactional().run_in_transaction(task, plugin, running, job, args, kwargs)
    return run_claimed(task, plugin, running, job, args, kwargs)


def run_or_fail(
    task: Any, plugin: Plugin, running: Running, stalled: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """End a task that stalled too often: with its result if its effect is there, else with the failure.

    Raises:
        StalledTooOften: as given.
    """
    if task.dedup is None:
        raise stalled
    job = job_of(task, running, args, kwargs)
    found = _find_effect(task, plugin, job, eager=bool(task.request.is_eager), patience=plugin.settings.lease_ttl)
    if found is None:
        raise stalled
    return answer(task, plugin, running, job, found)


def has_effect(request: Any, plugin: Plugin) -> bool:
    """Whether the effect of a message is there, as its worker's main process sees it: then no start of it has failed.

    Raises:
        StoreError: the store did not answer.
    """
    task = request.task
    if task.dedup is None:
        return False
    nesting = request.request_dict.get("replaced_task_nesting")
    job = make_job(task, request.start, request.args, request.kwargs, fence=0, nesting=nesting)
    # Main's thread must beat: it asks again later.
    return _find_effect(task, plugin, job, eager=False, patience=timedelta(0)) is not None


def _find_effect(task: Any, plugin: Plugin, job: Job, *, eager: bool, patience: timedelta) -> Finished | None:
    found: Any
    if task.dedup == "transaction":
        found = _transactional().look(plugin, job, patience=patience)
    else:
        claims = plugin.claims(task.dedup, eager=eager)
        found = claims.claim(job)
        if isinstance(found, Granted):
            claims.withdraw(job)
    return found if isinstance(found, Finished) else None


def mark_dispatched(task: Any, plugin: Plugin, running: Running) -> None:
    """Remember that callbacks, chain or chord of a finished task were sent, if it has any.

    A failure is only logged: a duplicate would send them once more, which is allowed.
    """
    request = task.request
    if running.job is None or not (request.callbacks or request.chain or request.chord or running.is_replaced):
        return
    try:
        if task.dedup == "transaction":
            _transactional().mark_dispatched(plugin, running.job)
        else:
            plugin.claims(task.dedup, eager=bool(request.is_eager)).mark_dispatched(running.job)
    except Exception as exc:  # noqa: BLE001  # whatever the database says, the task has ended well
        logger.warning("%s[%s]: its row could not be marked as dispatched: %s", task.name, request.id, exc)


def _transactional() -> Any:
    # Loads SQLAlchemy, which nobody else needs.
    from celery_selfheal.plugin import in_transaction

    return in_transaction
