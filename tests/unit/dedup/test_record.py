"""Owners as text, and what is told of a record that is there."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Held, Job, Status
from celery_selfheal.dedup.record import Record, judge


@pytest.mark.parametrize("task_id", ["t1", "order 7 of shop", "a:b", " "])
def test_owner_is_read_as_it_was_written(task_id: str) -> None:
    owner = Owner(task_id, "0f3a")

    assert Owner.parse(str(owner)) == owner


@pytest.mark.parametrize("text", [None, "", "somebody"])
def test_row_without_an_owner_of_ours_names_nobody(text: str | None) -> None:
    assert Owner.parse(text) == Owner("", "")


def test_clock_that_was_set_back_makes_nothing_younger_than_new() -> None:
    record = Record(
        status=Status.IN_PROGRESS,
        task_name="shop.pay",
        owner=Owner("t2", "theirs"),
        fence=1,
        payload_hash=None,
        age=timedelta(seconds=-5),
    )

    answer = judge(Job(key="k", task_name="shop.pay", task_id="t1", token="mine", fence=2), record)

    assert answer == Held(task_id="t2", token="theirs", fence=1, age=timedelta(0))
