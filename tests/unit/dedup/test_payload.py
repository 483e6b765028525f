"""A result comes back from a database as it was given, or is refused with the remedy before it is stored."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_selfheal.dedup.payload import MAX_PAYLOAD_BYTES, decode, encode
from celery_selfheal.errors import UnrecoverableError


def through_a_database(result: Any) -> Any:
    plain = encode(result, task_name="shop.pay", dumps=dumps)
    return decode(json.loads(json.dumps(plain, allow_nan=False)), loads=loads)


def refusal(result: Any) -> str:
    with pytest.raises(UnrecoverableError) as caught:
        encode(result, task_name="shop.pay", dumps=dumps)
    return str(caught.value)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


EXACT = [
    None,
    True,
    0,
    "",
    "Grüße 🧾",
    [1, [2.5, None], {"a": {"b": []}}],
    dt.datetime(2026, 12, 1, 16, 0, 1, 5, tzinfo=dt.timezone.utc),
    dt.date(2026, 12, 1),
    dt.time(16, 0),
    Decimal("12.50"),
    uuid.UUID(int=7),
    b"text",
    b"\xff\x00\xfe",
    {
        "paid": Decimal("1.10"),
        "at": dt.datetime(2026, 1, 1),  # noqa: DTZ001  # users have them
        "ids": [uuid.UUID(int=1)],
    },
    {"__selfheal_json__": "a user's own"},
    [{"__selfheal_json__": 1, "b": 2}],
    2**63 - 1,
    2**70,
    -(2**64),
    1e22,
    1e15,
    -0.0,
    1e-7,
    5e-324,
    nested(30),
    nested(31),
    nested(100),
]


@pytest.mark.parametrize("result", EXACT, ids=range(len(EXACT)))
def test_result_comes_back_as_it_was(result: Any) -> None:
    again = through_a_database(result)

    assert again == result
    assert type(again) is type(result)
    assert repr(again) == repr(result)


@pytest.mark.parametrize("result", [2**63, -(2**63), 1e16, 1e-9, -0.0, nested(31), {"a": [2**70]}], ids=range(7))
def test_what_a_json_column_would_change_is_kept_as_text(result: Any) -> None:
    """MySQL makes floats of large integers, PostgreSQL integers of large floats, MariaDB refuses 33 levels."""
    assert encode(result, task_name="t", dumps=dumps) == {"__selfheal_json__": dumps(result)}


@pytest.mark.parametrize("result", [2**63 - 1, 1e14, nested(30)], ids=range(3))
def test_what_a_json_column_keeps_stays_readable(result: Any) -> None:
    assert encode(result, task_name="t", dumps=dumps) == result


def test_people_can_read_it_in_the_database() -> None:
    assert encode({"paid": [1, 2.5, "ü"]}, task_name="t", dumps=dumps) == {"paid": [1, 2.5, "ü"]}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), inner)
        ),
    )
)
def test_any_json_comes_back_as_it_was(result: Any) -> None:
    assert through_a_database(result) == result


def test_tuple_is_a_list_as_with_a_result_backend() -> None:
    assert through_a_database((1, 2)) == [1, 2]


class Receipt:
    pass


def test_type_that_is_no_json_is_named_with_task_and_remedy() -> None:
    text = refusal({"receipt": Receipt()})

    assert "task shop.pay" in text
    assert "dict" in text
    assert "Receipt" in text
    assert "store_result=False" in text


@pytest.mark.parametrize("result", [float("nan"), [float("inf")], {"a": -float("inf")}])
def test_number_that_is_no_number_is_refused(result: Any) -> None:
    assert "no JSON" in refusal(result)


@pytest.mark.parametrize("result", ["a\0b", ["\0"], {"\0": 1}, {"a": {"b": ["x", "\0"]}}])
def test_nul_character_is_refused(result: Any) -> None:
    assert "NUL" in refusal(result)


@pytest.mark.parametrize("result", ["\ud800", {"\udfff": 1}])
def test_half_a_surrogate_pair_is_refused(result: Any) -> None:
    assert "surrogate" in refusal(result)


def test_size_is_bounded() -> None:
    largest = "x" * (MAX_PAYLOAD_BYTES - 2)
    assert through_a_database(largest) == largest

    text = refusal(largest + "x")

    assert str(MAX_PAYLOAD_BYTES + 1) in text
    assert "of type str" in text
    assert "store_result=False" in text


def test_result_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    assert "store_result=False" in refusal(loop)


def test_result_that_is_nested_without_end_is_refused() -> None:
    assert "store_result=False" in refusal(nested(100_000))


def test_text_of_a_refusal_stays_short() -> None:
    class Chatty:
        def __repr__(self) -> str:
            return "x" * 1_000_000

    assert len(refusal([Chatty()])) < 2_000


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), KeyError("no")])
def test_whatever_a_serializer_raises_is_told(error: Exception) -> None:
    def failing(_: Any) -> str:
        raise error

    with pytest.raises(UnrecoverableError, match="no"):
        encode(1, task_name="shop.pay", dumps=failing)
