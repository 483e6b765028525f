"""``DeadLetterQueue``: look at what has failed for good, and send it back."""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from itertools import islice
from time import sleep
from typing import TYPE_CHECKING, TypedDict

from celery import Celery

from celery_selfheal.agents.dead_letters import DeadLetter, DeadLetterStore, Filters, Outcome
from celery_selfheal.agents.replay import BATCH_SIZE, Replayer, ReplayReport, deferred_interrupt, name_of
from celery_selfheal.clock import monotonic, utc_now
from celery_selfheal.errors import SettingsError
from celery_selfheal.plugin.brokers.kombu_dead_letters import KombuDeadLetterStore
from celery_selfheal.plugin.brokers.redis_dead_letters import RedisDeadLetterStore
from celery_selfheal.plugin.install import Plugin, plugin_of
from celery_selfheal.plugin.stores import broker_address, open_client
from celery_selfheal.redis_url import without_password

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.11 has it; type checkers know it anyway

logger = logging.getLogger("celery_selfheal.dlq")


class FilterOptions(TypedDict, total=False):
    """Conditions that a dead letter must meet, all of them. Without any, every one does.

    ``task`` and ``exception`` are names, in which ``*``, ``?`` and ``[...]`` match as in a shell; ``reason`` is a
    reason code; a number of ``older_than`` and ``newer_than`` is seconds since the death.
    """

    id: str | Iterable[str] | None
    task: str | None
    reason: str | None
    exception: str | None
    older_than: timedelta | float | None
    newer_than: timedelta | float | None


class DeadLetterQueue:
    """The dead letter queue of an application. Connects on first use; ``StoreError`` when the broker does not answer.

    Args:
        queue: Another one than ``selfheal_dlq``: a task's own ``dead_letter_queue``.
    """

    def __init__(self, app: Celery, queue: str | None = None) -> None:
        self._plugin = plugin_of(app)
        self.queue = queue or self._plugin.dead_letter_queue
        self._opened: DeadLetterStore | None = None

    def __len__(self) -> int:
        """So many messages wait in it; on RabbitMQ a message that was moved twice counts twice."""
        return len(self._store)

    def get(self, task_id: str) -> DeadLetter | None:
        """The dead letter of this id, the oldest if there are several; ``None`` if there is none."""
        with closing(self.list(id=task_id, limit=1)) as found:
            return next(found, None)

    def replay(
        self,
        *,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        force: bool = False,
        progress: Callable[[ReplayReport], None] = lambda report: None,
        **filters: Unpack[FilterOptions],
    ) -> ReplayReport:
        """Send messages back to the queues in which they died, oldest first: same id, all attempts before them.

        An entry is in this queue until its message is in the other. A replay that is interrupted or killed is made
        complete by a second one: none is lost and, where ``SelfHealTask`` runs them, none runs twice.

        Args:
            limit: So many at most.
            rate: Messages a second; by default as fast as the broker takes them.
            dry_run: Only count.
            force: Also those that were replayed ``selfheal_max_replays`` times.
            progress: Called in this thread after each batch.
            filters: See ``FilterOptions``.
        """
        replayer = Replayer(
            self._store,
            max_replays=self._plugin.settings.max_replays,
            forget=_forgetting(self._plugin),
            by=_who(),
            clock=monotonic,
            sleep=sleep,
        )
        return replayer.run(
            _filters(filters),
            now=utc_now(),
            limit=limit,
            rate=rate,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )

    def drop(self, *, limit: int | None = None, dry_run: bool = False, **filters: Unpack[FilterOptions]) -> int:
        """Delete messages for good, and return how many; with ``dry_run`` only count them."""
        wanted, now, dropped = _filters(filters), utc_now(), 0
        with self._store.reading() as reading:
            for page in reading.pages():
                meant = [entry for entry in page if wanted.match(entry.letter, now=now)]
                meant = meant if limit is None else meant[: limit - dropped]
                for first in range(0, len(meant), BATCH_SIZE):
                    batch = meant[first : first + BATCH_SIZE]
                    with deferred_interrupt():
                        outcomes = [Outcome.MOVED for _ in batch] if dry_run else reading.drop(batch)
                        dropped += outcomes.count(Outcome.MOVED)
                        if not dry_run:
                            self._tell_dropped([entry.letter for entry in batch], outcomes)
                if limit is not None and dropped >= limit:
                    break
        return dropped

    def export(self, *, limit: int | None = None, **filters: Unpack[FilterOptions]) -> Iterator[str]:
        """A line of JSON for each: all that is known, and ``message`` in kombu's envelope, its body in base64."""
        for letter in self.list(limit=limit, **filters):
            yield json.dumps({**letter.about(), "message": letter.message})

    def list(self, *, limit: int | None = None, **filters: Unpack[FilterOptions]) -> Generator[DeadLetter, None, None]:
        """Dead letters, oldest first, read page by page as they are asked for. Nothing is taken out.

        On other brokers than Redis they are hidden from others until the iterator ends or is closed.
        """
        wanted, now = _filters(filters), utc_now()
        with self._store.reading() as reading:
            letters = (entry.letter for page in reading.pages() for entry in page)
            yield from islice((letter for letter in letters if wanted.match(letter, now=now)), limit)

    @property
    def _store(self) -> DeadLetterStore:
        if self._opened is None:
            self._opened = _open_store(self._plugin, self.queue)
        return self._opened

    @staticmethod
    def _tell_dropped(letters: Sequence[DeadLetter], outcomes: Sequence[Outcome]) -> None:
        by = _who()
        for letter, outcome in zip(letters, outcomes, strict=True):
            if outcome is Outcome.MOVED:
                logger.info("dropped by %s: %s", by, name_of(letter))


def _forgetting(plugin: Plugin) -> Callable[[Sequence[str]], None]:
    """Removes what the lease store remembers of starts that never ended: a replayed task is not judged by them."""
    try:
        return plugin.open_stores().leases.forget
    except SettingsError:
        # No worker of ours runs without a lease store: nothing is remembered.
        return lambda task_ids: None


def _open_store(plugin: Plugin, queue: str) -> DeadLetterStore:
    address = broker_address(plugin.app)
    if plugin.layout is None or address is None:
        return KombuDeadLetterStore(plugin.app, plugin.publisher, queue=queue)
    return RedisDeadLetterStore(
        open_client(address, ttl=plugin.settings.lease_ttl),
        queue=queue,
        layout=plugin.layout,
        address=without_password(address.url),
    )


def _filters(options: FilterOptions) -> Filters:
    ids = options.get("id")
    return Filters(
        ids=frozenset([ids] if isinstance(ids, str) else ids or ()),
        task=options.get("task"),
        reason=options.get("reason"),
        exception=options.get("exception"),
        older_than=_duration(options.get("older_than")),
        newer_than=_duration(options.get("newer_than")),
    )


def _duration(given: timedelta | float | None) -> timedelta | None:
    return given if given is None or isinstance(given, timedelta) else timedelta(seconds=given)


def _who() -> str:
    """Who replays, for the log."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "?"
    with suppress(Exception):  # a container's user may have no name
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}:{os.getpid()}"
