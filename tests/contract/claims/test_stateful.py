"""Random lives of two keys and many starts, against a plain model; any reply may be lost, and any key."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Doubtful, Finished, Granted, Held, Job, Mismatch, Status
from contract.claims.benches import KINDS, ClaimBench, Seen, a_bench, a_job

KEYS = ("payment:7", "payment:8")
NO_AGE = timedelta(0)
EXAMPLES_VARIABLE = "SELFHEAL_TEST_EXAMPLES"


@dataclass(slots=True)
class Claim:
    """What is true of a key."""

    holder: Job
    status: Status = Status.IN_PROGRESS
    payload: Any = None
    dispatched: bool = False


class Model:
    """The contract once more."""

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}

    def claim(self, job: Job) -> Answer:
        claim = self.claims.get(job.key)
        if claim is None:
            self.claims[job.key] = Claim(job)
            return Granted()
        holder = claim.holder
        if holder.task_name != job.task_name or len({holder.payload_hash, job.payload_hash} - {None}) == 2:
            return Mismatch()
        if claim.status is Status.COMPLETED:
            return Finished(payload=claim.payload, task_id=holder.task_id, dispatched=claim.dispatched)
        if claim.status is Status.IN_DOUBT:
            return Doubtful()
        if holder.token == job.token:
            return Granted()
        return Held(task_id=holder.task_id, token=holder.token, fence=holder.fence, age=NO_AGE)

    def inherit(self, job: Job, held: Held, *, doubt: bool) -> bool:
        claim = self.claims.get(job.key)
        status = Status.IN_DOUBT if doubt else Status.IN_PROGRESS
        if claim is None:
            return False
        if claim.holder.token == job.token and claim.status is status:
            return True
        if claim.status is not Status.IN_PROGRESS or claim.holder.token != held.token or held.fence > job.fence:
            return False
        # What is compared later is what the first start brought.
        claim.holder = replace(job, task_name=claim.holder.task_name, payload_hash=claim.holder.payload_hash)
        claim.status = status
        return True

    def complete(self, job: Job, payload: Any) -> bool:
        claim = self.claims.setdefault(job.key, Claim(job))
        if claim.holder.token != job.token or claim.status is Status.IN_DOUBT:
            return False
        if claim.status is Status.IN_PROGRESS:
            claim.status, claim.payload = Status.COMPLETED, payload
        return True

    def withdraw(self, job: Job) -> None:
        claim = self.claims.get(job.key)
        if claim and claim.holder.token == job.token and claim.status is Status.IN_PROGRESS:
            del self.claims[job.key]

    def mark_dispatched(self, job: Job) -> None:
        claim = self.claims.get(job.key)
        if claim and claim.status is Status.COMPLETED:
            claim.dispatched = True


class ClaimMachine(RuleBasedStateMachine):
    """Starts that claim, die, come late and fail, and a store that loses replies and keys."""

    jobs: Bundle[Job] = Bundle("jobs")

    def __init__(self, bench: ClaimBench) -> None:
        super().__init__()
        self.bench = bench
        self.model = Model()
        self.read: dict[str, Held] = {}

    def both(self, reply_is_lost: bool, name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the step; with a lost reply it is taken twice, which must look like once."""
        expected = getattr(self.model, name)(*args, **kwargs)
        step = getattr(self.bench.store, name)
        if reply_is_lost:
            step(*args, **kwargs)
        return expected, step(*args, **kwargs)

    @rule(
        target=jobs,
        key=st.sampled_from((*KEYS[:1] * 3, KEYS[1])),
        task_id=st.sampled_from(("t1", "t1", "t 2")),
        name=st.sampled_from(("shop.pay",) * 9 + ("shop.refund",)),
        payload_hash=st.sampled_from(("a" * 64,) * 6 + ("b" * 64, None)),
        begins=st.booleans(),
    )
    def receive(self, key: str, task_id: str, name: str, payload_hash: str | None, begins: bool) -> Job:
        job = a_job(key, task_id=task_id, task_name=name, payload_hash=payload_hash)
        if begins:
            self.claim(job, reply_is_lost=False)
        return job

    @rule(job=jobs, reply_is_lost=st.booleans())
    def claim(self, job: Job, reply_is_lost: bool) -> None:
        expected, answer = self.both(reply_is_lost, "claim", job)

        if isinstance(answer, Held):
            assert answer.age >= NO_AGE
            answer = replace(answer, age=NO_AGE)
            self.read[job.token] = answer
        assert answer == expected

    @precondition(lambda self: self.read)
    @rule(job=jobs, doubt=st.sampled_from((False, False, True)), reply_is_lost=st.booleans())
    def inherit(self, job: Job, doubt: bool, reply_is_lost: bool) -> None:
        held = self.read.get(job.token)
        if held:
            expected, done = self.both(reply_is_lost, "inherit", job, held, doubt=doubt)
            assert done == expected

    @rule(job=jobs, payload=st.sampled_from((None, {"n": 1}, "text")), reply_is_lost=st.booleans())
    def complete(self, job: Job, payload: Any, reply_is_lost: bool) -> None:
        expected, done = self.both(reply_is_lost, "complete", job, payload)
        assert done == expected

    @rule(job=jobs, reply_is_lost=st.booleans())
    def withdraw(self, job: Job, reply_is_lost: bool) -> None:
        self.both(reply_is_lost, "withdraw", job)

    @rule(job=jobs, reply_is_lost=st.booleans())
    def mark_dispatched(self, job: Job, reply_is_lost: bool) -> None:
        self.both(reply_is_lost, "mark_dispatched", job)

    @rule(key=st.sampled_from(KEYS))
    def key_is_lost(self, key: str) -> None:
        self.model.claims.pop(key, None)
        self.bench.lose(key)

    @invariant()
    def store_agrees_with_the_model(self) -> None:
        for key in KEYS:
            claim = self.model.claims.get(key)
            assert self.bench.look(key) == (
                claim
                and Seen(
                    claim.status,
                    Owner(claim.holder.task_id, claim.holder.token),
                    claim.holder.fence,
                    claim.dispatched,
                    claim.payload,
                )
            )


@pytest.mark.timeout(900)  # when it fails it looks for the shortest life that does
@pytest.mark.parametrize("kind", KINDS)
def test_store_behaves_as_the_model_whatever_happens(kind: str, request: pytest.FixtureRequest) -> None:
    run_state_machine_as_test(
        lambda: ClaimMachine(a_bench(kind, request)),
        settings=settings(
            max_examples=int(os.environ.get(EXAMPLES_VARIABLE) or 30),
            stateful_step_count=30,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
