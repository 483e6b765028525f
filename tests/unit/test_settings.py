"""A wrong setting stops the worker, by the name that the user wrote."""

from __future__ import annotations

import dataclasses
import math
import types
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

import celery_selfheal.settings as settings_module
from celery_selfheal.errors import SettingsError
from celery_selfheal.settings import PREFIX, SelfHealSettings


def read(namespace: str | None = None, /, **conf: object) -> SelfHealSettings:
    return SelfHealSettings.from_conf(conf, namespace=namespace)


def refusal(namespace: str | None = None, /, **conf: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        read(namespace, **conf)
    return caught.value


NAMES = [one.name for one in dataclasses.fields(SelfHealSettings)]
DURATIONS = [
    "lease_ttl",
    "heartbeat_interval",
    "reaper_interval",
    "max_runtime",
    "loss_grace",
    "shutdown_grace",
    "done_ttl",
    "takeover_after",
    "retention",
    "idempotency_ttl",
]
ZERO_HAS_A_MEANING = ["loss_grace", "shutdown_grace"]
NONE_HAS_A_MEANING = ["max_runtime", "shutdown_grace", "done_ttl"]


def test_defaults_are_the_documented_ones() -> None:
    settings = SelfHealSettings()

    assert dataclasses.asdict(settings) == {
        "redis_url": None,
        "key_prefix": "selfheal",
        "lease_backend": "redis",
        "lease_ttl": timedelta(seconds=10),
        "heartbeat_interval": timedelta(seconds=3),
        "reaper_interval": timedelta(seconds=2),
        "max_stalls": 2,
        "max_runtime": None,
        "loss_grace": timedelta(seconds=2),
        "shutdown_grace": timedelta(seconds=25),
        "done_ttl": None,
        "on_store_outage": "continue",
        "autoretry_for": (Exception,),
        "unrecoverable": (),
        "retry_budget": "20% + 10/s",
        "dlq": None,
        "max_replays": 3,
        "database_url": None,
        "engine": None,
        "sessionmaker": None,
        "takeover_after": timedelta(seconds=600),
        "retention": timedelta(seconds=604800),
        "idempotency_ttl": timedelta(seconds=86400),
        "outbox": False,
        "redis_reliable_fetch": True,
        "allow": (),
    }
    assert read() == settings


class TestSpelling:
    @pytest.mark.parametrize(
        ("namespace", "conf"),
        [
            (None, {"selfheal_lease_ttl": 30}),
            (None, {"SELFHEAL_LEASE_TTL": 30}),
            ("CELERY", {"CELERY_SELFHEAL_LEASE_TTL": 30}),
            ("celery", {"CELERY_SELFHEAL_LEASE_TTL": 30}),
            ("CELERY_", {"CELERY_SELFHEAL_LEASE_TTL": 30}),
            ("CELERY", {"SELFHEAL_LEASE_TTL": 30}),
            (None, {"selfheal": {"lease_ttl": 30}}),
            (None, {"selfheal": {"selfheal_lease_ttl": 30}}),
            ("CELERY", {"CELERY_SELFHEAL": {"LEASE_TTL": 30}}),
        ],
    )
    def test_each_one_is_read(self, namespace: str | None, conf: dict[str, object]) -> None:
        assert read(namespace, **conf).lease_ttl == timedelta(seconds=30)

    def test_keys_of_others_are_left_alone(self) -> None:
        conf = {"broker_url": "redis://", "task_acks_late": True, "selfhealing": "x", "my_selfheal_lease_ttl": "x"}

        assert read("CELERY", **conf) == SelfHealSettings()

    def test_the_same_value_twice_is_accepted(self) -> None:
        conf = {"selfheal_lease_ttl": 30, "CELERY_SELFHEAL_LEASE_TTL": timedelta(seconds=30)}

        assert read("CELERY", **conf).lease_ttl == timedelta(seconds=30)

    def test_two_values_for_one_setting_are_refused(self) -> None:
        error = refusal("CELERY", selfheal_lease_ttl=30, CELERY_SELFHEAL={"lease_ttl": 40})

        assert str(error) == (
            "selfheal_lease_ttl and CELERY_SELFHEAL['lease_ttl'] are the same setting with different values: keep one"
        )

    @pytest.mark.parametrize(
        ("namespace", "conf", "text"),
        [
            (
                None,
                {"selfheal_leese_ttl": 30},
                "unknown setting selfheal_leese_ttl, did you mean selfheal_lease_ttl?",
            ),
            (
                "CELERY",
                {"CELERY_SELFHEAL_LEESE_TTL": 30},
                "unknown setting CELERY_SELFHEAL_LEESE_TTL, did you mean CELERY_SELFHEAL_LEASE_TTL?",
            ),
            (
                None,
                {"selfheal": {"leese_ttl": 30}},
                "unknown setting selfheal['leese_ttl'], did you mean selfheal['lease_ttl']?",
            ),
            (
                None,
                {"selfheal_xyzzy": 30},
                (
                    "unknown setting selfheal_xyzzy: the settings are listed in the README"
                    " and at celery_selfheal.settings.SelfHealSettings"
                ),
            ),
            (None, {"selfheal": 30}, "selfheal must be a dictionary of settings, got 30"),
            (
                None,
                {"CELERY_SELFHEAL_LEASE_TTL": 30},
                (
                    "CELERY_SELFHEAL_LEASE_TTL is not read, since this app has no namespace:"
                    " write selfheal_lease_ttl, or give namespace='CELERY' to config_from_object"
                ),
            ),
        ],
    )
    def test_what_nobody_would_read_is_refused(self, namespace: str | None, conf: dict[str, object], text: str) -> None:
        error = refusal(namespace, **conf)

        assert str(error) == text
        assert error.setting in {*conf, "selfheal['leese_ttl']"}

    def test_our_own_names_imported_by_a_config_module_are_no_settings(self) -> None:
        def selfheal_schedule() -> None:
            """Stands for the public function of that name."""

        selfheal_schedule.__module__ = "celery_selfheal.plugin.install"
        conf: dict[str, object] = {
            "celery_selfheal": settings_module,
            "selfheal_schedule": selfheal_schedule,
            "selfheal_settings": settings_module,
        }

        assert read("celery", **conf) == SelfHealSettings()

    def test_a_mistyped_setting_that_can_be_called_is_still_refused(self) -> None:
        class Maker:
            def __call__(self) -> None: ...

        assert "did you mean selfheal_sessionmaker?" in str(refusal(selfheal_sesionmaker=Maker()))

    def test_a_value_made_of_our_own_classes_is_no_excuse_for_a_wrong_name(self) -> None:
        assert "unknown setting selfheal_settings" in str(refusal(selfheal_settings=SelfHealSettings()))


class TestCelery:
    """Against what ``app.conf`` of the installed Celery lists, which is its own matter."""

    def test_keyword_arguments_and_updates_of_an_app(self) -> None:
        app = Celery("shop", selfheal_lease_ttl=30, set_as_current=False)
        app.conf.update(selfheal_max_stalls=5)
        app.conf.selfheal_dlq = "dead"

        settings = SelfHealSettings.from_conf(app.conf, namespace=app.namespace)

        assert (settings.lease_ttl, settings.max_stalls, settings.dlq) == (timedelta(seconds=30), 5, "dead")

    def test_a_module_with_a_namespace_as_django_has_it(self) -> None:
        module = types.ModuleType("project_settings")
        module.CELERY_SELFHEAL_LEASE_TTL = 30  # type: ignore[attr-defined]
        module.CELERY_SELFHEAL = {"max_stalls": 5}  # type: ignore[attr-defined]
        module.celery_selfheal = settings_module  # type: ignore[attr-defined]
        app = Celery("shop", set_as_current=False)
        app.config_from_object(module, namespace="CELERY")

        settings = SelfHealSettings.from_conf(app.conf, namespace=app.namespace)

        assert (settings.lease_ttl, settings.max_stalls) == (timedelta(seconds=30), 5)

    def test_a_mistyped_key_in_such_a_module_is_refused(self) -> None:
        module = types.ModuleType("project_settings")
        module.CELERY_SELFHEAL_LEESE_TTL = 30  # type: ignore[attr-defined]
        app = Celery("shop", set_as_current=False)
        app.config_from_object(module, namespace="CELERY")

        with pytest.raises(SettingsError, match="did you mean CELERY_SELFHEAL_LEASE_TTL"):
            SelfHealSettings.from_conf(app.conf, namespace=app.namespace)


class TestDurations:
    def test_all_of_them_are_tested_here(self) -> None:
        values = {
            name: getattr(SelfHealSettings(max_runtime=timedelta(1), done_ttl=timedelta(1)), name) for name in NAMES
        }

        assert [name for name, value in values.items() if isinstance(value, timedelta)] == DURATIONS

    @pytest.mark.parametrize("name", DURATIONS)
    def test_a_number_is_seconds_and_a_timedelta_is_itself(self, name: str) -> None:
        wide: dict[str, object] = {"selfheal_lease_ttl": 90} if name == "heartbeat_interval" else {}

        for value in (30, 30.0, timedelta(seconds=30)):
            assert getattr(read(**{**wide, PREFIX + name: value}), name) == timedelta(seconds=30)

    @pytest.mark.parametrize("name", DURATIONS)
    @pytest.mark.parametrize("value", ["10", "10s", b"10", True, False, [10], {}], ids=repr)
    def test_anything_else_is_refused_with_what_it_may_be(self, name: str, value: object) -> None:
        text = str(refusal(**{PREFIX + name: value}))

        assert text.startswith(f"selfheal_{name} must be a number of seconds or a timedelta")
        assert text.endswith(f", got {value!r}")

    @pytest.mark.parametrize("name", DURATIONS)
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 10**400])
    def test_what_is_no_finite_time_is_refused(self, name: str, value: float) -> None:
        assert "a finite number of seconds" in str(refusal(**{PREFIX + name: value}))

    @pytest.mark.parametrize("name", DURATIONS)
    @pytest.mark.parametrize("value", [-1, -0.001, timedelta(seconds=-1)])
    def test_negative_time_is_refused(self, name: str, value: object) -> None:
        assert f"selfheal_{name} must be at least" in str(refusal(**{PREFIX + name: value}))

    @pytest.mark.parametrize("name", DURATIONS)
    @pytest.mark.parametrize("value", [0, 0.0, timedelta(0), 1e-9], ids=repr)
    def test_zero_is_accepted_only_where_it_means_something(self, name: str, value: object) -> None:
        if name in ZERO_HAS_A_MEANING:
            assert getattr(read(**{PREFIX + name: value}), name) == timedelta(0)
        else:
            assert f"selfheal_{name} must be at least 0.001 seconds" in str(refusal(**{PREFIX + name: value}))

    @pytest.mark.parametrize("name", DURATIONS)
    def test_none_is_accepted_only_where_it_means_something(self, name: str) -> None:
        if name in NONE_HAS_A_MEANING:
            assert getattr(read(**{PREFIX + name: None}), name) is None
        else:
            assert str(refusal(**{PREFIX + name: None})) == (
                f"selfheal_{name} must be a number of seconds or a timedelta, got None"
            )

    def test_the_refusal_of_an_optional_one_says_what_none_means(self) -> None:
        assert str(refusal(selfheal_shutdown_grace="x")) == (
            "selfheal_shutdown_grace must be a number of seconds or a timedelta (or None: wait for ever), got 'x'"
        )


class TestRelations:
    def test_a_heartbeat_above_a_third_of_the_ttl_is_refused_as_the_user_wrote_it(self) -> None:
        error = refusal("CELERY", CELERY_SELFHEAL_LEASE_TTL=5)

        assert str(error) == (
            "selfheal_heartbeat_interval must be at most a third of CELERY_SELFHEAL_LEASE_TTL (5 seconds), got 3:"
            " lower it to 1.666 or raise CELERY_SELFHEAL_LEASE_TTL to 9"
        )

    @given(st.floats(min_value=0.01, max_value=1e6))
    def test_exactly_a_third_is_accepted_whatever_the_rounding(self, ttl: float) -> None:
        settings = read(selfheal_lease_ttl=ttl, selfheal_heartbeat_interval=ttl / 3)

        assert abs(settings.heartbeat_interval * 3 - settings.lease_ttl) <= timedelta(microseconds=3)

    @given(st.floats(min_value=0.01, max_value=1e6))
    def test_more_than_a_third_is_refused(self, ttl: float) -> None:
        too_long = timedelta(seconds=ttl) / 3 + timedelta(microseconds=1)

        assert "at most a third" in str(refusal(selfheal_lease_ttl=ttl, selfheal_heartbeat_interval=too_long))

    @given(st.floats(min_value=0.01, max_value=1e6))
    def test_the_remedies_that_the_refusal_names_are_accepted(self, ttl: float) -> None:
        interval = 3 * ttl
        text = str(refusal(selfheal_lease_ttl=ttl, selfheal_heartbeat_interval=interval))
        lower = float(text.partition("lower it to ")[2].partition(" ")[0])
        higher = float(text.rpartition(" to ")[2])

        read(selfheal_lease_ttl=ttl, selfheal_heartbeat_interval=lower)
        read(selfheal_lease_ttl=higher, selfheal_heartbeat_interval=interval)

    @pytest.mark.parametrize("conf", [{"selfheal_lease_backend": "postgres"}, {"selfheal_outbox": True}])
    @pytest.mark.parametrize("given_as", ["database_url", "engine", "sessionmaker"])
    def test_what_needs_a_database_asks_for_one(self, conf: dict[str, object], given_as: str) -> None:
        assert "needs a database: set selfheal_database_url" in str(refusal(**conf))

        read(**conf, **{PREFIX + given_as: "sqlite:///shop.db" if given_as == "database_url" else "shop.database:it"})


class TestOtherRules:
    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("max_stalls", [-1, 1.0, "2", True, None]),
            ("max_replays", [-1, 1.0, "2", True, None]),
            ("key_prefix", ["", " ", "a b", "a\tb", "a\n", "{a}", "a}", "\x00", "a\u00a0b", None, b"a"]),
            ("lease_backend", ["mysql", "Redis", None, []]),
            ("on_store_outage", ["stop", None, True]),
            (
                "autoretry_for",
                [OSError, "shop.Error", (OSError()), (1,), ("Error",), ("a b.c",), (".a",), None, {OSError}],
            ),
            ("unrecoverable", [OSError, "shop.Error", (int,), ("",)]),
            ("retry_budget", ["", "  ", 20, b"x"]),
            ("dlq", ["", 7]),
            ("outbox", ["false", 0, 1, None]),
            ("redis_reliable_fetch", ["false", 0, 1, None]),
            ("allow", ["clock", (1,), None]),
            ("redis_url", ["", "localhost", 7, b"redis://"]),
            ("database_url", ["", "shop.db", 7]),
        ],
    )
    def test_a_value_against_the_rule_is_refused_by_name(self, name: str, values: list[object]) -> None:
        for value in values:
            error = refusal("CELERY", **{f"CELERY_SELFHEAL_{name.upper()}": value})

            assert str(error).startswith(f"CELERY_SELFHEAL_{name.upper()} must be ")
            assert error.setting == f"CELERY_SELFHEAL_{name.upper()}"

    @pytest.mark.parametrize(
        ("name", "given_value", "kept"),
        [
            ("max_stalls", 0, 0),
            ("max_replays", 0, 0),
            ("key_prefix", "acme:heal", "acme:heal"),
            ("lease_backend", "redis", "redis"),
            ("on_store_outage", "interrupt", "interrupt"),
            ("autoretry_for", [OSError, "shop.errors.Busy"], (OSError, "shop.errors.Busy")),
            ("autoretry_for", (), ()),
            ("unrecoverable", (KeyError,), (KeyError,)),
            ("retry_budget", None, None),
            ("dlq", "dead", "dead"),
            ("redis_reliable_fetch", False, False),
            ("allow", ["clock", "eviction"], ("clock", "eviction")),
            ("redis_url", "rediss://cache/1", "rediss://cache/1"),
            ("database_url", "sqlite:///shop.db", "sqlite:///shop.db"),
        ],
    )
    def test_a_value_within_the_rule_is_kept(self, name: str, given_value: object, kept: object) -> None:
        assert getattr(read(**{PREFIX + name: given_value}), name) == kept

    def test_a_lone_class_is_refused_with_the_comma_that_is_missing(self) -> None:
        assert "as in (OSError,): mind the comma" in str(refusal(selfheal_autoretry_for=OSError))


@pytest.mark.parametrize("name", ["redis_url", "database_url"])
def test_no_password_is_shown(name: str) -> None:
    secret: dict[str, Any] = {name: f"redis://:hunter2@localhost/{name}"}

    assert "hunter2" not in repr(SelfHealSettings(**secret))
    assert "hunter2" not in str(refusal(**{PREFIX + name: "hunter2"}))
    assert "hunter2" not in str(refusal(**{PREFIX + name: b"redis://:hunter2@localhost"}))


def test_the_constructor_keeps_the_same_rules() -> None:
    with pytest.raises(SettingsError, match="selfheal_heartbeat_interval must be at most a third"):
        SelfHealSettings(lease_ttl=timedelta(seconds=5))
    with pytest.raises(SettingsError, match="selfheal_max_stalls must be a whole number"):
        dataclasses.replace(SelfHealSettings(), max_stalls=-1)


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SelfHealSettings().max_stalls = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("done_ttl", "visibility_timeout", "expected"),
    [(None, 3600, 3600), (None, 60, 3600), (None, 43200, 43200), (120, 43200, 120)],
)
def test_done_markers_outlive_the_visibility_timeout_unless_told_otherwise(
    done_ttl: int | None, visibility_timeout: int, expected: int
) -> None:
    settings = read(selfheal_done_ttl=done_ttl)

    assert settings.done_ttl_for(timedelta(seconds=visibility_timeout)) == timedelta(seconds=expected)


def test_every_setting_describes_itself() -> None:
    described = {name: (default, comment) for name, default, comment in SelfHealSettings.describe()}

    assert list(described) == [PREFIX + name for name in NAMES]
    assert all(comment.endswith(".") for _, comment in described.values())
    assert described["selfheal_lease_ttl"][0] == "10"
    assert described["selfheal_autoretry_for"][0] == "(Exception,)"
    assert described["selfheal_redis_url"][0] == "None"


def test_a_described_default_can_be_written_into_a_configuration() -> None:
    conf = {name: eval(default) for name, default, _ in SelfHealSettings.describe()}

    assert read(**conf) == SelfHealSettings()
