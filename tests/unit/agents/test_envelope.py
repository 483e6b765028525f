"""Edits of a raw message: headers change, the body does not, and what is no message passes through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_selfheal import headers as names
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.dead_letter import DEATH_HEADER, Death

BODY = "eyJhIjogIlx1MDBlNCJ9IHNwYWNlcyAgIGFuZCDwn5iAIA=="
ETA = "2026-01-01T00:00:00+00:00"
DEATH = Death(id="t1", task="shop.pay", reason="stalled", queue="q", replays=1)


def message(*, properties: Any = None, **headers: Any) -> bytes:
    return json.dumps(
        {
            "body": BODY,
            "content-type": "application/json",
            "headers": {"id": "t1", "task": "shop.pay", "expires": "2026-01-02", "eta": None, **headers},
            "properties": properties or {"priority": 3, "delivery_info": {"routing_key": "q"}, "delivery_tag": "x"},
        }
    ).encode()


NO_MESSAGES = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{",
    "cut short": b'{"headers": {"id": "t1"}, "bo',
    "a list": b"[1]",
    "a number": b"7",
    "a string": b'"x"',
    "null": b"null",
    "without headers": b'{"body": ""}',
    "with strange headers": b'{"headers": [1]}',
    "without end": b"[" * 100_000,
    "with a number without end": b'{"headers": {}, "n": ' + b"9" * 10_000 + b"}",
}
no_messages = pytest.mark.parametrize("raw", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())


@no_messages
def test_what_is_no_message_passes_through_every_edit(raw: bytes) -> None:
    envelope = Envelope.decode(raw)

    assert envelope.restored(counted=True, started=True, eta=ETA) == raw
    assert envelope.parked(eta=ETA, paid=True) == raw
    assert (envelope.task_id, envelope.task_name, envelope.restores) == ("", "", 0)


@no_messages
def test_what_is_no_message_comes_back_from_the_dead_letters_as_it_was(raw: bytes) -> None:
    dead = Envelope.decode(Envelope.decode(raw).dead_lettered(DEATH))

    assert dead.death == DEATH
    assert dead.replayed() == raw


@pytest.mark.parametrize("strange", [[1], "text", 7, [["a", "b"]]], ids=repr)
def test_message_with_strange_properties_comes_back_all_the_same(strange: Any) -> None:
    """It would keep every other message of a dead worker from coming back."""
    raw = message(properties=strange)

    restored = Envelope.decode(raw).restored(counted=True, started=True)

    assert json.loads(restored)["body"] == BODY
    assert json.loads(restored)["properties"] == strange


@pytest.mark.parametrize(
    "edit",
    [
        lambda envelope: envelope.restored(counted=True, started=True),
        lambda envelope: envelope.parked(eta=ETA, paid=True),
        lambda envelope: envelope.dead_lettered(DEATH),
        lambda envelope: Envelope.decode(envelope.dead_lettered(DEATH)).replayed(),
    ],
    ids=["restored", "parked", "dead-lettered", "replayed"],
)
def test_no_edit_touches_body_or_the_headers_of_the_user(edit: Any) -> None:
    before = json.loads(message(**{"x-tenant": "ä", "stamps": {"a": [1]}, "chord": {"task": "x"}}))

    after = json.loads(edit(Envelope.decode(json.dumps(before).encode())))

    assert after["body"] == before["body"]
    assert after["content-type"] == before["content-type"]
    for name in ("id", "task", "x-tenant", "stamps", "chord"):
        assert after["headers"][name] == before["headers"][name]
    assert after["properties"]["priority"] == 3


@pytest.mark.parametrize(("counted", "expected"), [(True, [1, 2, 3]), (False, [0, 0, 0])])
def test_restores_by_dead_workers_are_counted_and_hand_overs_are_not(counted: bool, expected: list[int]) -> None:
    raw, counts = message(), []
    for _ in range(3):
        raw = Envelope.decode(raw).restored(counted=counted, started=False)
        counts.append(Envelope.decode(raw).restores)

    assert counts == expected


@pytest.mark.parametrize("strange", ["x", None, [1], {}])
def test_strange_restore_count_is_none(strange: Any) -> None:
    envelope = Envelope.decode(message(**{names.RESTORES: strange}))

    assert envelope.restores == 0
    assert Envelope.decode(envelope.restored(counted=True, started=False)).restores == 1


def test_restored_message_says_that_it_is_redelivered() -> None:
    fields = json.loads(Envelope.decode(message()).restored(counted=True, started=False))

    assert fields["headers"]["redelivered"] is True
    assert fields["properties"]["delivery_info"] == {"routing_key": "q", "redelivered": True}


def test_restored_message_keeps_expiry_and_eta_unless_it_is_told_otherwise() -> None:
    raw = message(eta=ETA)

    untouched = json.loads(Envelope.decode(raw).restored(counted=True, started=False))["headers"]
    begun = json.loads(Envelope.decode(raw).restored(counted=False, started=True, eta="later"))["headers"]

    assert (untouched["expires"], untouched["eta"]) == ("2026-01-02", ETA)
    assert (begun["expires"], begun["eta"]) == (None, "later")


def test_parked_copy_comes_back_in_time_and_does_not_expire() -> None:
    headers = json.loads(Envelope.decode(message()).parked(eta=ETA, paid=False))["headers"]

    assert (headers["eta"], headers["expires"]) == (ETA, None)
    assert names.BUDGET_PAID not in headers


def test_parked_copy_keeps_its_place_in_the_budget_and_its_marker() -> None:
    kept = {names.PUBLISHED: "then", names.PREDECESSOR: "token", names.REPLAYS: 2, "retries": 4}

    first = Envelope.decode(message(**kept)).parked(eta=ETA, paid=True)
    again = json.loads(Envelope.decode(first).parked(eta="later", paid=False))["headers"]

    assert again[names.BUDGET_PAID] is True
    assert {name: again[name] for name in kept} == kept


def test_dead_letter_says_why_and_carries_none_of_our_headers() -> None:
    ours = dict.fromkeys(names.OURS, "x") | {"x-death": [1], "x-delivery-count": 3, "redelivered": True}
    envelope = Envelope.decode(Envelope.decode(message(**ours)).dead_lettered(DEATH))

    assert envelope.death == DEATH
    assert not (set(ours) - {DEATH_HEADER}) & set(envelope.fields["headers"])


def test_message_that_was_never_dead_has_an_empty_death() -> None:
    assert Envelope.decode(message()).death == Death(id="", task="", reason="")


def test_replayed_message_begins_anew_with_one_replay_more() -> None:
    dead = Envelope.decode(message(retries=5, eta=ETA)).dead_lettered(DEATH)

    headers = json.loads(Envelope.decode(dead).replayed())["headers"]

    assert (headers["retries"], headers["eta"], headers[names.REPLAYS]) == (0, None, 2)
    assert DEATH_HEADER not in headers
