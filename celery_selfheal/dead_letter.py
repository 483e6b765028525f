"""The envelope of a dead letter: why a message will not run again, and where it came from."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

DEATH_HEADER = "selfheal-death"
MAX_TEXT = 2_000  # characters of an exception's text: enough to read, too little to fill a queue
MAX_TRACE = 8_000  # characters of a traceback; its end is kept, where the cause stands


class Reason(enum.Enum):
    """Why a message was dead-lettered."""

    EXHAUSTED = "exhausted"
    UNRECOVERABLE = "unrecoverable"
    STALLED = "stalled"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    UNKNOWN_TASK = "unknown_task"
    UNDECODABLE = "undecodable"
    PAYLOAD_MISMATCH = "payload_mismatch"
    IN_DOUBT = "in_doubt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What is known about the end of a task. All of it is text and numbers: it crosses brokers as a header.

    Attributes:
        id: Celery's message id; empty where the message could not be read.
        attempts: Tries that failed on their own, the last one included.
        stalls: Starts that never ended.
        first_failure: Instant of the first failed attempt, ISO 8601, UTC.
        died_at: Instant of the last failure.
        queue: Where the message was taken from.
        replays: How often it was replayed before.
        versions: Of Celery and of us, when it died.
    """

    id: str
    task: str
    reason: str
    exception: str = ""
    text: str = ""
    trace: str = ""
    attempts: int = 0
    stalls: int = 0
    first_failure: str = ""
    died_at: str = ""
    queue: str = ""
    exchange: str = ""
    routing_key: str = ""
    priority: int = 0
    worker: str = ""
    replays: int = 0
    versions: str = ""

    def header(self) -> dict[str, Any]:
        """The value of ``selfheal-death``, size-capped."""
        return dict(asdict(self), text=self.text[:MAX_TEXT], trace=self.trace[-MAX_TRACE:])

    @classmethod
    def from_header(cls, header: object) -> Death:
        """Read it back; unknown fields of a later release are passed over, missing or strange ones are empty."""
        given: Mapping[str, Any] = header if isinstance(header, Mapping) else {}
        values: dict[str, Any] = {"id": "", "task": "", "reason": ""}
        for field in fields(cls):
            value = given.get(field.name)
            if field.type == "int":
                values[field.name] = value if isinstance(value, int) and not isinstance(value, bool) else 0
            elif value is not None:
                values[field.name] = str(value)
        return cls(**values)
