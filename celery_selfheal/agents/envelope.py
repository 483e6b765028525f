"""Edits of a message in kombu's Redis envelope. The body stays as it is, byte for byte."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from typing import Any

from celery_selfheal import headers as names
from celery_selfheal.dead_letter import DEATH_HEADER, Death

RAW_CONTENT_TYPE = "application/vnd.celery-selfheal.raw"
"""Of the envelope around something that was no message; its body is what lay in the queue."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message; ``fields`` is empty where it is not an envelope that we know."""

    raw: bytes
    fields: dict[str, Any]

    @classmethod
    def decode(cls, raw: bytes) -> Envelope:
        """Read it; whatever is no JSON object with headers passes through every edit untouched."""
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("headers"), dict):
            return cls(raw, {})
        if not isinstance(fields.get("properties") or {}, dict):
            return cls(raw, {})
        return cls(raw, fields)

    @property
    def task_id(self) -> str:
        """Celery's message id; empty where there is none."""
        return str(self._headers.get("id") or "")

    @property
    def task_name(self) -> str:
        """Name of the task; empty where there is none."""
        return str(self._headers.get("task") or "")

    @property
    def restores(self) -> int:
        """How often it was restored before."""
        count = self._headers.get(names.RESTORES)
        return count if isinstance(count, int) else 0

    def restored(self, *, counted: bool, started: bool, eta: str | None = None) -> bytes:
        """The message as it goes back to its list.

        Args:
            counted: A dead worker held it, which the restore counter remembers.
            started: Its body had begun, so it was in time: a copy must not expire any more.
            eta: Not before this instant, ISO 8601; ``None`` leaves the message's own.
        """
        if not self.fields:
            return self.raw
        headers = dict(self._headers, redelivered=True)
        if counted:
            headers[names.RESTORES] = self.restores + 1
        if started:
            headers["expires"] = None
        if eta is not None:
            headers["eta"] = eta
        properties = dict(self._properties)
        if isinstance(properties.get("delivery_info"), dict):
            properties["delivery_info"] = dict(properties["delivery_info"], redelivered=True)
        return json.dumps(dict(self.fields, headers=headers, properties=properties)).encode()

    def completed(self, death: Death) -> Death:
        """What the headers tell about a message that could not be decoded."""
        replays = self._headers.get(names.REPLAYS)
        info = self._properties.get("delivery_info")
        info = info if isinstance(info, dict) else {}
        return replace(
            death,
            id=self.task_id,
            task=self.task_name,
            exchange=str(info.get("exchange") or ""),
            routing_key=str(info.get("routing_key") or death.routing_key),
            replays=replays if isinstance(replays, int) else 0,
        )

    def parked(self, *, eta: str, paid: bool, lock_waits: int | None = None) -> bytes:
        """A copy that comes back at ``eta``; it was in time, so it does not expire any more.

        Args:
            paid: It has its place in the retry budget.
            lock_waits: How often it has waited for a lock key; ``None`` leaves the count as it is.
        """
        if not self.fields:
            return self.raw
        headers = dict(self._headers, eta=eta, expires=None)
        if paid:
            headers[names.BUDGET_PAID] = True
        if lock_waits is not None:
            headers[names.LOCK_WAITS] = lock_waits
        return json.dumps(dict(self.fields, headers=headers)).encode()

    def dead_lettered(self, death: Death) -> bytes:
        """The message as it goes to the dead letter queue: its headers plus the reason."""
        if not self.fields:
            # No envelope of kombu's: wrapped into one, so that the queue can be listed and its bytes are kept.
            fields = wrapped(self.raw, queue=death.queue)
            return json.dumps(dict(fields, headers={DEATH_HEADER: death.header()})).encode()
        headers = dict(names.of_the_user(self._headers), **{DEATH_HEADER: death.header()})
        return json.dumps(dict(self.fields, headers=headers)).encode()

    @property
    def death(self) -> Death:
        """Why it was dead-lettered; empty for a message that was not."""
        return Death.from_header(self._headers.get(DEATH_HEADER))

    @property
    def priority(self) -> object:
        """Its priority as its producer gave it, whatever that is."""
        return self._properties.get("priority")

    def replayed(self) -> bytes:
        """The message as it goes back to its origin: as it first came, with one more replay counted.

        A message that was no envelope comes back as the bytes that it was.
        """
        if self.fields.get("content-type") == RAW_CONTENT_TYPE:
            return base64.b64decode(self.fields.get("body") or "")
        death = self.death
        fields = dict(self.fields, headers=names.of_a_replay(self._headers, replays=death.replays + 1))
        if self._properties and death.routing_key:
            info = self._properties.get("delivery_info")
            origin = {"exchange": death.exchange, "routing_key": death.routing_key}
            info = {**info, **origin} if isinstance(info, dict) else origin
            fields["properties"] = dict(self._properties, delivery_info=info)
        return json.dumps(fields).encode()

    @property
    def _headers(self) -> dict[str, Any]:
        headers: dict[str, Any] = self.fields.get("headers", {})
        return headers

    @property
    def _properties(self) -> dict[str, Any]:
        properties = self.fields.get("properties")
        return properties if isinstance(properties, dict) else {}


def wrapped(raw: bytes, *, queue: str) -> dict[str, Any]:
    """An envelope of kombu's around bytes that are none, without headers."""
    return {
        "body": base64.b64encode(raw).decode(),
        "content-type": RAW_CONTENT_TYPE,
        "content-encoding": "binary",
        "headers": {},
        "properties": {
            "body_encoding": "base64",
            "delivery_mode": 2,
            "delivery_tag": "",
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
        },
    }
