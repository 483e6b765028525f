"""Errors cross processes and result backends without losing what they say."""

from __future__ import annotations

import inspect
import json
import pickle

import pytest

from celery_selfheal import errors

ONE_OF_EACH = [
    errors.SelfHealError("anything"),
    errors.SettingsError("selfheal_lease_ttl must be a number", "selfheal_lease_ttl"),
    errors.SettingsError("selfheal_lease_ttl must be a number"),
    errors.StoreError("redis://:***@localhost:6379/0", "acquire: timed out"),
    errors.LeaseBusy("stock:7", "w1@host", 4.25),
    errors.StalledTooOften("shop.pay", "id-1", 3, 2),
    errors.DeadlineExceeded("shop.pay", "id-1", 45.0),
    errors.UnrecoverableError("no such customer"),
    errors.PayloadMismatch("shop.pay", "payment:7"),
    errors.InDoubt("shop.pay", "payment:7"),
    errors.LeaseLost("id-1", 12),
]
every_error = pytest.mark.parametrize("error", ONE_OF_EACH, ids=repr)


def _classes() -> set[type]:
    return {one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, BaseException)}


def test_every_error_is_among_those_tested_here() -> None:
    assert {type(error) for error in ONE_OF_EACH} == _classes()


@every_error
def test_error_survives_the_way_out_of_a_pool_child(error: BaseException) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert str(again) == str(error)


@every_error
def test_error_survives_a_result_backend_that_speaks_json(error: BaseException) -> None:
    again = type(error)(*json.loads(json.dumps(error.args)))

    assert vars(again) == vars(error)
    assert str(again) == str(error)


@every_error
def test_text_holds_every_value_that_a_reader_needs(error: BaseException) -> None:
    shown = str(error)

    assert shown
    assert not shown.startswith("(")  # what Exception makes of several arguments
    for text in (value for value in vars(error).values() if isinstance(value, str) and value):
        assert text in shown


def test_attributes_have_the_agreed_names() -> None:
    names = {type(error).__name__: set(vars(error)) for error in ONE_OF_EACH}

    assert names == {
        "SelfHealError": set(),
        "SettingsError": {"message", "setting"},
        "StoreError": {"store_url", "what"},
        "LeaseBusy": {"key", "holder", "remaining_seconds"},
        "StalledTooOften": {"task_name", "task_id", "starts", "max_stalls"},
        "DeadlineExceeded": {"task_name", "task_id", "max_runtime_seconds"},
        "UnrecoverableError": set(),
        "PayloadMismatch": {"task_name", "idempotency_key"},
        "InDoubt": {"task_name", "idempotency_key"},
        "LeaseLost": {"task_id", "fence"},
    }


def test_one_root_for_all_but_the_order_to_stop() -> None:
    below_root = {one for one in _classes() if issubclass(one, errors.SelfHealError)}

    assert _classes() - below_root == {errors.LeaseLost}


def test_a_task_body_that_catches_exception_does_not_swallow_a_lost_lease() -> None:
    assert not issubclass(errors.LeaseLost, Exception)


def test_texts_read_well() -> None:
    assert str(errors.StalledTooOften("shop.pay", "id-1", 3, 2)) == (
        "task shop.pay[id-1] was started 3 times and never ended (max_stalls is 2)"
    )
    assert str(errors.LeaseBusy("stock:7", "w1@host", 4.25)) == "lease stock:7 is held by w1@host for another 4.2 s"
    assert str(errors.DeadlineExceeded("shop.pay", "id-1", 45.0)) == "task shop.pay[id-1] ran longer than its 45 s"
    assert str(errors.LeaseLost("id-1", 12)) == "lease on task id-1 (fence 12) is lost"
