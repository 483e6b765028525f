"""What every store of idempotency keys does, be it a table, Redis or a dictionary; also when every reply is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from kombu.utils.json import dumps, loads

from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.payload import MAX_PAYLOAD_BYTES, decode, encode
from celery_selfheal.dedup.port import Doubtful, Finished, Granted, Held, Job, Mismatch, Status
from contract.claims.benches import EXPIRING, KEY_TTL, KINDS, ClaimBench, LostReplies, a_bench, a_job

THREADS = 8
ROUNDS = 20
HOUR = timedelta(hours=1)


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> ClaimBench:
    return a_bench(request.param, request)


@pytest.fixture(params=["replies arrive", "replies are lost"])
def store(request: pytest.FixtureRequest, bench: ClaimBench) -> Any:
    """Whatever is tested with it holds when each method is called twice as well."""
    return bench.store if request.param == "replies arrive" else LostReplies(bench.store)


def held(store: Any, job: Job) -> Held:
    """What a start is told of a key that another has."""
    answer = store.claim(job)
    assert isinstance(answer, Held)
    return answer


# -- claim


def test_free_key_is_granted(store: Any, bench: ClaimBench) -> None:
    job = a_job()

    assert store.claim(job) == Granted()

    seen = bench.look(job.key)
    assert seen
    assert (seen.status, seen.owner, seen.fence) == (Status.IN_PROGRESS, Owner("t1", job.token), job.fence)


def test_key_is_held_for_everybody_else(store: Any) -> None:
    first, twin = a_job(task_id="one with spaces"), a_job(task_id="t2")
    store.claim(first)

    answer = held(store, twin)

    assert (answer.task_id, answer.token, answer.fence) == (first.task_id, first.token, first.fence)


def test_age_is_told_by_the_store(store: Any, bench: ClaimBench) -> None:
    job = a_job()
    store.claim(job)
    assert timedelta(0) <= held(store, a_job()).age < HOUR / 2

    bench.age(job.key, HOUR)

    assert HOUR <= held(store, a_job()).age < HOUR * 1.5


def test_keys_are_told_apart_byte_by_byte(store: Any) -> None:
    for key in ("order:ß", "ORDER:SS", "Order:ß", "order: ß", "order:🧾"):
        assert store.claim(a_job(key)) == Granted()


def test_finished_key_answers_with_its_result(store: Any) -> None:
    job = a_job()
    store.claim(job)
    store.complete(job, {"paid": [1, None, "ü"], "total": 2.5})

    answer = store.claim(a_job(task_id="t2"))

    assert answer == Finished(payload={"paid": [1, None, "ü"], "total": 2.5}, task_id="t1", dispatched=False)


@pytest.mark.parametrize("payload", [None, 0, False, "", [], {}, "text", 2**60, [[["deep"]]]])
def test_any_plain_result_comes_back(bench: ClaimBench, payload: Any) -> None:
    job = a_job()
    bench.store.claim(job)
    bench.store.complete(job, payload)

    answer = bench.store.claim(a_job())

    assert isinstance(answer, Finished)
    assert answer.payload == payload
    assert type(answer.payload) is type(payload)


@pytest.mark.parametrize("end", ["running", "finished", "in doubt"])
def test_key_of_another_payload_or_task_is_a_mismatch(store: Any, end: str) -> None:
    """Whatever became of it: its result would be the answer to another question."""
    job = a_job()
    store.claim(job)
    if end == "finished":
        store.complete(job, "receipt")
    if end == "in doubt":
        store.inherit(a_job(), held(store, a_job()), doubt=True)

    assert store.claim(a_job(payload_hash="b" * 64)) == Mismatch()
    assert store.claim(a_job(task_name="shop.refund")) == Mismatch()


@pytest.mark.parametrize(("first", "second"), [(None, "a" * 64), ("a" * 64, None), (None, None)])
def test_payload_that_cannot_be_compared_is_no_mismatch(store: Any, first: str | None, second: str | None) -> None:
    store.claim(a_job(payload_hash=first))

    assert isinstance(store.claim(a_job(payload_hash=second)), Held)


# -- inherit


def test_successor_takes_the_key_over(store: Any, bench: ClaimBench) -> None:
    gone, heir = a_job(), a_job(task_id="t2")
    store.claim(gone)
    bench.age(gone.key, HOUR)

    assert store.inherit(heir, held(store, heir), doubt=False)

    assert store.claim(heir) == Granted()
    answer = held(store, a_job())
    assert (answer.task_id, answer.token, answer.fence) == ("t2", heir.token, heir.fence)
    assert answer.age < HOUR / 2


def test_late_start_completes_nothing_that_was_taken_over(store: Any, bench: ClaimBench) -> None:
    zombie, heir = a_job(), a_job()
    store.claim(zombie)
    store.inherit(heir, held(store, heir), doubt=False)

    assert not store.complete(zombie, "late")
    store.withdraw(zombie)

    assert store.complete(heir, "in time")
    assert not store.complete(zombie, "later")
    seen = bench.look(heir.key)
    assert seen
    assert (seen.status, seen.payload) == (Status.COMPLETED, "in time")


def test_only_one_successor_takes_over(store: Any) -> None:
    gone, quick, slow = a_job(), a_job(), a_job()
    store.claim(gone)
    as_read = held(store, quick)

    assert store.inherit(quick, as_read, doubt=False)
    assert not store.inherit(slow, as_read, doubt=False)
    assert not store.inherit(slow, as_read, doubt=True)


def test_key_is_never_taken_from_a_later_start(store: Any) -> None:
    """One that was paused before it could ask must not take it from its own successor."""
    early, late = a_job(), a_job()
    store.claim(late)

    assert not store.inherit(early, held(store, early), doubt=False)
    assert not store.inherit(early, held(store, early), doubt=True)
    assert store.complete(late, 1)


@pytest.mark.parametrize("end", ["finished", "withdrawn", "claimed again"])
def test_nothing_is_taken_over_that_has_changed_since(store: Any, end: str) -> None:
    holder, heir = a_job(), a_job()
    store.claim(holder)
    as_read = held(store, heir)
    if end == "finished":
        store.complete(holder, 1)
    else:
        store.withdraw(holder)
    if end == "claimed again":
        store.claim(a_job())

    assert not store.inherit(heir, as_read, doubt=False)
    assert not store.inherit(heir, as_read, doubt=True)


def test_nothing_is_taken_over_but_what_was_read(store: Any) -> None:
    holder, heir = a_job(), a_job()
    store.claim(holder)
    as_read = held(store, heir)

    for other in (replace(as_read, token="other"), replace(as_read, fence=as_read.fence - 1)):
        assert not store.inherit(heir, other, doubt=False)
        assert not store.inherit(heir, other, doubt=True)


@pytest.mark.parametrize("doubt", [False, True])
def test_takeover_is_confirmed_only_while_it_is_so(store: Any, doubt: bool) -> None:
    """A late repeat must not make a finished job run again, nor a running one look doubtful."""
    gone, heir = a_job(), a_job()
    store.claim(gone)
    as_read = held(store, heir)
    assert store.inherit(heir, as_read, doubt=doubt)

    assert not store.inherit(heir, as_read, doubt=not doubt)
    if not doubt:
        store.complete(heir, 1)
        assert not store.inherit(heir, as_read, doubt=False)


def test_doubt_stays_until_a_person_looks(store: Any, bench: ClaimBench) -> None:
    gone, finder = a_job(), a_job()
    store.claim(gone)

    assert store.inherit(finder, held(store, finder), doubt=True)

    assert store.claim(a_job()) == Doubtful()
    assert store.claim(finder) == Doubtful()
    for one in (gone, finder):
        assert not store.complete(one, 1)
        store.withdraw(one)
        store.mark_dispatched(one)
    seen = bench.look(gone.key)
    assert seen
    assert (seen.status, seen.dispatched) == (Status.IN_DOUBT, False)


# -- the end


def test_completion_is_kept_once_whatever_is_said_later(store: Any) -> None:
    job = a_job()
    store.claim(job)

    assert store.complete(job, "first")
    assert store.complete(job, "second")
    store.withdraw(job)

    assert store.claim(a_job()) == Finished(payload="first", task_id="t1", dispatched=False)


def test_end_of_a_job_is_recorded_although_its_claim_was_lost(store: Any, bench: ClaimBench) -> None:
    """The effect is there, and nobody has taken the key: the next copy must learn of it."""
    job = a_job()
    store.claim(job)
    bench.lose(job.key)

    assert store.complete(job, "receipt")

    assert store.claim(a_job()) == Finished(payload="receipt", task_id="t1", dispatched=False)


def test_end_of_a_job_is_refused_when_its_claim_was_lost_and_taken(store: Any, bench: ClaimBench) -> None:
    job, other = a_job(), a_job()
    store.claim(job)
    bench.lose(job.key)
    store.claim(other)

    assert not store.complete(job, "late")
    assert store.complete(other, "receipt")


def test_key_is_free_again_after_a_failure(store: Any, bench: ClaimBench) -> None:
    failed, again = a_job(), a_job()
    store.claim(failed)

    store.withdraw(failed)

    assert bench.look(failed.key) is None
    assert store.claim(again) == Granted()
    store.withdraw(failed)
    assert store.complete(again, 1)


def test_nobody_withdraws_the_claim_of_another(store: Any) -> None:
    holder = a_job()
    store.claim(holder)

    store.withdraw(a_job())
    store.withdraw(a_job("another key"))

    assert isinstance(store.claim(a_job()), Held)


def test_dispatch_is_remembered_of_finished_jobs_only(store: Any) -> None:
    job, copy = a_job(), a_job()
    store.mark_dispatched(job)
    store.claim(job)
    store.mark_dispatched(job)
    store.complete(job, "receipt")
    assert store.claim(copy) == Finished(payload="receipt", task_id="t1", dispatched=False)

    store.mark_dispatched(copy)

    assert store.claim(copy) == Finished(payload="receipt", task_id="t1", dispatched=True)
    assert store.complete(job, "receipt")
    assert store.claim(copy) == Finished(payload="receipt", task_id="t1", dispatched=True)


# -- keys that run out


@pytest.fixture(params=EXPIRING)
def expiring(request: pytest.FixtureRequest) -> ClaimBench:
    return a_bench(request.param, request)


def test_key_is_free_after_its_ttl(expiring: ClaimBench) -> None:
    job = a_job()
    expiring.store.claim(job)
    expiring.age(job.key, KEY_TTL - HOUR)
    assert isinstance(expiring.store.claim(a_job()), Held)

    # A completion does not prolong it.
    assert expiring.store.complete(job, 1)
    assert isinstance(expiring.store.claim(a_job()), Finished)
    expiring.age(job.key, HOUR)

    assert expiring.store.claim(a_job()) == Granted()


@pytest.mark.parametrize("doubt", [False, True])
def test_takeover_begins_the_ttl_anew(expiring: ClaimBench, doubt: bool) -> None:
    gone, heir = a_job(), a_job()
    expiring.store.claim(gone)
    expiring.age(gone.key, KEY_TTL - HOUR)

    assert expiring.store.inherit(heir, held(expiring.store, heir), doubt=doubt)

    expiring.age(gone.key, KEY_TTL - HOUR)
    assert expiring.look(gone.key)


def test_end_that_was_recorded_late_lives_as_long(expiring: ClaimBench) -> None:
    job = a_job()
    expiring.store.complete(job, 1)

    expiring.age(job.key, KEY_TTL - HOUR)
    assert expiring.look(job.key)
    expiring.age(job.key, HOUR)
    assert expiring.look(job.key) is None


# -- many at once


def together(step: Callable[[Job], Any], jobs: list[Job]) -> list[Any]:
    """Let as many threads take the step at one moment."""
    gate = threading.Barrier(len(jobs))

    def one(job: Job) -> Any:
        gate.wait(30)
        return step(job)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(one, jobs))


def test_one_of_eight_gets_the_key(store: Any) -> None:
    for number in range(ROUNDS):
        jobs = [a_job(f"round {number}", task_id=f"t{n}") for n in range(THREADS)]

        answers = together(store.claim, jobs)

        winners = [job for job, answer in zip(jobs, answers, strict=True) if answer == Granted()]
        assert len(winners) == 1
        assert {answer.token for answer in answers if isinstance(answer, Held)} == {winners[0].token}


def test_one_of_eight_takes_over(store: Any) -> None:
    for number in range(ROUNDS):
        gone = a_job(f"round {number}")
        store.claim(gone)
        jobs = [a_job(gone.key) for _ in range(THREADS)]
        as_read = held(store, jobs[0])

        answers = together(lambda job, as_read=as_read: store.inherit(job, as_read, doubt=False), jobs)

        assert sum(answers) == 1
        assert store.complete(jobs[answers.index(True)], None)


def test_there_is_never_a_second_holder_in_a_crowd(bench: ClaimBench) -> None:
    """Claims, failures and ends of eight at once; and nothing of it is an error, such as a deadlock."""
    effects: dict[str, int] = {}
    inside: set[str] = set()

    def live(job: Job) -> None:
        for number in range(ROUNDS):
            mine = replace(job, key=f"key {number // 4}", token=f"{job.token}-{number}")
            if bench.store.claim(mine) != Granted():
                continue
            assert mine.key not in inside
            inside.add(mine.key)
            fails = number % 4 < 2
            effects[mine.key] = effects.get(mine.key, 0) + (not fails)
            inside.discard(mine.key)
            if fails:
                bench.store.withdraw(mine)
            else:
                assert bench.store.complete(mine, number)

    together(live, [a_job() for _ in range(THREADS)])

    assert set(effects.values()) <= {0, 1}
    for key, count in effects.items():
        seen = bench.look(key)
        assert (seen.status if seen else None) == (Status.COMPLETED if count else None)


# -- results of bodies


TRICKY = [
    {"zebra": 1, "a": {"b": 1.0}},
    [2**63 - 1, -(2**63) + 1, 0.1, 1.5e-5, 999_999_999_999_999.9],
    2**70,
    [1e22, -0.0, 5e-324],
    "quotes ' \" \\ \\u0000 %s :name 🧾",
    [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]],
    Decimal("1.10"),
    {"at": datetime(2026, 12, 1, tzinfo=timezone.utc), "raw": b"\xff\x00"},
    "x" * (MAX_PAYLOAD_BYTES - 2),
]


@pytest.mark.parametrize("result", TRICKY, ids=range(len(TRICKY)))
def test_result_of_a_body_comes_back_as_it_was(bench: ClaimBench, result: Any) -> None:
    job = a_job()
    bench.store.claim(job)
    bench.store.complete(job, encode(result, task_name="shop.pay", dumps=dumps))

    answer = bench.store.claim(a_job())

    assert isinstance(answer, Finished)
    again = decode(answer.payload, loads=loads)
    assert again == result
    assert isinstance(again, dict) or repr(again) == repr(result)
