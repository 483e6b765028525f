"""``dedup="claim"`` and ``"redis"``: the claim is there before the body, for effects that no rollback undoes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import sleep
from typing import Any, TypeVar

from celery.exceptions import Ignore, Reject
from kombu.utils.json import dumps

from celery_selfheal.clock import jitter, monotonic
from celery_selfheal.dedup.payload import encode
from celery_selfheal.dedup.port import Answer, ClaimStore, Doubtful, Finished, Granted, Held, Job, Mismatch
from celery_selfheal.dedup.takeover import Doubt, Park
from celery_selfheal.errors import InDoubt, PayloadMismatch, StoreError
from celery_selfheal.plugin.duplicates import (
    Replaced,
    answer,
    leave_parked,
    replaced_payload,
    send_replacement,
)
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.next_attempt import STORE_PAUSE_SECONDS
from celery_selfheal.plugin.running import Running

RACE_PAUSE = timedelta(seconds=1)  # another start was quicker: it may soon be done

_T = TypeVar("_T")


def run_claimed(
    task: Any, plugin: Plugin, running: Running, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run the body under a claim on its key, or end as the claim says.

    The claim stays when the process dies: how far the effect came, nobody knows, and ``on_in_doubt`` decides. It is
    withdrawn when the body raises.

    Raises:
        Ignore: the message was parked, or its effect is there and nothing is left to do.
        PayloadMismatch: the key belongs to other arguments.
        InDoubt: a start died with the key, and ``on_in_doubt="hold"``.
        Reject: the store did not answer, or the claim was lost: the message goes back, uncounted.
    """
    claims = plugin.claims(task.dedup, eager=bool(task.request.is_eager))
    found = _patiently(plugin, running, lambda: claims.claim(job))
    if isinstance(found, Held):
        found = _settle_held(task, plugin, running, claims, job, found)
    if isinstance(found, Finished):
        return answer(task, plugin, running, job, found)
    if isinstance(found, Mismatch):
        raise PayloadMismatch(task.name, job.key)
    if isinstance(found, Doubtful):
        raise InDoubt(task.name, job.key)
    running.job = job
    return _effect(task, plugin, running, claims, job, args, kwargs)


def _settle_held(task: Any, plugin: Plugin, running: Running, claims: ClaimStore, job: Job, held: Held) -> Answer:
    """Wait for a start that lives; take over from one that is gone, or leave it to a person."""
    decision = plugin.takeover(job, held, on_in_doubt=task.on_in_doubt)
    if isinstance(decision, Park):
        raise leave_parked(task, plugin, running, decision.wait)
    is_doubt = isinstance(decision, Doubt)
    if not _patiently(plugin, running, lambda: claims.inherit(job, held, doubt=is_doubt)):
        raise leave_parked(task, plugin, running, RACE_PAUSE)
    return Doubtful() if is_doubt else Granted(taken_over=True)


def _effect(
    task: Any,
    plugin: Plugin,
    running: Running,
    claims: ClaimStore,
    job: Job,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    left_by: Ignore | None = None
    result = payload = None
    unstorable: Exception | None = None
    try:
        result = running.body.run(task.run, *args, **kwargs)
    except Replaced as replaced:
        left_by, payload = replaced, replaced_payload(replaced)
    except Ignore as ignored:
        if not task.commit_on_ignore:
            _patiently(plugin, running, lambda: claims.withdraw(job))
            raise
        left_by = ignored
    except Exception:
        # Interruptions are no Exception: then nobody knows how far the effect came.
        _patiently(plugin, running, lambda: claims.withdraw(job))
        raise
    if task.store_result and left_by is None:
        try:
            payload = encode(result, task_name=task.name, dumps=dumps)
        except Exception as exc:  # noqa: BLE001  # whatever a serializer raises: the effect is there, and must be recorded
            unstorable = exc
    # The effect is there, and a hand-back would have it once more: as long as others would leave the claim alone.
    patience = plugin.settings.takeover_after
    if not _patiently(plugin, running, lambda: claims.complete(job, payload), patience=patience):
        raise running.lost("completion refused")
    if unstorable is not None:
        raise unstorable
    running.after_commit.run()
    if isinstance(left_by, Replaced):
        send_replacement(running, left_by.signature)
    if left_by is not None:
        raise left_by
    return result


def _patiently(plugin: Plugin, running: Running, step: Callable[[], _T], *, patience: timedelta | None = None) -> _T:
    """Try for one TTL, or for ``patience``; a store that is away is no failure of the task."""
    give_up_at = monotonic() + (plugin.settings.lease_ttl if patience is None else patience).total_seconds()
    while True:
        try:
            return step()
        except StoreError as exc:
            if monotonic() >= give_up_at:
                raise Reject(f"{running.start.task_id}: {exc}", requeue=True) from exc
        sleep(jitter().uniform(*STORE_PAUSE_SECONDS))
