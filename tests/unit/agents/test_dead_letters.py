"""Entries of a dead letter queue: whatever lies there can be read, filtered and sent back as it came."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_selfheal import headers
from celery_selfheal.agents.dead_letters import DeadLetter, Filters, printable
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.dead_letter import DEATH_HEADER, Death

NOW = datetime(2026, 7, 1, 12, tzinfo=timezone.utc)
DEATH = Death(
    id="a1",
    task="shop.charge",
    reason="exhausted",
    exception="ConnectionError",
    attempts=6,
    died_at="2026-07-01T11:00:00+00:00",
    queue="orders",
    exchange="shop",
    routing_key="orders.new",
    priority=3,
    replays=1,
)


def a_message(body: bytes = b"[[7], {}, {}]", **more_headers: Any) -> bytes:
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {"id": "a1", "task": "shop.charge", "retries": 5, "eta": "x", "expires": "y", **more_headers},
            "properties": {
                "body_encoding": "base64",
                "priority": 3,
                "reply_to": "r1",
                "correlation_id": "a1",
                "delivery_info": {"exchange": "shop", "routing_key": "orders.new"},
                "delivery_tag": "t1",
            },
        }
    ).encode()


def dead(raw: bytes, death: Death = DEATH) -> bytes:
    return Envelope.decode(raw).dead_lettered(death)


def a_letter(**changes: Any) -> DeadLetter:
    return DeadLetter.read(dead(a_message(), replace(DEATH, **changes)))


@given(body=st.binary())
def test_a_body_comes_through_death_and_replay_byte_for_byte(body: bytes) -> None:
    raw = a_message(body)

    letter = DeadLetter.read(dead(raw))
    back = json.loads(Envelope.decode(dead(raw)).replayed())

    assert letter.body == body
    assert back["body"] == json.loads(raw)["body"]


@given(raw=st.binary())
def test_what_is_no_message_comes_back_as_the_bytes_that_it_was(raw: bytes) -> None:
    nameless = Death(id="", task="", reason="undecodable", queue="orders")

    entry = dead(raw, nameless)

    assert DeadLetter.read(entry).body == raw
    assert Envelope.decode(entry).replayed() == raw


@given(raw=st.binary())
def test_whatever_lies_in_the_queue_can_be_read(raw: bytes) -> None:
    letter = DeadLetter.read(raw)

    assert letter.id.startswith("raw:")
    assert not letter.has_origin
    json.dumps(letter.about())


@pytest.mark.parametrize(
    "raw",
    [
        *(b"{}", b"[" * 100_000, b'{"headers": {}, "body": 7, "properties": null}'),
        b'{"headers": {"id": [1], "retries": "many"}, "body": [1], "properties": "none"}',
        b'{"headers": {}, "properties": {"delivery_info": 7, "priority": "high"}}',
    ],
)
def test_a_strange_envelope_can_be_read_and_sent_back(raw: bytes) -> None:
    entry = dead(raw)

    assert isinstance(DeadLetter.read(entry).body, bytes)
    assert Envelope.decode(entry).replayed()
    assert Envelope.decode(raw).restored(counted=True, started=True)


def test_a_user_s_own_binary_message_is_not_taken_for_one_of_our_wrappings() -> None:
    raw = json.loads(a_message(b"\x00binary"))
    raw["content-type"] = "application/octet-stream"
    del raw["headers"]["task"]

    back = json.loads(Envelope.decode(dead(json.dumps(raw).encode())).replayed())

    assert back["content-type"] == "application/octet-stream"
    assert base64.b64decode(back["body"]) == b"\x00binary"


def test_a_replay_begins_anew_and_is_counted() -> None:
    raw = a_message(customer="7", **{headers.FIRST_PUBLISHED: "then", headers.PREDECESSOR: "token", "x-death": []})

    back = json.loads(Envelope.decode(dead(raw)).replayed())

    assert back["headers"] == {
        "id": "a1",
        "task": "shop.charge",
        "retries": 0,
        "eta": None,
        "expires": None,
        "customer": "7",
        headers.REPLAYS: 2,
    }
    assert back["properties"] == json.loads(raw)["properties"]


def test_a_message_that_kombu_sent_to_the_queue_goes_back_with_the_routing_of_its_origin() -> None:
    raw = json.loads(a_message(**{DEATH_HEADER: DEATH.header()}))
    raw["properties"]["delivery_info"] = {"exchange": "", "routing_key": "shop.dlq"}

    back = json.loads(Envelope.decode(json.dumps(raw).encode()).replayed())

    assert back["properties"]["delivery_info"] == {"exchange": "shop", "routing_key": "orders.new"}


def test_a_message_that_could_not_be_decoded_tells_by_its_headers_who_it_is() -> None:
    nameless = Death(id="", task="", reason="undecodable", queue="orders", routing_key="orders")

    known = Envelope.decode(a_message(**{headers.REPLAYS: 2})).completed(nameless)

    assert (known.id, known.task, known.replays) == ("a1", "shop.charge", 2)
    assert (known.exchange, known.routing_key) == ("shop", "orders.new")


@pytest.mark.parametrize(
    ("filters", "matches"),
    [
        (Filters(), True),
        (Filters(ids=frozenset({"a1", "b2"})), True),
        (Filters(ids=frozenset({"b2"})), False),
        (Filters(task="shop.*"), True),
        (Filters(task="shop.Charge"), False),
        (Filters(reason="exhausted"), True),
        (Filters(reason="stalled"), False),
        (Filters(exception="Connection*"), True),
        (Filters(exception="ValueError"), False),
        (Filters(older_than=timedelta(minutes=59)), True),
        (Filters(older_than=timedelta(minutes=61)), False),
        (Filters(newer_than=timedelta(minutes=61)), True),
        (Filters(newer_than=timedelta(minutes=59)), False),
        (Filters(task="shop.*", reason="stalled"), False),
    ],
)
def test_a_filter_means_what_meets_all_its_conditions(filters: Filters, matches: bool) -> None:
    assert filters.match(a_letter(), now=NOW) is matches


@pytest.mark.parametrize("died_at", ["", "yesterday", "2026-07-01T11:00:00"])
def test_a_death_without_a_readable_instant_has_no_age(died_at: str) -> None:
    letter = a_letter(died_at=died_at)

    assert Filters().match(letter, now=NOW)
    assert not Filters(older_than=timedelta(0)).match(letter, now=NOW)
    assert not Filters(newer_than=timedelta(days=9999)).match(letter, now=NOW)


@given(text=st.text())
def test_nothing_that_is_printed_can_move_the_cursor_or_forge_a_line(text: str) -> None:
    assert printable(text).isprintable()


def test_what_is_printed_stays_readable() -> None:
    assert printable("Grüße [red]\x1b[31m\n") == "Grüße [red]\\x1b[31m\\n"
