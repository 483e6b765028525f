"""The in-flight record: what the reaper and people know about the start that holds a lease."""

from __future__ import annotations

import json
from dataclasses import dataclass

from celery_selfheal.leases.port import Stall


def encode(task_name: str, *, node: str, pid: int, deadline_seconds: float | None) -> str:
    """The part that the client knows; the store puts instant, fence, token and session before it."""
    return json.dumps(
        {"task": task_name, "node": node, "pid": pid, "deadline": deadline_seconds},
        separators=(",", ":"),
    )


@dataclass(frozen=True, slots=True)
class InFlight:
    """A decoded record."""

    acquired_ms: int
    fence: int
    token: str
    session: str
    task_name: str
    node: str

    @classmethod
    def decode(cls, record: str) -> InFlight:
        """Take ``<ms> <fence> <token> <session> <json>`` apart."""
        acquired_ms, fence, token, session, text = record.split(" ", 4)
        about = json.loads(text)
        return cls(
            acquired_ms=int(acquired_ms),
            fence=int(fence),
            token=token,
            session=session,
            task_name=about.get("task", ""),
            node=about.get("node", ""),
        )

    def stall(self, task_id: str, *, now_ms: int, unfinished_starts: int) -> Stall:
        """The stall that this start has become."""
        return Stall(
            task_id=task_id,
            task_name=self.task_name,
            token=self.token,
            owner=self.node or self.session,
            age_seconds=max(0, now_ms - self.acquired_ms) / 1000,
            unfinished_starts=unfinished_starts,
        )
