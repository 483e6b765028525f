"""What a message carries is there at every attempt and in its dead letter (field report C54)."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_selfheal import headers as names
from integration.retries.crew import Bank

ROUTES: dict[str, dict[str, Any]] = {
    "default": {},
    "queue": {"queue": "slow"},
    "priority": {"queue": "slow", "priority": 3},
    "topic": {"queue": "euros", "routing_key": "pay.eur.card"},
    "topic with priority": {"queue": "euros", "routing_key": "pay.eur.card", "priority": 6},
}


@pytest.mark.parametrize("route", ROUTES)
def test_third_attempt_and_dead_letter_carry_what_the_first_one_did(route: str, bank: Bank) -> None:
    task_id = f"travel {route}"
    expires = datetime.now(timezone.utc) + timedelta(hours=1)
    signature = bank.sign("travel", 1, "two", kwargs={"three": [3]})
    signature.stamp(tenant="acme", ticket="42")
    signature.apply_async(
        task_id=task_id,
        headers={"trace": "abc", "x-death": [{"count": 1}], "x-delivery-count": 7, "redelivered": True},
        expires=expires,
        reply_to="answers",
        link=bank.sign("tell", immutable=True),
        link_error=bank.sign("tell", immutable=True),
        shadow="travel in disguise",
        time_limit=50,
        soft_time_limit=40,
        root_id="root",
        parent_id="parent",
        **ROUTES[route],
    )

    death = bank.death(task_id)

    first, second, third = (entry.seen for entry in bank.entries("start", task_id))
    assert first == second == third
    assert first["headers"] == {"trace": "abc"}
    assert first["stamps"] == {"tenant": "acme", "ticket": "42"}
    assert sorted(first["stamped_headers"]) == ["tenant", "ticket"]
    assert datetime.fromisoformat(first["expires"]) == expires
    assert (first["reply_to"], first["correlation_id"]) == ("answers", task_id)
    assert (first["root_id"], first["parent_id"]) == ("root", "parent")
    assert (first["shadow"], first["timelimit"]) == ("travel in disguise", [50, 40])
    assert (len(first["callbacks"]), len(first["errbacks"])) == (1, 1)
    assert (first["args"], first["kwargs"]) == ([1, "two"], {"three": [3]})

    ((_, message),) = bank.dead(task_id)
    options = ROUTES[route]
    assert death.queue == options.get("queue", "celery")
    assert death.exchange == ("payments" if "routing_key" in options else "")
    assert death.routing_key == options.get("routing_key", death.queue)
    assert first["route"] == [death.exchange, death.routing_key, options.get("priority", 0)]
    assert death.priority == message["properties"]["priority"] == options.get("priority", 0)
    carried = message["headers"]
    assert {name for name in carried if name in names.OURS} == {"selfheal-death"}
    assert not {name for name in carried if name.startswith("x-") or name == "redelivered"}
    assert (carried["trace"], carried["expires"], carried["stamps"]) == (
        "abc",
        first["expires"],
        {"tenant": "acme", "ticket": "42"},
    )
    assert {name: message["properties"][name] for name in ("correlation_id", "reply_to", "delivery_mode")} == {
        "correlation_id": task_id,
        "reply_to": "answers",
        "delivery_mode": 2,
    }
    args, kwargs, embed = json.loads(base64.b64decode(message["body"]))
    assert (args, kwargs) == ([1, "two"], {"three": [3]})
    assert (len(embed["callbacks"]), len(embed["errbacks"])) == (1, 1)
    bank.redis.delete("answers")


def test_member_of_a_chord_stays_one_at_every_attempt(bank: Bank) -> None:
    from celery import chain, chord

    member = chain(bank.sign("travel").set(task_id="member"), bank.sign("tell", immutable=True))
    chord([member, bank.sign("tell")], app=bank.app)(bank.sign("total"))

    bank.death("member")

    first, second, third = (entry.seen for entry in bank.entries("start", "member"))
    assert first == second == third
    assert first["chain"]
    assert first["root_id"]
