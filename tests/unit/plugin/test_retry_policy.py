"""What a task declares about its retries, in every way Celery lets it be defined (field report C50)."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task, _state, shared_task

from celery_selfheal import SelfHealTask
from celery_selfheal.backoff import Backoff, Jitter, RetryPolicy
from celery_selfheal.errors import SettingsError
from celery_selfheal.plugin.retry import policy_now

NOWHERE = "redis://127.0.0.1:1/0"  # nothing listens there, and nothing may ask

OPTIONS: dict[str, Any] = {
    "autoretry_for": (OSError,),
    "dont_autoretry_for": (FileNotFoundError,),
    "max_retries": 3,
    "retry_backoff": 0.5,
    "retry_backoff_max": 30,
    "retry_backoff_min": 0.1,
    "retry_jitter": "equal",
    "retry_max_age": 3600,
}
EXPECTED = RetryPolicy(
    retry_for=(OSError,),
    give_up_for=(FileNotFoundError,),
    max_retries=3,
    backoff=Backoff(base_seconds=0.5, cap_seconds=30, floor_seconds=0.1, jitter=Jitter.EQUAL),
    fixed_seconds=180,
    max_age=timedelta(hours=1),
)


class Body:
    """Fails for ever, and counts its attempts."""

    def __init__(self) -> None:
        self.attempts: list[int] = []

    def __call__(self, task: Any, exc: type[Exception] = ConnectionError) -> None:
        self.attempts.append(task.request.retries)
        raise exc("away")

    @property
    def fail(self) -> Callable[..., None]:
        """As a function, of which Celery can make a task."""

        def pay(task: Any, **kwargs: Any) -> None:
            self(task, **kwargs)

        return pay


def nothing() -> None:
    """A body that does not matter."""


@pytest.fixture
def body() -> Body:
    return Body()


@pytest.fixture(autouse=True)
def shared_tasks() -> Iterator[None]:
    """Else the tasks of one test would be shared with the applications of all later ones, and with earlier ones."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(before)
    gc.collect()


def new_app(name: str = "shop", **settings: Any) -> Any:
    app = Celery(name, broker=NOWHERE, set_as_current=False)
    app.conf.update(settings)
    return app


def decorated(app: Any, body: Body) -> Any:
    @app.task(shared=False, bind=True, base=SelfHealTask, name="shop.pay", **OPTIONS)
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    return app.tasks["shop.pay"]


def decorated_unbound(app: Any, body: Body) -> Any:
    @app.task(shared=False, base=SelfHealTask, name="shop.pay", **OPTIONS)
    def pay(**kwargs: Any) -> None:
        body(app.tasks["shop.pay"], **kwargs)

    return app.tasks["shop.pay"]


def by_task_cls(app: Any, body: Body) -> Any:
    app.task_cls = SelfHealTask

    @app.task(shared=False, bind=True, name="shop.pay", **OPTIONS)
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    return app.tasks["shop.pay"]


def by_class(app: Any, body: Body) -> Any:
    class Pay(SelfHealTask):
        name = "shop.pay"

        def run(self, **kwargs: Any) -> None:
            body(self, **kwargs)

    for option, value in OPTIONS.items():
        setattr(Pay, option, value)
    return app.register_task(Pay())


def by_class_in_its_body(app: Any, body: Body) -> Any:
    class Pay(SelfHealTask):
        name = "shop.pay"
        autoretry_for = (OSError,)
        dont_autoretry_for = (FileNotFoundError,)
        max_retries = 3
        retry_backoff = 0.5
        retry_backoff_max = 30
        retry_backoff_min = 0.1
        retry_jitter = "equal"
        retry_max_age = 3600

        def run(self, **kwargs: Any) -> None:
            body(self, **kwargs)

    app.register_task(Pay)
    return app.tasks["shop.pay"]


def by_inherited_run(app: Any, body: Body) -> Any:
    class Payment(SelfHealTask):
        abstract = True
        autoretry_for = (OSError,)
        dont_autoretry_for = (FileNotFoundError,)
        retry_backoff = 0.5
        retry_backoff_max = 30

        def run(self, **kwargs: Any) -> None:
            body(self, **kwargs)

    class Pay(Payment):
        name = "shop.pay"
        max_retries = 3
        retry_backoff_min = 0.1
        retry_jitter = "equal"
        retry_max_age = 3600

    return app.register_task(Pay())


def by_base_with_a_call_of_its_own(app: Any, body: Body) -> Any:
    class Timed(SelfHealTask):
        abstract = True
        autoretry_for = (OSError,)
        max_retries = 3

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    rest = {option: value for option, value in OPTIONS.items() if option not in ("autoretry_for", "max_retries")}

    @app.task(shared=False, bind=True, base=Timed, name="shop.pay", **rest)
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    return app.tasks["shop.pay"]


def by_mixin(app: Any, body: Body) -> Any:
    class Patient:
        autoretry_for = (OSError,)
        max_retries = 3

    class PatientTask(Patient, SelfHealTask):
        abstract = True

    rest = {option: value for option, value in OPTIONS.items() if option not in ("autoretry_for", "max_retries")}

    @app.task(shared=False, bind=True, base=PatientTask, name="shop.pay", **rest)
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    return app.tasks["shop.pay"]


def shared_before_its_app(app: Any, body: Body) -> Any:
    @shared_task(bind=True, base=SelfHealTask, name="shop.pay_early", **OPTIONS)
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    app.finalize()
    return app.tasks["shop.pay_early"]


def shared_after_its_app(app: Any, body: Body) -> Any:
    app.finalize()

    @shared_task(bind=True, base=SelfHealTask, name="shop.pay_late", **OPTIONS)
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    return app.tasks["shop.pay_late"]


def by_annotations(app: Any, body: Body) -> Any:
    app.conf.task_annotations = {"shop.pay": OPTIONS}

    @app.task(shared=False, bind=True, base=SelfHealTask, name="shop.pay")
    def pay(self: Any, **kwargs: Any) -> None:
        body(self, **kwargs)

    return app.tasks["shop.pay"]


WAYS = [
    decorated,
    decorated_unbound,
    by_task_cls,
    by_class,
    by_class_in_its_body,
    by_inherited_run,
    by_base_with_a_call_of_its_own,
    by_mixin,
    shared_before_its_app,
    shared_after_its_app,
]


@pytest.mark.parametrize("define", WAYS)
def test_every_way_to_define_a_task_gives_one_policy_and_the_same_attempts(
    define: Callable[[Any, Body], Any], body: Body
) -> None:
    task = define(new_app(), body)

    assert task.retry_policy == EXPECTED
    assert task.apply().state == "FAILURE"
    assert body.attempts == [0, 1, 2, 3]

    body.attempts.clear()
    assert task.apply(kwargs={"exc": FileNotFoundError}).state == "FAILURE"
    assert task.apply(kwargs={"exc": ValueError}).state == "FAILURE"
    assert body.attempts == [0, 0]


def test_annotations_of_the_configuration_declare_as_the_task_does(body: Body) -> None:
    task = by_annotations(new_app(), body)

    task.apply()

    assert task.retry_policy == EXPECTED
    assert body.attempts == [0, 1, 2, 3]


def test_task_that_declares_nothing_has_our_defaults() -> None:
    app = new_app()
    app.task(shared=False, base=SelfHealTask, name="shop.pay")(nothing)

    policy = app.tasks["shop.pay"].retry_policy

    assert policy == RetryPolicy(
        retry_for=(Exception,),
        give_up_for=(),
        max_retries=5,
        backoff=Backoff(base_seconds=1, cap_seconds=600),
        fixed_seconds=180,
    )
    assert policy.backoff.jitter is Jitter.FULL


def test_settings_say_what_undeclared_tasks_are_retried_for(body: Body) -> None:
    app = new_app(selfheal_autoretry_for=("builtins.OSError", LookupError))
    app.task(shared=False, bind=True, base=SelfHealTask, name="shop.pay")(body.fail)
    app.task(shared=False, base=SelfHealTask, name="shop.mail", autoretry_for=(ValueError,))(nothing)

    app.tasks["shop.pay"].apply(kwargs={"exc": ValueError})

    assert app.tasks["shop.pay"].retry_policy.retry_for == (OSError, LookupError)
    assert app.tasks["shop.mail"].retry_policy.retry_for == (ValueError,)
    assert body.attempts == [0]


def test_one_shared_task_has_the_policy_of_each_of_its_applications() -> None:
    strict = new_app("strict", selfheal_autoretry_for=(OSError,))
    mild = new_app("mild")

    @shared_task(base=SelfHealTask, name="shop.pay_twice")
    def pay() -> None: ...

    strict.finalize()
    mild.finalize()

    assert strict.tasks["shop.pay_twice"].retry_policy.retry_for == (OSError,)
    assert mild.tasks["shop.pay_twice"].retry_policy.retry_for == (Exception,)


def policy_with(**options: Any) -> RetryPolicy:
    app = new_app()
    app.task(shared=False, base=SelfHealTask, name="shop.pay", **options)(nothing)
    policy: RetryPolicy = app.tasks["shop.pay"].retry_policy
    return policy


def test_back_off_that_is_switched_off_leaves_celerys_fixed_delay() -> None:
    policy = policy_with(retry_backoff=False, default_retry_delay=30)

    assert (policy.backoff, policy.fixed_seconds) == (None, 30)


def test_declared_fixed_delay_holds_unless_a_back_off_is_declared_beside_it() -> None:
    """Our own default of a back-off must not silence what the user has said."""
    assert policy_with(default_retry_delay=30).backoff is None
    assert policy_with(default_retry_delay=30).fixed_seconds == 30
    assert policy_with(default_retry_delay=30, retry_backoff=2).backoff == Backoff(base_seconds=2, cap_seconds=600)


def test_countdown_in_retry_kwargs_holds_unless_a_back_off_is_declared_beside_it() -> None:
    policy = policy_with(retry_kwargs={"countdown": 7})

    assert (policy.backoff, policy.fixed_seconds, policy.options) == (None, 7, {})
    assert policy_with(retry_kwargs={"countdown": 7}, retry_backoff=True).backoff is not None


@pytest.mark.parametrize(
    ("options", "max_retries"),
    [
        ({"retry_kwargs": {"max_retries": 2}}, 2),
        ({"retry_kwargs": {"max_retries": 9}}, 9),
        ({"retry_kwargs": {"max_retries": 9}, "max_retries": 4}, 9),
        ({"retry_kwargs": {"max_retries": None}, "max_retries": 4}, 4),
        ({"retry_kwargs": {}, "max_retries": 4}, 4),
        ({"retry_kwargs": None}, 5),
        ({"max_retries": None}, None),
        ({"max_retries": 0}, 0),
    ],
    ids=str,
)
def test_max_retries_of_retry_kwargs_and_of_the_task_mean_what_they_mean_in_celery(
    options: dict[str, Any], max_retries: int | None
) -> None:
    assert policy_with(**options).max_retries == max_retries


@pytest.mark.parametrize("max_retries", [2, 9])
def test_max_retries_of_retry_kwargs_is_what_is_done(max_retries: int, body: Body) -> None:
    app = new_app()
    app.task(shared=False, bind=True, base=SelfHealTask, name="shop.pay", retry_kwargs={"max_retries": max_retries})(
        body.fail
    )

    app.tasks["shop.pay"].apply()

    assert body.attempts == list(range(max_retries + 1))


def test_further_retry_kwargs_go_with_the_retries_that_are_sent_for_the_task() -> None:
    policy = policy_with(retry_kwargs={"queue": "slow", "priority": 2, "throw": False, "max_retries": 3})

    assert policy.options == {"queue": "slow", "priority": 2}


def test_max_retries_may_be_changed_on_a_living_task(body: Body) -> None:
    """As tests of users do it."""
    task = decorated(new_app(), body)

    task.max_retries = 1
    task.apply()

    assert policy_now(task).max_retries == 1
    assert body.attempts == [0, 1]


def test_retry_kwargs_outlast_a_change_of_max_retries(body: Body) -> None:
    app = new_app()
    app.task(shared=False, bind=True, base=SelfHealTask, name="shop.pay", retry_kwargs={"max_retries": 2})(body.fail)
    task = app.tasks["shop.pay"]

    task.max_retries = 7
    task.apply()

    assert body.attempts == [0, 1, 2]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"retry_backoff": 3600}, "retry_backoff", "3600"),
    ({"retry_backoff": 31, "retry_backoff_max": 30}, "retry_backoff", "31"),
    ({"retry_backoff": -1}, "retry_backoff", "-1"),
    ({"retry_backoff": math.nan}, "retry_backoff", "nan"),
    ({"retry_backoff": math.inf}, "retry_backoff", "inf"),
    ({"retry_backoff": None}, "retry_backoff", "None"),
    ({"retry_backoff_max": -1}, "retry_backoff_max", "-1"),
    ({"retry_backoff_max": math.inf}, "retry_backoff_max", "inf"),
    ({"retry_backoff_max": math.nan}, "retry_backoff_max", "nan"),
    ({"retry_backoff_min": -1}, "retry_backoff_min", "-1"),
    ({"retry_backoff_min": 601}, "retry_backoff_min", "601"),
    ({"retry_jitter": "some"}, "retry_jitter", "'some'"),
    ({"retry_max_age": 0}, "retry_max_age", "0"),
    ({"retry_max_age": math.nan}, "retry_max_age", "nan"),
    ({"default_retry_delay": -3}, "default_retry_delay", "-3"),
    ({"default_retry_delay": math.inf}, "default_retry_delay", "inf"),
    ({"max_retries": -1}, "max_retries", "-1"),
    ({"max_retries": 2.5}, "max_retries", "2.5"),
    ({"max_retries": True}, "max_retries", "True"),
    ({"autoretry_for": OSError}, "autoretry_for", "OSError"),
    ({"autoretry_for": None}, "autoretry_for", "None"),
    ({"autoretry_for": ("OSError",)}, "autoretry_for", "'OSError'"),
    ({"autoretry_for": (OSError, int)}, "autoretry_for", "int"),
    ({"dont_autoretry_for": (int,)}, "dont_autoretry_for", "int"),
    ({"retry_kwargs": [3]}, "retry_kwargs", "[3]"),
    ({"retry_kwargs": {"exc": OSError()}}, "retry_kwargs", "'exc'"),
    ({"retry_kwargs": {"countdown": -7}}, "retry_kwargs['countdown']", "-7"),
    ({"retry_kwargs": {"max_retries": -2}}, "max_retries", "-2"),
]


@pytest.mark.parametrize(("options", "option", "shown"), WRONG, ids=str)
def test_decorated_task_with_an_impossible_option_is_refused_by_name(
    options: dict[str, Any], option: str, shown: str
) -> None:
    app = new_app()
    app.task(shared=False, base=SelfHealTask, name="shop.pay", **options)(nothing)

    with pytest.raises(SettingsError) as caught:
        app.finalize()

    assert caught.value.setting == option
    assert str(caught.value).startswith("task shop.pay: ")
    assert option in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize(("options", "option", "shown"), WRONG, ids=str)
def test_task_class_with_an_impossible_option_is_refused_where_it_is_written(
    options: dict[str, Any], option: str, shown: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        type("Pay", (SelfHealTask,), {"__module__": "shop", **options})

    assert caught.value.setting == option
    assert str(caught.value).startswith("task shop.Pay: ")
    assert shown in str(caught.value)


def test_abstract_base_is_judged_by_the_tasks_that_are_made_of_it() -> None:
    class Slow(SelfHealTask):
        abstract = True
        retry_backoff = 3600

    class Report(Slow):
        name = "shop.report"
        retry_backoff_max = 86_400

    assert new_app().register_task(Report()).retry_policy.backoff.base_seconds == 3600

    with pytest.raises(SettingsError, match="retry_backoff is 3600 s"):

        class Mail(Slow):
            name = "shop.mail"


def test_plain_tasks_of_the_same_application_are_celerys_business() -> None:
    app = new_app()

    @app.task(shared=False, name="shop.plain", retry_backoff=3600, autoretry_for=(OSError,))
    def plain() -> None: ...

    app.finalize()

    assert type(app.tasks["shop.plain"]).__mro__[1] is app.Task
    assert not isinstance(app.tasks["shop.plain"], SelfHealTask)
    assert issubclass(SelfHealTask, Task)
