"""Who has an idempotency key, as a row or a Redis key says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """One start: task id and token of its lease. As text ``<task id> <token>``; equal texts are the same start.

    Attributes:
        task_id: May have any form, also with spaces: users choose it.
        token: Has no space.
    """

    task_id: str
    token: str

    def __str__(self) -> str:
        return f"{self.task_id} {self.token}"

    @classmethod
    def parse(cls, text: str | None) -> Owner:
        """Read the text; both parts are empty where nobody was named, as in a row that another program wrote."""
        task_id, _, token = (text or "").rpartition(" ")
        return cls(task_id, token) if task_id else cls("", "")
