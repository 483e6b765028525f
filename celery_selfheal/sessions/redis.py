"""Sessions and deliveries in Redis: in the broker's server where the broker is Redis, else beside the leases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import redis

from celery_selfheal.keys import Keys, UnackedKeys, session_of_tag
from celery_selfheal.leases.beat import BeatScript
from celery_selfheal.leases.port import Start
from celery_selfheal.leases.scripts import Script, answering, text
from celery_selfheal.redis_wire import milliseconds
from celery_selfheal.sessions.port import BeatAnswer, Census, Delivery, Peer, Session, Standing

PACKAGE = "celery_selfheal.sessions"


class RedisSessionStore:
    """``SessionStore`` on one Redis server.

    Args:
        unacked: Where the broker keeps unacknowledged deliveries, if this server is the broker's.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, *, ttl: timedelta, address: str, unacked: UnackedKeys | None = None
    ) -> None:
        self._keys = keys
        self._ttl_ms = milliseconds(ttl)
        self._unacked = unacked
        self._beat = BeatScript(client, keys, ttl_ms=self._ttl_ms, address=address, unacked=unacked)
        self._census = Script(client, PACKAGE, "census", address=address)
        self._condemn = Script(client, PACKAGE, "condemn", address=address)
        self._bury = Script(client, PACKAGE, "bury", address=address)

    def beat(
        self, session: Session, *, join: bool, starts: Sequence[Start] = (), tags: Sequence[str] = ()
    ) -> BeatAnswer:
        """See ``SessionStore.beat``: one round trip, whatever is held."""
        epoch, standing, renewals, unknown_tags = self._beat(
            starts,
            session=session.name,
            mode="join" if join else "stay",
            host=session.host,
            about=session.about(),
            tags=tags,
        )
        return BeatAnswer(standing=Standing(standing), epoch=epoch, renewals=renewals, unknown_tags=unknown_tags)

    def census(self, *, session: Session | None, lead_ms: int, limit: int) -> Census:
        """See ``SessionStore.census``."""
        names = self._keys
        reply = self._census(
            [
                names.sessions,
                names.host(session.host if session else ""),
                names.about,
                names.leader,
                names.grace,
                names.session(session.name if session else ""),
                names.pulse,
            ],
            [session.name if session else "", lead_ms, limit, self._ttl_ms],
        )
        lead, grace, expired, *rest = reply
        peers = [Peer(name=text(name), about=text(about)) for name, about in zip(rest[::2], rest[1::2], strict=True)]
        neighbours = peers[expired:] if session and session.host else []
        return Census(lead=bool(lead), grace=bool(grace), expired=peers[:expired], neighbours=neighbours)

    def condemn(self, peer: Peer) -> bool:
        """See ``SessionStore.condemn``."""
        names = self._keys
        return bool(self._condemn([names.session(peer.name), names.sessions, names.about], [peer.name, peer.about]))

    def bury(self, session: str, *, host: str) -> bool:
        """See ``SessionStore.bury``."""
        return bool(self._bury(self._grave(session, host), [session, "bury"]))

    def leave(self, session: Session) -> None:
        """See ``SessionStore.leave``."""
        self._bury(self._grave(session.name, session.host), [session.name, "leave"])

    def _grave(self, session: str, host: str) -> list[str]:
        names = self._keys
        return [names.session(session), names.sessions, names.about, names.host(host), names.owned(session)]


class RedisDeliveryStore:
    """``DeliveryStore`` on the broker's Redis server."""

    def __init__(self, client: redis.Redis, keys: Keys, *, unacked: UnackedKeys, address: str) -> None:
        self._client: Any = client  # its types differ between the versions of redis-py that we support
        self._keys = keys
        self._unacked = unacked
        self._address = address
        self._settle = Script(client, PACKAGE, "settle", address=address)
        self._restore_unowned = Script(client, PACKAGE, "restore_unowned", address=address)

    def owned(self, session: str) -> list[Delivery]:
        """See ``DeliveryStore.owned``."""
        with answering(self._address, "owned"):
            records = self._client.hgetall(self._keys.owned(session))
        return self._read(records)

    def named(self, session: str, tags: Sequence[str]) -> list[Delivery]:
        """Those deliveries of the session that have one of ``tags``, in order of receipt."""
        if not tags:
            return []
        with answering(self._address, "named"):
            records = self._client.hmget(self._keys.owned(session), list(tags))
        return self._read({tag.encode(): found for tag, found in zip(tags, records, strict=True) if found})

    def settle(self, delivery: Delivery, *, session: str, message: bytes, dead: bool, front: bool) -> bool:
        """See ``DeliveryStore.settle``."""
        return self.settle_all([(delivery, message)], session=session, dead=dead, front=front)[0]

    def settle_all(
        self, moves: Sequence[tuple[Delivery, bytes]], *, session: str, dead: bool, front: bool
    ) -> list[bool]:
        """See ``DeliveryStore.settle_all``."""
        return [
            moved == 1
            for moved in self._settle.each(
                [
                    (
                        [
                            self._keys.session(session),
                            self._keys.owned(session),
                            self._unacked.unacked,
                            self._unacked.index,
                            delivery.list_key,
                        ],
                        [delivery.tag, "dead" if dead else "mine", "front" if front else "back", message],
                    )
                    for delivery, message in moves
                ],
                # A fetch in the middle of it would take the newest first: each goes in front of the one before.
                unseen=True,
            )
        ]

    def push(self, list_key: str, message: bytes) -> None:
        """Put one more message behind what waits in a list."""
        with answering(self._address, "push"):
            self._client.lpush(list_key, message)

    def acknowledge(self, tag: str, *, session: str) -> None:
        """The delivery is done. A repeat changes nothing."""
        with answering(self._address, "acknowledge"), self._client.pipeline(transaction=True) as pipe:
            pipe.zrem(self._unacked.index, tag)
            pipe.hdel(self._unacked.unacked, tag)
            pipe.hdel(self._keys.owned(session), tag)
            pipe.execute()

    def acknowledge_all(self, tags: Sequence[str]) -> None:
        """All of these deliveries are done, in one round trip. A repeat changes nothing."""
        owners: dict[str, list[str]] = {}
        for tag in tags:
            owners.setdefault(session_of_tag(tag) or "", []).append(tag)
        with answering(self._address, "acknowledge"), self._client.pipeline(transaction=True) as pipe:
            pipe.zrem(self._unacked.index, *tags)
            pipe.hdel(self._unacked.unacked, *tags)
            for session, owned in owners.items():
                pipe.hdel(self._keys.owned(session), *owned)
            pipe.execute()

    def overdue(self, *, visibility_timeout: timedelta, limit: int) -> list[tuple[str, bytes]]:
        """Tag and unacked entry of deliveries older than the visibility timeout, oldest first."""
        with answering(self._address, "overdue"):
            seconds, _ = self._client.time()
            tags = self._client.zrangebyscore(
                self._unacked.index, "-inf", seconds - visibility_timeout.total_seconds(), start=0, num=limit
            )
            entries = self._client.hmget(self._unacked.unacked, tags) if tags else []
        return [(text(tag), entry or b"") for tag, entry in zip(tags, entries, strict=True)]

    def is_owned(self, tag: str, session: str) -> bool:
        """Whether an owner record answers for the delivery."""
        with answering(self._address, "is owned"):
            return bool(self._client.hexists(self._keys.owned(session), tag))

    def restore_unowned(self, tag: str, message: bytes, *, lists: Sequence[str], visibility_timeout: timedelta) -> bool:
        """Put back a delivery without owner record whose visibility timeout has passed; ``False`` if it is settled."""
        return bool(
            self._restore_unowned(
                [self._unacked.unacked, self._unacked.index, *lists],
                [tag, round(visibility_timeout.total_seconds()), message],
            )
        )

    def _read(self, records: dict[bytes, bytes]) -> list[Delivery]:
        tags = list(records)
        with answering(self._address, "read deliveries"):
            entries = self._client.hmget(self._unacked.unacked, tags) if tags else []
        deliveries = []
        for tag, entry in zip(tags, entries, strict=True):
            received, list_key = text(records[tag]).split(" ", 1)
            deliveries.append(
                Delivery(tag=text(tag), received_us=int(received), list_key=list_key, message=message_of(entry or b""))
            )
        return sorted(deliveries, key=lambda delivery: delivery.received_us)


def message_of(entry: bytes) -> bytes:
    """The message inside an unacked entry ``[message,"","queue"]`` of ours, byte for byte and undecoded."""
    return entry[1 : entry.rindex(b',"","')] if entry else b""
