"""Carries what bodies say of their progress from this worker's memory to the store, with the heartbeat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from celery_selfheal.errors import StoreError
from celery_selfheal.leases.progress import Progress, RedisProgress
from celery_selfheal.plugin.local_bodies import local
from celery_selfheal.plugin.slots import Slots


class ProgressKeeper:
    """Main's side: saves what has changed since the last time. Used by the agents' thread alone."""

    def __init__(self, slots: Slots, store: RedisProgress | None) -> None:
        self._slots = slots
        self._store = store
        self._saved: dict[str, int] = {}

    def save(self, requests: Iterable[Any]) -> None:
        """Save what these requests' bodies have said.

        Raises:
            StoreError: no answer; the next call saves it.
        """
        said: list[Progress] = []
        versions: dict[str, int] = {}
        for request in requests:
            start = request.start
            found = self._said_by(request, start.token)
            if found is None:
                continue
            version, text = found
            versions[start.token] = version
            if self._saved.get(start.token) != version:
                said.append(Progress(task_id=start.task_id, token=start.token, text=text))
        if said and self._store is not None:
            self._store.save(said)
        self._saved = versions

    def save_last(self, request: Any) -> None:
        """Save what a start that is over has said: before its message goes back.

        Raises:
            StoreError: no answer.
        """
        start = request.start
        found = self._said_by(request, start.token)
        if found is not None and self._store is not None:
            self._store.save([Progress(task_id=start.task_id, token=start.token, text=found[1])])

    def _said_by(self, request: Any, token: str) -> tuple[int, bytes] | None:
        body = local.get(token)
        if body is not None:
            return body.progress
        slot = self._slots.of(request.worker_pid)
        return slot.read_progress() if slot is not None and token in (slot.running, slot.returned) else None


def last_progress(store: RedisProgress | None, task_id: str) -> Any:
    """What the task's last start has said; ``None`` also while the store does not answer."""
    if store is None:
        return None
    try:
        text = store.last(task_id)
    except StoreError:
        return None
    return None if text is None else json.loads(text)
