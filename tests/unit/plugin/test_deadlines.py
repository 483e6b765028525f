from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.deadlines import Deadlines, Watched
from celery_selfheal.plugin.slots import Doom


def watched(
    *,
    ran: float,
    limit: float | None = None,
    stall_after: float | timedelta | None = None,
    quiet: float | None = 0.0,
    grace: float = 0.0,
    token: str = "t",
) -> Watched:
    start = Start(
        task_id="id", task_name="name", token=token, session="s", attempt="a", marker="m", deadline_seconds=limit
    )
    request = SimpleNamespace(start=start, task=SimpleNamespace(stall_after=stall_after))
    return Watched(request=request, ran_seconds=ran, quiet_seconds=quiet, grace_seconds=grace)


@pytest.fixture
def overdue() -> list[Watched]:
    return []


@pytest.fixture
def deadlines(overdue: list[Watched]) -> Deadlines:
    return Deadlines(tell_overdue=overdue.append)


@pytest.mark.parametrize(
    ("one", "doom"),
    [
        (watched(ran=4.9, limit=5), None),
        (watched(ran=5, limit=5), Doom.DEADLINE),
        (watched(ran=6, limit=5, grace=2), None),
        (watched(ran=7, limit=5, grace=2), Doom.DEADLINE),
        (watched(ran=9999), None),
        (watched(ran=50, stall_after=10, quiet=9), None),
        (watched(ran=50, stall_after=10, quiet=10), Doom.HUNG),
        (watched(ran=50, stall_after=timedelta(seconds=10), quiet=11), Doom.HUNG),
        (watched(ran=50, stall_after=10, quiet=None), None),
        (watched(ran=50, limit=40, stall_after=10, quiet=11), Doom.DEADLINE),
    ],
)
def test_who_is_due(deadlines: Deadlines, one: Watched, doom: Doom | None) -> None:
    found, _ = deadlines.due([one])

    assert [why for _, why in found] == ([] if doom is None else [doom])


def test_the_next_look_is_at_the_next_limit(deadlines: Deadlines) -> None:
    _, pause = deadlines.due([watched(ran=1, limit=5), watched(ran=1, stall_after=3, quiet=2, token="u")])

    assert pause == timedelta(seconds=1)


def test_without_limits_there_is_no_need_to_look(deadlines: Deadlines) -> None:
    assert deadlines.due([watched(ran=1)]) == ([], None)


def test_a_start_without_any_limit_is_told_once_after_an_hour(deadlines: Deadlines, overdue: list[Watched]) -> None:
    for ran in (3599.0, 3601.0, 3700.0):
        deadlines.due([watched(ran=ran), watched(ran=ran, limit=99999, token="limited")])

    assert [one.start.token for one in overdue] == ["t"]
