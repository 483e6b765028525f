"""A process dies of SIGKILL at each step from the receipt of a message to its acknowledgement: one effect, always."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import pytest
from celery import chain
from celery.result import AsyncResult

from integration.effects.office import Office

PLUGIN = "celery_selfheal.plugin"
CHILD_POINTS = (
    f"{PLUGIN}.task:enter before",
    "celery_selfheal.leases.redis:RedisLeaseStore.acquire before",
    "celery_selfheal.leases.redis:RedisLeaseStore.acquire after",
    f"{PLUGIN}.task:run_body before",
    f"{PLUGIN}.once:job_of after",
    f"{PLUGIN}.in_transaction:transaction.take before",
    f"{PLUGIN}.in_transaction:transaction.take after",
    f"{PLUGIN}.in_transaction:encode before",
    f"{PLUGIN}.in_transaction:encode after",
    f"{PLUGIN}.on_commit:AfterCommit.store before",
    f"{PLUGIN}.in_transaction:transaction.complete before",
    f"{PLUGIN}.in_transaction:transaction.complete after",
    "sqlalchemy.orm:Session.commit before",
    "sqlalchemy.orm:Session.commit after",
    f"{PLUGIN}.on_commit:AfterCommit.run before",
    f"{PLUGIN}.on_commit:AfterCommit.run after",
    f"{PLUGIN}.task:run_body after",
    "celery.canvas:Signature.apply_async before",
    "celery.canvas:Signature.apply_async after",
    "celery.backends.base:Backend.mark_as_done before",
    "celery.backends.base:Backend.mark_as_done after",
    f"{PLUGIN}.task:mark_dispatched before",
    f"{PLUGIN}.task:mark_dispatched after",
    "celery_selfheal.leases.redis:RedisLeaseStore.release before",
    "celery_selfheal.leases.redis:RedisLeaseStore.release after",
)
MAIN_POINTS = (
    f"{PLUGIN}.worker:Worker.announce before",
    f"{PLUGIN}.worker:Worker.announce after",
    "kombu.message:Message.ack_log_error before",
    "kombu.message:Message.ack_log_error after",
    "celery.worker.request:Request.acknowledge before",
    "celery.worker.request:Request.acknowledge after",
)


def numbered(who: str, points: tuple[str, ...]) -> list[str]:
    return [f"{number} {who} {point}" for number, point in enumerate(points)]


def send(office: Office, task_ids: list[str]) -> dict[str, AsyncResult]:
    """A chain for each: the second link has an effect, too, and proves that callbacks arrive."""
    return {
        task_id: chain(
            office.ledger.book.s(n).set(task_id=task_id), office.ledger.add.s(1).set(task_id=f"then {task_id}")
        ).apply_async()
        for n, task_id in enumerate(task_ids)
    }


def check(office: Office, sent: dict[str, AsyncResult]) -> None:
    """Each effect is there once, and the end of each chain has come."""
    # The second links wait behind all first ones.
    patience = 120 + 5 * len(sent)
    got = dict(zip(sent, office.results(sent.values(), patience=patience), strict=True))
    assert got == {task_id: n + 1 for n, task_id in enumerate(sent)}
    assert office.killed() == set(sent)
    assert office.entries() == Counter([*sent, *(f"then {task_id}" for task_id in sent)])
    assert set(office.jobs().values()) == {"COMPLETED"}


def kill_children(office: Office, rounds: int) -> None:
    office.settings["selfheal_max_stalls"] = 10
    sent = send(office, [f"{point}-{n}" for n in range(rounds) for point in range(len(CHILD_POINTS))])
    office.start(concurrency=4, prefetch=1, die_at=numbered("child", CHILD_POINTS))
    check(office, sent)


def kill_mains(office: Office, rounds: int) -> None:
    """One worker after the other dies; the next one finds what it has left."""
    office.settings["selfheal_max_stalls"] = 50  # what runs beside the victim dies with it, and is no poison
    sent = {}
    for n in range(rounds):
        for point in range(len(MAIN_POINTS)):
            sent.update(send(office, [task_id := f"{point}-{n}"]))
            worker = office.start(f"w{point}-{n}", ready=False, concurrency=2, die_at=numbered("main", MAIN_POINTS))
            assert worker.wait(timeout=60) == -signal.SIGKILL
            office.wait(f"{task_id} was met", lambda task_id=task_id: task_id in office.killed())
    office.start("last", concurrency=2)
    got = office.results(sent.values())
    assert got == [1] * len(sent)
    assert office.killed() == set(sent)
    assert office.entries() == Counter([*sent, *(f"then {task_id}" for task_id in sent)])


def test_child_killed_at_each_step_leaves_one_effect(office: Office) -> None:
    kill_children(office, 1)


def test_worker_killed_at_each_step_leaves_one_effect(office: Office) -> None:
    kill_mains(office, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_children_killed_at_each_step_leave_one_effect_each(office: Office, rounds: Callable[[int], int]) -> None:
    kill_children(office, rounds(20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_workers_killed_at_each_step_leave_one_effect_each(office: Office, rounds: Callable[[int], int]) -> None:
    kill_mains(office, rounds(20))
