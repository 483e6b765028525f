"""What a start asks of the dedup rows, and how a duplicate ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from celery.canvas import Signature
from celery.exceptions import Ignore
from kombu.utils.json import dumps, loads

from celery_selfheal.arguments import key_of, payload_hash, shortened, template_of
from celery_selfheal.dedup.payload import decode
from celery_selfheal.dedup.port import Finished, Job
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.parking import park
from celery_selfheal.plugin.running import Running
from celery_selfheal.telemetry.events import DuplicateSuppressed

REPLACED = "selfheal-replaced"
"""Key of a stored result that is none: the signature of ``self.replace()``, to be sent in the task's place."""


class Replaced(Ignore):  # type: ignore[misc]  # Celery is untyped
    """``self.replace()`` inside of a claim: the replacement is sent when the claim is settled.

    Attributes:
        signature: The replacement, frozen under the task's own id.
    """

    def __init__(self, signature: Signature) -> None:
        super().__init__("Replaced by new task")
        self.signature = signature


def where_of(task: Any) -> str:
    """How a message to the user names the task."""
    return f"task {task.name}"


def job_of(task: Any, running: Running, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Job:
    """What a start asks for.

    Raises:
        UnrecoverableError: ``idempotency_key`` gives no key for these arguments.
    """
    nesting = task.request.replaced_task_nesting
    return make_job(task, running.start, args, kwargs, fence=running.lease.fence, nesting=nesting)


def make_job(
    task: Any, start: Start, args: Sequence[Any], kwargs: Mapping[str, Any], *, fence: int, nesting: int | None
) -> Job:
    """The same from what is known of a message outside of its start.

    Args:
        nesting: How many tasks ``self.replace()`` has put in each other's place.
    """
    return Job(
        key=_job_key(task, start.task_id, nesting, args, kwargs),
        task_name=task.name,
        task_id=start.task_id,
        token=start.token,
        fence=fence,
        payload_hash=payload_hash(task.name, task.run, args, kwargs, dumps=partial(dumps, sort_keys=True)),
    )


def answer(task: Any, plugin: Plugin, running: Running, job: Job, found: Finished) -> Any:
    """End a duplicate with what the first start has left.

    Raises:
        Ignore: there is nothing left to do, also not for whoever waits.
    """
    plugin.tell(
        DuplicateSuppressed(
            task_name=job.task_name, task_id=job.task_id, reason="completed", owner=found.task_id, age_seconds=0.0
        )
    )
    is_same = found.task_id == shortened(job.task_id)
    if is_same and found.dispatched:
        raise Ignore("a copy of this message was finished, and its callbacks were sent")
    if is_same:
        running.job = job
    replacement = found.payload.get(REPLACED) if isinstance(found.payload, dict) else None
    if replacement is None:
        return decode(found.payload, loads=loads)
    if not is_same:
        return None
    send_replacement(running, Signature.from_dict(loads(json.dumps(replacement)), app=task.app))  # type: ignore[no-untyped-call]  # kombu is untyped
    raise Ignore("a copy of this message was finished: its replacement is sent once more")


def replaced_payload(replaced: Replaced) -> Any:
    """What is stored of a task that put another one in its place."""
    return {REPLACED: json.loads(dumps(dict(replaced.signature)))}  # type: ignore[no-untyped-call]  # kombu is untyped


def send_replacement(running: Running, signature: Signature) -> None:
    """Send what ``self.replace()`` put in the task's place; ``running.job`` is marked as dispatched at its end."""
    running.after_commit.send(signature)
    running.after_commit.run()
    running.is_replaced = True


def leave_parked(task: Any, plugin: Plugin, running: Running, patience: timedelta) -> Ignore:
    """Let the message come back after a while: another start has its key, and has not finished."""
    if not task.request.is_eager:
        park(task, plugin, running.start, patience, paid=False)
        running.is_parked = True
    return Ignore(f"parked: another start has its idempotency key, for {patience.total_seconds():.1f} s at least")


def _job_key(task: Any, task_id: str, nesting: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    template = template_of(task, "idempotency_key")
    if template is not None:
        return key_of(where_of(task), "idempotency_key", template, task.run, args, kwargs)
    # A task that replaces itself keeps its id, and is another job all the same.
    return shortened(f"{task.name}:{task_id}" + (f":{nesting}" if nesting else ""))
