"""A retry inside a chain, group or chord keeps the rest, exactly once."""

from __future__ import annotations

import pytest
from celery import chain, chord, group

from integration.retries.crew import Bank

HAND = pytest.mark.parametrize("hand", [False, True], ids=["raised", "by hand"])


@HAND
def test_chain_goes_on_once_after_retries_in_its_middle(hand: bool, bank: Bank) -> None:
    name = f"chain-{hand}"
    steps = [
        bank.sign("fail_until", 0).set(task_id=f"{name}-0"),
        bank.sign("fail_until", 2, 5, hand, immutable=True).set(task_id=f"{name}-1"),
        bank.sign("fail_until", 1, 7, hand, immutable=True).set(task_id=f"{name}-2"),
        bank.sign("total").set(task_id=f"{name}-3"),
    ]

    chain(*steps).apply_async()

    assert bank.result(f"{name}-3") == 7
    assert [bank.attempts(f"{name}-{n}") for n in range(4)] == [[0], [0, 1, 2], [0, 1], [0]]


@HAND
def test_chord_counts_a_retried_member_once_and_its_body_runs_once(hand: bool, bank: Bank) -> None:
    name = f"chord-{hand}"
    header = [bank.sign("fail_until", fails, fails + 1, hand).set(task_id=f"{name}-{fails}") for fails in (0, 1, 2)]

    chord(header, app=bank.app)(bank.sign("total").set(task_id=f"{name}-body"))

    assert bank.result(f"{name}-body") == 6
    assert [bank.attempts(f"{name}-{fails}") for fails in (0, 1, 2)] == [[0], [0, 1], [0, 1, 2]]
    assert bank.attempts(f"{name}-body") == [0]


def test_body_of_a_chord_may_be_retried(bank: Bank) -> None:
    header = [bank.sign("fail_until", 0, 3).set(task_id=f"body-{n}") for n in range(2)]
    body = chain(
        bank.sign("fail_until", 2, 5, immutable=True).set(task_id="body-body"),
        bank.sign("total").set(task_id="body-after"),
    )

    chord(header, app=bank.app)(body)

    assert bank.result("body-after") == 5
    assert bank.attempts("body-body") == [0, 1, 2]
    assert bank.attempts("body-after") == [0]


def test_group_gathers_the_results_of_retried_members(bank: Bank) -> None:
    members = [bank.sign("fail_until", fails, fails).set(task_id=f"group-{fails}") for fails in (0, 1, 2)]

    result = group(members, app=bank.app).apply_async()

    assert result.get(timeout=60) == [0, 1, 2]


def test_callbacks_run_once_after_the_attempt_that_succeeds(bank: Bank) -> None:
    bank.send(
        "fail_until",
        2,
        task_id="linked",
        link=bank.sign("tell").set(task_id="linked-yes"),
        link_error=bank.sign("tell", immutable=True).set(task_id="linked-no"),
    )
    bank.wait("the callback starts", lambda: bank.attempts("linked-yes"))
    bank.wait("nothing waits", lambda: not bank.left())

    assert bank.attempts("linked") == [0, 1, 2]
    assert bank.attempts("linked-yes") == [0]
    assert bank.attempts("linked-no") == []


def test_errbacks_and_the_chord_around_hear_of_the_last_attempt_only(bank: Bank) -> None:
    member = bank.sign("fail_until", 99).set(task_id="lost-member")
    member.link_error(bank.sign("tell", immutable=True).set(task_id="lost-told"))
    body = bank.sign("total").set(task_id="lost-body")
    body.link_error(bank.sign("tell", immutable=True).set(task_id="lost-chord-told"))

    chord([member, bank.sign("fail_until", 0).set(task_id="lost-other")], app=bank.app)(body)
    bank.wait("both are told", lambda: bank.attempts("lost-told") and bank.attempts("lost-chord-told"))
    bank.wait("nothing waits", lambda: not bank.left())

    assert bank.attempts("lost-member") == [0, 1, 2, 3, 4, 5]
    assert bank.attempts("lost-told") == bank.attempts("lost-chord-told") == [0]
    assert bank.attempts("lost-body") == []
    assert bank.state("lost-body") == "FAILURE"
    assert bank.death("lost-member").reason == "exhausted"
