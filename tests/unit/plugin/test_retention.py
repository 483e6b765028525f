"""How late a message can come is computed from what is declared; a shorter retention is refused."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_selfheal import SelfHealTask, install
from celery_selfheal.backoff import Backoff, Jitter, RetryPolicy
from celery_selfheal.errors import SelfHealError, SettingsError
from celery_selfheal.plugin.database import check_database
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.retention import check_retention, longest_life, redelivery_horizon


def app_with(*, broker: str = "memory://", **conf: Any) -> Celery:
    app = Celery(f"shop-{uuid.uuid4().hex[:8]}", broker=broker, set_as_current=False)
    app.conf.update({f"selfheal_{name}" if name != "broker_transport_options" else name: conf[name] for name in conf})
    install(app)
    return app


def policy(**changes: Any) -> RetryPolicy:
    known: dict[str, Any] = {"retry_for": (), "give_up_for": (), "max_retries": 3, "backoff": None, "fixed_seconds": 10}
    return RetryPolicy(**{**known, **changes})


def backoff(**changes: Any) -> Backoff:
    return Backoff(**{"base_seconds": 1, "cap_seconds": 600, **changes})


@pytest.mark.parametrize(
    ("declared", "seconds"),
    [
        (policy(), 30),
        (policy(max_retries=0), 0),
        (policy(backoff=backoff()), 1 + 2 + 4),
        (policy(backoff=backoff(cap_seconds=3)), 1 + 2 + 3),
        (policy(backoff=backoff(floor_seconds=2)), 4 + 4 + 4),  # at the floor they are spread up to its double
        (policy(backoff=backoff(jitter=Jitter.DECORRELATED)), 3 + 3 + 6),
        (policy(backoff=backoff(), max_retries=10**9), 1023 + 600 * (10**9 - 10)),
        (policy(max_retries=None), 0),
        (policy(max_retries=None, max_age=timedelta(hours=1)), 3610),
        (policy(backoff=backoff(), max_age=timedelta(seconds=5)), 7),
        (policy(backoff=backoff(), max_retries=50, max_age=timedelta(hours=1)), 3600 + 600),
    ],
)
def test_the_longest_life_of_a_message(declared: RetryPolicy, seconds: float) -> None:
    assert longest_life(declared) == timedelta(seconds=seconds)


def test_the_visibility_timeout_counts_on_redis() -> None:
    app = app_with(broker="redis://", broker_transport_options={"visibility_timeout": 90_000}, retention=80_000)

    with pytest.raises(SettingsError) as caught:
        check_retention(plugin_of(app))

    assert str(caught.value) == (
        "selfheal_retention is 80000 s, and the broker's visibility timeout can bring a message back after 90000 s,"
        " when its row would be gone and it would run again: raise it to at least 90000 s"
    )


def test_done_markers_and_takeovers_count() -> None:
    assert redelivery_horizon(plugin_of(app_with())) == ("a duplicate within selfheal_done_ttl", timedelta(hours=1))
    what, horizon = redelivery_horizon(plugin_of(app_with(takeover_after=7_200)))
    assert (what, horizon) == ("a claim within selfheal_takeover_after", timedelta(hours=2))


def test_retries_count_for_tasks_with_rows_only() -> None:
    app = app_with(retention=86_400, database_url="sqlite://")

    class Deduplicated(SelfHealTask):
        abstract = True
        dedup = "transaction"

    @app.task(name="late.plain", shared=False, base=SelfHealTask, max_retries=1_000)  # type: ignore[untyped-decorator]
    def plain() -> None: ...

    check_retention(plugin_of(app))

    @app.task(name="late.charge", shared=False, base=Deduplicated, max_retries=1_000)  # type: ignore[untyped-decorator]
    def charge() -> None: ...

    with pytest.raises(SettingsError, match=r"a retry of task late\.charge can bring a message back after"):
        check_retention(plugin_of(app))


def test_the_default_retention_is_enough_for_the_default_settings() -> None:
    check_retention(plugin_of(app_with()))


def test_an_app_without_database_is_not_checked() -> None:
    check_database(plugin_of(app_with(retention=1)))


def test_a_database_that_does_not_answer_stops_the_worker_after_one_lease() -> None:
    app = app_with(
        database_url="postgresql+psycopg2://shop:hunter2@127.0.0.1:1/shop", lease_ttl=0.3, heartbeat_interval=0.1
    )

    with pytest.raises(SelfHealError) as caught:
        check_database(plugin_of(app))

    said = str(caught.value)
    assert said.startswith("selfheal_database_url: no answer from postgresql+psycopg2://shop:***@127.0.0.1:1/shop")
    assert said.endswith("(asked for 0.3 s); start that server or correct the setting")
