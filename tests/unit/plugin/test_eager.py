"""Eager mode: as in a worker, but at once, without broker, without Redis (field report C85)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry

from celery_selfheal import SelfHealTask, UnrecoverableError, install
from celery_selfheal.dead_letter import Death
from celery_selfheal.signals import task_dead_lettered

NOWHERE = "redis://127.0.0.1:1/0"  # nothing listens there: whoever asks it fails, after a long wait

PATIENT: dict[str, Any] = {"retry_backoff": 600, "retry_jitter": False}  # a worker would wait ten minutes


class Shop:
    """An application whose one task does what the test says, and notes what it saw."""

    def __init__(self) -> None:
        self.app = Celery("shop", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
        self.seen: list[dict[str, Any]] = []

    @property
    def attempts(self) -> list[int]:
        return [seen["retries"] for seen in self.seen]

    @property
    def dead(self) -> list[Death]:
        return install(self.app).eager_dead_letters

    def task(self, body: Callable[..., Any], name: str = "shop.pay", **options: Any) -> Any:
        def run(task: Any, *args: Any, **kwargs: Any) -> Any:
            request = task.request
            self.seen.append(
                {
                    "name": name,
                    "id": request.id,
                    "retries": request.retries,
                    "headers": request.headers,
                    "token": task.lease and task.lease.token,
                    "fence": task.lease and task.lease.fence,
                }
            )
            return body(task, *args, **kwargs)

        given = {"bind": True, "base": SelfHealTask, "name": name, "shared": False, **PATIENT, **options}
        self.app.task(**given)(run)
        return self.app.tasks[name]


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture(params=[False, True], ids=["apply", "always eager"])
def send(request: pytest.FixtureRequest, shop: Shop) -> Callable[..., Any]:
    """Both ways into eager mode."""
    if not request.param:
        return lambda task, *args, **options: task.apply(args, **options)
    shop.app.conf.task_always_eager = True
    return lambda task, *args, **options: task.apply_async(args, **options)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here may wait, and nobody may be asked."""
    met: list[object] = []

    def refuse(*what: object) -> None:
        met.append(what)
        raise OSError(f"refused: {what}")

    monkeypatch.setattr(time, "sleep", refuse)
    monkeypatch.setattr("celery_selfheal.plugin.task.sleep", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert met == []


def fail(task: Any, *args: Any) -> None:
    raise ConnectionError("away")


def fail_until(last: int, result: Any = "paid") -> Callable[..., Any]:
    def body(task: Any, *args: Any) -> Any:
        if task.request.retries < last:
            raise ConnectionError("away")
        return result

    return body


def test_failing_task_makes_as_many_attempts_as_in_a_worker(shop: Shop, send: Callable[..., Any]) -> None:
    result = send(shop.task(fail))

    assert shop.attempts == [0, 1, 2, 3, 4, 5]
    assert result.state == states.FAILURE
    assert isinstance(result.result, ConnectionError)
    with pytest.raises(ConnectionError, match="away"):
        result.get()


def test_task_that_recovers_succeeds_under_its_id(shop: Shop, send: Callable[..., Any]) -> None:
    result = send(shop.task(fail_until(2)), task_id="pay-1")

    assert shop.attempts == [0, 1, 2]
    assert (result.id, result.state, result.get()) == ("pay-1", states.SUCCESS, "paid")
    assert {seen["id"] for seen in shop.seen} == {"pay-1"}
    assert shop.dead == []


@pytest.mark.parametrize("throw", ["setting", "argument"])
def test_propagating_raises_what_the_last_attempt_raised(shop: Shop, throw: str) -> None:
    shop.app.conf.task_eager_propagates = throw == "setting"
    task = shop.task(fail, max_retries=2)

    with pytest.raises(ConnectionError, match="away") as caught:
        task.apply(throw=True if throw == "argument" else None)

    assert shop.attempts == [0, 1, 2]
    assert caught.value.__context__ is None
    assert [death.reason for death in shop.dead] == ["exhausted"]


def test_argument_wins_over_the_setting_for_every_attempt(shop: Shop) -> None:
    """Celery asks the setting again from the second attempt on."""
    shop.app.conf.task_eager_propagates = True

    assert shop.task(fail).apply(throw=False).state == states.FAILURE


def test_propagating_returns_what_a_later_attempt_returned(shop: Shop) -> None:
    assert shop.task(fail_until(2)).apply(throw=True).get() == "paid"
    assert shop.attempts == [0, 1, 2]


def test_positional_arguments_are_celerys(shop: Shop) -> None:
    result = shop.task(lambda task, n: n).apply((3,), {}, None, None, "pay-1", 2, True)

    assert (result.id, result.get(), shop.attempts) == ("pay-1", 3, [2])


def test_hundreds_of_attempts_do_not_nest(shop: Shop) -> None:
    result = shop.task(fail_until(400), max_retries=None).apply()

    assert result.get() == "paid"
    assert len(shop.attempts) == 401


def test_each_attempt_has_a_lease_of_its_own(shop: Shop) -> None:
    shop.task(fail_until(2)).apply()

    assert len({seen["token"] for seen in shop.seen}) == 3
    fences = [seen["fence"] for seen in shop.seen]
    assert fences == sorted(set(fences))


def test_lease_is_there_in_the_body_only(shop: Shop) -> None:
    task = shop.task(lambda task: task.lease.task_id)

    assert task.apply(task_id="pay-1").get() == "pay-1"
    assert task.lease is None


def test_direct_call_runs_the_plain_body_once(shop: Shop) -> None:
    task = shop.task(fail)

    with pytest.raises(ConnectionError):
        task()

    assert len(shop.seen) == 1
    assert shop.seen[0]["token"] is None


def test_headers_of_the_user_travel_and_ours_are_not_seen(shop: Shop) -> None:
    shop.task(fail_until(2)).apply(headers={"tenant": "acme"})

    assert [seen["headers"] for seen in shop.seen] == [{"tenant": "acme"}] * 3


@pytest.mark.parametrize("throw", [False, True])
def test_unrecoverable_error_ends_at_once(shop: Shop, throw: bool) -> None:
    def body(task: Any) -> None:
        raise UnrecoverableError("no such card")

    task = shop.task(body)
    if throw:
        with pytest.raises(UnrecoverableError):
            task.apply(throw=True)
    else:
        assert task.apply().state == states.FAILURE

    assert shop.attempts == [0]
    assert [(death.reason, death.exception, death.text) for death in shop.dead] == [
        ("unrecoverable", "UnrecoverableError", "no such card")
    ]


def test_dead_letter_says_what_the_queue_of_a_worker_would(shop: Shop) -> None:
    told: list[Any] = []

    def listen(sender: Any, **about: Any) -> None:
        told.append((sender, about["task_id"], about["reason"], about["queue"], about["death"]))

    task_dead_lettered.connect(listen)
    try:
        before = datetime.now(timezone.utc)
        shop.task(fail, max_retries=1, dead_letter_queue="shop.money.dlq").apply(task_id="pay-1")
    finally:
        task_dead_lettered.disconnect(listen)

    (death,) = shop.dead
    assert (death.id, death.task, death.reason, death.attempts, death.worker) == (
        "pay-1",
        "shop.pay",
        "exhausted",
        2,
        "eager",
    )
    assert "ConnectionError: away" in death.trace
    assert before <= datetime.fromisoformat(death.first_failure) <= datetime.fromisoformat(death.died_at)
    assert told == [(shop.app, "pay-1", "exhausted", "shop.money.dlq", death)]
    assert Death.from_header(death.header()) == death


@pytest.mark.parametrize("options", [{"dead_letter": False}, {"dont_dead_letter_for": (OSError,)}], ids=str)
def test_task_that_wants_no_dead_letter_leaves_none(shop: Shop, options: dict[str, Any]) -> None:
    shop.task(fail, **options).apply()

    assert shop.dead == []


def test_failure_before_the_body_is_dead_lettered_unretried(shop: Shop) -> None:
    class Locked(SelfHealTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            raise PermissionError("locked")

    result = shop.task(fail, base=Locked).apply()

    assert (result.state, shop.seen) == (states.FAILURE, [])
    assert [death.exception for death in shop.dead] == ["PermissionError"]


@pytest.mark.parametrize("throw", [False, True])
@pytest.mark.parametrize(
    ("leave", "state", "reasons"),
    [
        (lambda: Reject("bad", requeue=False), states.REJECTED, ["rejected"]),
        (lambda: Reject("later", requeue=True), states.REJECTED, []),
        (lambda: Ignore("seen"), states.IGNORED, []),
    ],
    ids=["reject", "requeue", "ignore"],
)
def test_celerys_ways_to_leave_a_body_are_no_failures(
    shop: Shop, leave: Callable[[], Exception], state: str, reasons: list[str], throw: bool
) -> None:
    def body(task: Any) -> None:
        raise leave()

    result = shop.task(body).apply(throw=throw)

    assert result.state == state
    assert shop.attempts == [0]
    assert [death.reason for death in shop.dead] == reasons


def test_bare_retry_is_celerys_business(shop: Shop) -> None:
    def body(task: Any) -> None:
        raise Retry("some day")

    assert shop.task(body).apply().state == states.RETRY
    assert shop.attempts == [0]

    with pytest.raises(Retry):
        shop.app.tasks["shop.pay"].apply(throw=True)


@pytest.mark.parametrize("throw", [False, True])
def test_retry_by_hand_keeps_what_it_was_given(shop: Shop, throw: bool) -> None:
    def body(task: Any, cents: int) -> int:
        if task.request.retries < 2:
            raise task.retry((cents + 1,))
        return cents

    assert shop.task(body).apply((7,), throw=throw).get() == 9


@pytest.mark.parametrize("throw", [False, True])
def test_retry_by_hand_ends_with_the_error_it_was_given(shop: Shop, throw: bool) -> None:
    def body(task: Any) -> None:
        raise task.retry(exc=KeyError("gone"), max_retries=2)

    task = shop.task(body, autoretry_for=(OSError,))
    if throw:
        with pytest.raises(KeyError, match="gone"):
            task.apply(throw=True)
    else:
        assert isinstance(task.apply().result, KeyError)

    assert shop.attempts == [0, 1, 2]
    assert [(death.reason, death.exception, death.attempts) for death in shop.dead] == [("exhausted", "KeyError", 3)]


def test_retry_by_hand_without_an_error_ends_by_celerys_own(shop: Shop) -> None:
    def body(task: Any) -> None:
        task.retry(max_retries=1)

    result = shop.task(body, autoretry_for=(OSError,)).apply()

    assert isinstance(result.result, MaxRetriesExceededError)
    assert [death.reason for death in shop.dead] == ["exhausted"]


def test_error_after_the_retries_were_used_up_is_not_retried_once_more(shop: Shop) -> None:
    def body(task: Any) -> None:
        try:
            task.retry(max_retries=1)
        except MaxRetriesExceededError:
            raise OSError("told support") from None

    assert isinstance(shop.task(body).apply().result, OSError)
    assert shop.attempts == [0, 1]


@pytest.mark.parametrize("swallow", [True, False], ids=["swallowed", "throw=False"])
def test_retry_that_the_body_outlives_is_made_when_it_has_ended(shop: Shop, swallow: bool) -> None:
    """As in a worker, the body goes on and its own result counts for its own attempt."""
    ended: list[int] = []

    def body(task: Any) -> str:
        retries = task.request.retries
        if retries < 2:
            if swallow:
                with pytest.raises(Retry):
                    task.retry()
            else:
                assert isinstance(task.retry(throw=False), Retry)
        ended.append(retries)
        return f"attempt {retries}"

    result = shop.task(body).apply()

    assert (result.state, result.get()) == (states.SUCCESS, "attempt 0")
    assert shop.attempts == ended == [0, 1, 2]


def test_retry_that_is_returned_and_then_raised_is_made_once(shop: Shop) -> None:
    def body(task: Any) -> str:
        if task.request.retries < 2:
            raise task.retry(throw=False)
        return "paid"

    assert shop.task(body).apply().get() == "paid"
    assert shop.attempts == [0, 1, 2]


def test_age_grows_by_the_waits_that_were_left_out(shop: Shop) -> None:
    """Else a task that is capped by its age alone would be tried for ever."""
    waits = {"retry_backoff": 10, "retry_jitter": False, "retry_backoff_max": 600}  # 10, 20, 40: over after 70 s

    shop.task(fail, max_retries=None, retry_max_age=60, **waits).apply()

    assert shop.attempts == [0, 1, 2, 3]
    assert [death.reason for death in shop.dead] == ["exhausted"]


def test_age_caps_retries_by_hand_too(shop: Shop) -> None:
    def body(task: Any) -> None:
        instant = datetime.now(timezone.utc) + timedelta(seconds=40)
        raise task.retry(eta=instant, exc=KeyError("gone"))

    shop.task(body, max_retries=None, retry_max_age=60).apply()

    assert shop.attempts == [0, 1, 2]
    assert [death.reason for death in shop.dead] == ["exhausted"]


@pytest.mark.parametrize("throw", [False, True])
@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_body_that_is_left_by_force_leaves_no_lease(shop: Shop, leave: type[BaseException], throw: bool) -> None:
    def body(task: Any, forced: bool) -> str:
        if forced:
            raise leave
        return "paid"

    task = shop.task(body)
    for _ in range(4):
        with pytest.raises(leave):
            task.apply((True,), task_id="pay-1", throw=throw)

    assert task.apply((False,), task_id="pay-1").get() == "paid"


def test_copy_inside_the_body_of_its_twin_ends_without_a_start(shop: Shop) -> None:
    def body(task: Any) -> str:
        if len(shop.seen) == 1:
            return str(task.apply(task_id=task.request.id).state)
        return "started twice"

    assert shop.task(body).apply().get() == states.IGNORED


def test_callbacks_and_errbacks_run_once(shop: Shop) -> None:
    """Celery's own eager retries are known for errbacks that run with each attempt."""
    shop.app.conf.task_always_eager = True
    tell = shop.task(lambda task, *about: None, name="shop.tell")
    pay = shop.task(fail_until(2))
    lose = shop.task(fail, name="shop.lose")

    pay.apply_async(link=tell.s("paid"), link_error=tell.si("lost"))
    lose.apply_async(link=tell.s("paid"), link_error=tell.si("lost"))

    assert [seen["name"] for seen in shop.seen].count("shop.tell") == 2
    assert [seen["name"] for seen in shop.seen if seen["name"] != "shop.lose"] == ["shop.pay"] * 3 + ["shop.tell"] * 2


def test_canvas_goes_on_after_a_retry(shop: Shop) -> None:
    shop.app.conf.task_always_eager = True
    shop.app.conf.result_backend = "cache+memory://"
    pay = shop.task(fail_until(1, result=3))
    add = shop.task(lambda task, *numbers: sum(sum(n) if isinstance(n, list) else n for n in numbers), name="shop.add")

    assert chain(pay.si(), add.s(4)).delay().get() == 7
    assert group(pay.si(), pay.si()).delay().get() == [3, 3]
    assert chord([pay.si(), pay.si()], add.s(1)).delay().get() == 7


def test_many_ids_leave_nothing_in_memory(shop: Shop) -> None:
    """Small sites run with always_eager for months."""
    task = shop.task(fail_until(1))

    for n in range(50):
        task.apply(task_id=f"pay-{n}")

    leases = install(shop.app).eager_leases
    assert (leases._tasks, leases._done) == ({}, {})


def test_built_in_tasks_stay_as_they_are(shop: Shop) -> None:
    app = Celery("shop", broker=NOWHERE, task_cls=SelfHealTask, set_as_current=False)

    result = app.tasks["celery.accumulate"].apply((1, 2))

    assert tuple(result.get()) == (1, 2)
    assert install(app).eager_leases.counters == {}
