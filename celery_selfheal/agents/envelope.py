"""Edits of a message in kombu's Redis envelope. The body stays as it is, byte for byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

RESTORES_HEADER = "selfheal-restores"
"""How often the message was taken from a dead worker."""


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
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("headers"), dict):
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
        count = self._headers.get(RESTORES_HEADER)
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
            headers[RESTORES_HEADER] = self.restores + 1
        if started:
            headers["expires"] = None
        if eta is not None:
            headers["eta"] = eta
        properties = dict(self.fields.get("properties") or {})
        if isinstance(properties.get("delivery_info"), dict):
            properties["delivery_info"] = dict(properties["delivery_info"], redelivered=True)
        return json.dumps(dict(self.fields, headers=headers, properties=properties)).encode()

    @property
    def _headers(self) -> dict[str, Any]:
        headers: dict[str, Any] = self.fields.get("headers", {})
        return headers
