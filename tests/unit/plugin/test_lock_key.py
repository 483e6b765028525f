"""What a task declares about its lock key, and what becomes of it while another task has the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, states

from celery_selfheal import SKIPPED, LeaseBusy, SelfHealTask, SettingsError, UnrecoverableError, install
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.clock import utc_now
from celery_selfheal.headers import LOCK_WAITS, history_of, of_the_user
from celery_selfheal.leases.port import Acquired, Busy, Start
from celery_selfheal.plugin.lock_key import completed, pause_or_refusal
from celery_selfheal.plugin.running import CONTEXT_KEY

LEFT = timedelta(seconds=10)


@pytest.fixture
def app() -> Celery:
    app = Celery("bank", set_as_current=False)
    app.conf.update(task_always_eager=True, selfheal_redis_url="redis://127.0.0.1:1/0")
    return app


def a_task(app: Celery, body: Callable[..., Any] | None = None, **options: Any) -> Any:
    def book(task: Any, account: int, amount: int = 0) -> Any:
        return task.lease.key

    given = {"bind": True, "base": SelfHealTask, "name": "bank.book", "shared": False, **options}
    app.task(**given)(body or book)
    return app.tasks["bank.book"]


def other_has(app: Celery, key: str = "account:1") -> Start:
    """Another task has the key, somewhere else."""
    start = Start(
        task_id="other",
        task_name="bank.other",
        token="o",
        session="s",
        attempt="a",
        marker="m",
        lock_key=key,
        node="w9",
    )
    assert isinstance(install(app).eager_leases.acquire(start), Acquired)
    return start


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"lease_key": "account:{acount}"}, r"lease_key .* names the argument 'acount', but the task takes account"),
        ({"lease_key": ""}, r"task bank\.book: lease_key must be a template"),
        ({"lease_key": "{account}", "lease_busy": "retry"}, r"lease_busy must be one of .*'wait'.*got 'retry'"),
        ({"lease_key": "{account}", "lease_wait_max": -1}, r"lease_wait_max must be a number of seconds.*got -1"),
        ({"lease_key": "{account}", "lease_wait_max": 5, "lease_busy": "skip"}, r"lease_wait_max has no effect with"),
        ({"lease_busy": "skip"}, r"have no effect without lease_key: add it"),
    ],
)
def test_wrong_option_is_an_error_where_the_task_is_defined(app: Celery, options: dict[str, Any], what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        a_task(app, **options)


def test_leases_in_postgresql_know_no_lock_keys(app: Celery) -> None:
    app.conf.update(selfheal_lease_backend="postgres", selfheal_database_url="postgresql://localhost/bank")

    with pytest.raises(SettingsError, match=r"task bank\.book: lease_key needs leases in Redis"):
        a_task(app, lease_key="account:{account}")


@pytest.mark.parametrize("template", ["account:{account}", lambda account, amount=0: f"account:{account}"])
def test_key_is_the_same_whatever_the_call_style(app: Celery, template: Any) -> None:
    task = a_task(app, lease_key=template)

    keys = {task.apply((1,)).get(), task.apply(kwargs={"account": 1, "amount": 3}).get(), task.apply((1, 2)).get()}

    assert keys == {"account:1"}


def test_task_without_a_lock_key_has_none(app: Celery) -> None:
    assert a_task(app).apply((1,)).get() is None


def test_arguments_that_give_no_key_are_a_failure_at_once(app: Celery) -> None:
    task = a_task(app, lease_key=lambda account: "")

    result = task.apply((1,))

    assert (result.state, type(result.result)) == (states.FAILURE, UnrecoverableError)


def test_key_is_free_after_the_end(app: Celery) -> None:
    task = a_task(app, lease_key="account:{account}")
    task.apply((1,)).get()

    other_has(app)


def test_failed_attempts_keep_no_key(app: Celery) -> None:
    def book(task: Any, account: int) -> None:
        raise ConnectionError

    a_task(app, book, lease_key="account:{account}").apply((1,))

    other_has(app)


def test_task_may_need_the_key_again_on_its_next_attempt(app: Celery) -> None:
    def book(task: Any, account: int) -> int:
        if task.request.retries < 2:
            raise ConnectionError
        return int(task.request.retries)

    assert a_task(app, book, lease_key="account:{account}").apply((1,)).get() == 2


def test_skipped_task_returns_so_and_its_chain_goes_on(app: Celery) -> None:
    runs: list[str] = []

    def book(task: Any, account: int) -> None:
        runs.append("ran")

    task = a_task(app, book, lease_key="account:{account}", lease_busy="skip")

    @app.task(name="bank.tell", shared=False)
    def tell(before: object) -> list[object]:
        return ["told", before]

    other_has(app)

    assert task.apply((1,)).get() == SKIPPED
    assert chain(task.s(1), app.tasks["bank.tell"].s()).apply().get() == ["told", SKIPPED]
    assert json.loads(json.dumps(SKIPPED)) == SKIPPED
    assert runs == []


@pytest.mark.parametrize("mode", ["fail", "wait"])
def test_busy_key_is_a_failure_like_any_other(app: Celery, mode: str) -> None:
    """Also for who would wait: in eager mode nobody comes back."""
    runs: list[str] = []

    def book(task: Any, account: int) -> None:
        runs.append("ran")

    task = a_task(app, book, lease_key="account:{account}", lease_busy=mode, max_retries=3)
    other_has(app)

    result = task.apply((1,))

    assert result.state == states.FAILURE
    assert isinstance(result.result, LeaseBusy)
    assert (result.result.key, result.result.holder) == ("account:1", "w9")
    assert [death.attempts for death in install(app).eager_dead_letters] == [4]
    assert runs == []


def test_retry_of_a_refused_start_runs_once_the_key_is_free(app: Celery) -> None:
    task = a_task(app, lease_key="account:{account}", lease_busy="fail")
    other = other_has(app)
    leases = install(app).eager_leases
    acquire = leases.acquire

    def freed(start: Start) -> Any:
        outcome = acquire(start)
        leases.release(other, ended=True, marker=False, state="success")
        return outcome

    leases.acquire = freed  # type: ignore[method-assign]

    assert task.apply((1,)).get() == "account:1"


# -- how long a waiter waits


def waiting(waits: int = 0, *, wait_max: float | None = None, age: float = 0.0, busy: str = "wait") -> Any:
    published = (utc_now() - timedelta(seconds=age)).isoformat()
    context = {"lock_waits": waits, "first_published_at": published}
    request = SimpleNamespace(is_eager=False, properties={CONTEXT_KEY: context})
    return SimpleNamespace(lease_busy=busy, lease_wait_max=wait_max, request=request)


def pauses(waits: int, left: timedelta = LEFT, **options: Any) -> list[timedelta]:
    busy = Busy(remaining=left, attempt="", key="account:1", holder="w9")
    found = [pause_or_refusal(waiting(waits, **options), busy) for _ in range(300)]
    assert all(isinstance(one, timedelta) for one in found)
    return [one for one in found if isinstance(one, timedelta)]


def test_no_waiter_asks_twice_in_half_a_second() -> None:
    for waits in (0, 1, 5, 1000):
        for left in (timedelta(0), timedelta(milliseconds=1), LEFT):
            assert min(pauses(waits, left)) >= timedelta(seconds=0.5)


def test_waiters_are_spread_around_what_is_left_of_the_holders_lease() -> None:
    found = pauses(10)

    assert min(found) < LEFT * 0.7
    assert max(found) > LEFT * 1.3
    assert all(LEFT * 0.5 <= one <= LEFT * 1.5 for one in found)


def test_pauses_grow_with_the_number_of_waits() -> None:
    longest = [max(pauses(waits, timedelta(hours=1))) for waits in range(5)]

    assert longest == sorted(longest)
    assert longest[0] <= timedelta(seconds=1.5)


def test_patience_ends_with_lease_wait_max() -> None:
    busy = Busy(remaining=LEFT, attempt="", key="account:1", holder="w9")

    refusal = pause_or_refusal(waiting(wait_max=5, age=6), busy)

    assert isinstance(refusal, LeaseBusy)
    assert "account:1 is held by w9" in str(refusal)


def test_waiter_comes_back_when_its_patience_ends() -> None:
    assert max(pauses(10, wait_max=5, age=3)) <= timedelta(seconds=2)


# -- what travels and what main makes of it


def test_number_of_waits_travels_with_the_parked_message_and_no_further() -> None:
    message = json.dumps({"headers": {"id": "t1", "task": "bank.book"}, "properties": {}}).encode()

    parked = Envelope.decode(Envelope.decode(message).parked(eta="2026-12-01T00:00:00", paid=False, lock_waits=3))

    headers = parked.fields["headers"]
    assert history_of(headers)["lock_waits"] == 3
    assert LOCK_WAITS not in of_the_user(headers)
    assert json.loads(parked.parked(eta="2026-12-01T00:00:00", paid=False))["headers"][LOCK_WAITS] == 3
    assert history_of({LOCK_WAITS: "many"})["lock_waits"] == 0


def test_main_works_out_the_key_of_a_start_once(app: Celery) -> None:
    calls: list[int] = []
    task = a_task(app, lease_key=lambda account: f"account:{account}:{calls.append(account)}")
    start = Start(task_id="t", task_name="bank.book", token="t", session="s", attempt="a", marker="m")
    request = SimpleNamespace(start=start, task=task, args=(1,), kwargs={})

    first, second = completed(request), completed(request)

    assert first.lock_key == second.lock_key == "account:1:None"
    assert calls == [1]


def test_main_goes_on_without_a_key_that_it_cannot_make(app: Celery) -> None:
    task = a_task(app, lease_key=lambda account: "")
    start = Start(task_id="t", task_name="bank.book", token="t", session="s", attempt="a", marker="m")

    assert completed(SimpleNamespace(start=start, task=task, args=(1,), kwargs={})) == start
