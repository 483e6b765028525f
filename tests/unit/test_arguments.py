"""One canonical form of a task's arguments, and the keys that are made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_selfheal.arguments import bind, check_template, key_of, payload_hash, shortened
from celery_selfheal.errors import SettingsError, UnrecoverableError

WHERE = "task shop.pay"


def pay(order: int, *, amount: int = 5, **more: Any) -> None: ...


def charge(order: int, amount: int = 5) -> None: ...


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def make_key(template: Any, *args: Any, **kwargs: Any) -> str:
    return key_of(WHERE, "idempotency_key", template, charge, args, kwargs)


@pytest.mark.parametrize(("args", "kwargs"), [((7,), {}), ((7, 5), {}), ((), {"amount": 5, "order": 7})])
def test_arguments_are_the_same_whatever_the_call_style(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert bind(charge, args, kwargs) == {"order": 7, "amount": 5}
    assert key_of(WHERE, "idempotency_key", "{order}-{amount}", charge, args, kwargs) == "7-5"
    first = payload_hash("pay", charge, (7,), {}, dumps=dumps)
    assert payload_hash("pay", charge, args, kwargs, dumps=dumps) == first is not None


def test_arguments_beyond_the_named_ones_stand_beside_them() -> None:
    assert bind(pay, (1,), {"colour": "red"}) == {"order": 1, "amount": 5, "colour": "red"}


def test_other_arguments_or_another_task_give_another_hash() -> None:
    hashes = {payload_hash(task, charge, args, {}, dumps=dumps) for task in ("a", "b") for args in ((1,), (2,))}
    assert len(hashes) == 4


def test_arguments_without_a_comparable_form_have_no_hash() -> None:
    assert payload_hash("pay", charge, (object(),), {}, dumps=dumps) is None


def test_arguments_that_the_body_does_not_take_are_no_reason_to_retry() -> None:
    with pytest.raises(UnrecoverableError, match="charge"):
        bind(charge, (1, 2, 3), {})


def test_a_callable_gets_what_the_body_gets() -> None:
    assert make_key(lambda order, amount=0: f"{order}/{amount}", 3, amount=4) == "3/4"


@pytest.mark.parametrize("given", ["", "  ", None, 7, b"key"])
def test_a_key_that_is_no_text_or_empty_is_refused(given: object) -> None:
    with pytest.raises(UnrecoverableError, match=r"task shop\.pay: idempotency_key must give a text"):
        make_key(lambda order: given, 1)


def test_a_key_that_fails_names_the_task_and_the_option() -> None:
    with pytest.raises(UnrecoverableError, match=r"task shop\.pay: idempotency_key fails .*KeyError"):
        make_key("{order[id]}", {"no": 1})


def test_a_long_key_keeps_a_readable_start_and_stays_unique() -> None:
    one, other = shortened("order:" + "x" * 200), shortened("order:" + "x" * 199)

    assert len(one) == len(other) == 128
    assert one.startswith("order:xxx")
    assert one != other
    assert shortened("k" * 128) == "k" * 128


def test_a_key_that_ends_in_a_space_is_another_one_everywhere() -> None:
    """MariaDB takes both for one."""
    assert shortened("key ").rstrip() != shortened("key")
    assert shortened("key ") != shortened("key  ")
    assert not shortened("key ").endswith(" ")


@pytest.mark.parametrize("given", ["nul\0", "half \ud800"])
def test_a_key_that_no_database_stores_is_refused(given: str) -> None:
    with pytest.raises(UnrecoverableError, match="with a character that no database stores"):
        make_key(lambda order: given, 1)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("pay:{ordr}", "names the argument 'ordr', but the task takes order, amount"),
        ("", "must be a template"),
        (7, "must be a template"),
        ("{order", "is no template"),
    ],
)
def test_a_wrong_template_is_found_when_the_task_is_defined(template: object, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        check_template(WHERE, "idempotency_key", template, charge)


@pytest.mark.parametrize("template", ["pay:{order}", "{order.id}-{amount[0]}", lambda order: "k"])
def test_a_right_template_passes(template: object) -> None:
    check_template(WHERE, "idempotency_key", template, charge)
    check_template(WHERE, "idempotency_key", "{anything}", pay)
