"""Worker sessions in PostgreSQL, beside the leases, for brokers that redeliver by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from celery_selfheal.keys import Keys
from celery_selfheal.leases.functions import Functions, name_of
from celery_selfheal.leases.port import Renewal, Start
from celery_selfheal.leases.postgres import milliseconds, renewal_arguments
from celery_selfheal.sessions.port import BeatAnswer, Census, Peer, Session, Standing


class PostgresSessionStore:
    """``SessionStore`` in the database that keeps the leases. It knows no deliveries."""

    def __init__(self, functions: Functions, keys: Keys, *, ttl: timedelta) -> None:
        self._call = functions
        self._app = name_of(keys.root)
        self._ttl_ms = milliseconds(ttl)

    def beat(
        self, session: Session, *, join: bool, starts: Sequence[Start] = (), tags: Sequence[str] = ()
    ) -> BeatAnswer:
        """See ``SessionStore.beat``: one round trip, whatever is held."""
        row = self._call(
            "beat",
            self._app,
            **renewal_arguments(
                starts,
                ttl_ms=self._ttl_ms,
                session=session.name,
                node=session.node,
                mode="join" if join else "stay",
                about=session.about(),
                host=session.host,
            ),
        )
        return BeatAnswer(
            standing=Standing(row.standing),
            epoch=row.epoch,
            renewals=[Renewal(answer) for answer in row.answers],
            unknown_tags=[],
        )

    def census(self, *, session: Session | None, lead_ms: int, limit: int) -> Census:
        """See ``SessionStore.census``."""
        row = self._call(
            "census",
            self._app,
            session=session.name if session else "",
            host=session.host if session else "",
            lead_ms=lead_ms,
            limit=limit,
            ttl_ms=self._ttl_ms,
        )
        return Census(
            lead=row.lead,
            grace=row.grace,
            expired=_peers(row.expired_names, row.expired_abouts),
            neighbours=_peers(row.neighbour_names, row.neighbour_abouts),
        )

    def condemn(self, peer: Peer) -> bool:
        """See ``SessionStore.condemn``."""
        return bool(self._call("condemn", self._app, session=peer.name, about=peer.about)[0])

    def bury(self, session: str, *, host: str) -> bool:
        """See ``SessionStore.bury``."""
        return bool(self._call("bury", self._app, session=session)[0])

    def leave(self, session: Session) -> None:
        """See ``SessionStore.leave``."""
        self._call("leave", self._app, session=session.name)


def _peers(names: Sequence[str], abouts: Sequence[str]) -> list[Peer]:
    return [Peer(name=name, about=about) for name, about in zip(names, abouts, strict=True)]
