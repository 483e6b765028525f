"""The one call of a beat, for whichever store makes it: that of the sessions, or of the leases where they are apart."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache

import redis

from celery_selfheal.keys import TAG_MARK, Keys, UnackedKeys
from celery_selfheal.leases.port import Renewal, Start
from celery_selfheal.leases.scripts import Script, text
from celery_selfheal.redis_wire import Word, milliseconds, packed

BOOKKEEPING_TTL = timedelta(days=7)
"""Life of indexes and counters after the last beat of any worker: a fleet that is gone leaves nothing for ever."""

KNOWN_LEASES = 10_000  # whose keys are kept packed from beat to beat, a fifth of a kilobyte each
WORDS = 3 + 14 + 8  # EVALSHA, digest, number of keys, the keys that are always there, and the arguments

_RENEWALS = {renewal.value[0]: renewal for renewal in Renewal}


class BeatScript:
    """``beat.lua`` on one server; one command and one answer of few words, however many leases there are."""

    def __init__(
        self, client: redis.Redis, keys: Keys, *, ttl_ms: int, address: str, unacked: UnackedKeys | None = None
    ) -> None:
        self._script = Script(client, "celery_selfheal.leases", "beat", address=address)
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._unacked = unacked
        self._keys_of_lease = lru_cache(KNOWN_LEASES)(
            lambda task_id: packed([keys.lease(task_id), keys.journal(task_id)])
        )

    def __call__(
        self,
        starts: Sequence[Start],
        *,
        session: str,
        mode: str,
        host: str = "",
        about: str = "",
        tags: Sequence[str] = (),
    ) -> tuple[str, str, list[Renewal], list[str]]:
        """Beat.

        Args:
            mode: ``join``, ``stay``, or ``none`` for leases without a session.
            tags: Deliveries that live requests know.

        Returns:
            Epoch of the store, standing of the session, what became of each lease, and the tags that nobody knows.

        Raises:
            StoreError: no answer.
        """
        names = self._keys
        keys = [
            names.session(session),
            names.sessions,
            names.about,
            names.host(host),
            names.owned(session),
            names.pulse,
            names.grace,
            names.epoch,
            names.inflight,
            names.index,
            names.held(session),
            self._unacked.unacked if self._unacked else names.owned(session),
            self._unacked.index if self._unacked else names.sessions,
            names.counters,
        ]
        mine = session + TAG_MARK
        held = [
            [start.token for start in starts],
            [start.task_id for start in starts],
            [start.task_name for start in starts],
            [tag for tag in tags if tag.startswith(mine)],
            [tag for tag in tags if not tag.startswith(mine)],
        ]
        arguments: list[Word] = [
            session,
            self._ttl_ms,
            about,
            mode,
            uuid.uuid4().hex,
            milliseconds(BOOKKEEPING_TTL),
            json.dumps(held, separators=(",", ":")),
            names.root,
        ]
        epoch, standing, renewals, *unknown = map(
            text,
            self._script.send(
                WORDS + 2 * len(starts),
                packed([len(keys) + 2 * len(starts), *keys]),
                *[self._keys_of_lease(start.task_id) for start in starts],
                packed(arguments),
            ),
        )
        return epoch, standing, [_RENEWALS[letter] for letter in renewals], unknown
