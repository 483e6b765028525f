"""What a session store promises, and the values that cross its border."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from celery_selfheal.leases.port import Renewal, Start
from celery_selfheal.witness import ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The lease of one worker process, by incarnation.

    Attributes:
        name: ``node:pid:random``; a new one after every loss.
        node: Worker node name.
        identity: For the host witness; ``None`` where the host has none.
    """

    name: str
    node: str
    identity: ProcessIdentity | None

    @property
    def host(self) -> str:
        """Machine and pid namespace; empty without a witness."""
        return self.identity.host if self.identity else ""

    def about(self) -> str:
        """What the store keeps of it."""
        return json.dumps({"node": self.node, "identity": self.identity and asdict(self.identity)}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A session as another worker sees it."""

    name: str
    about: str

    @property
    def node(self) -> str:
        """Worker node name; the session's own name where the store has forgotten it."""
        return str(json.loads(self.about).get("node") or self.name)

    @property
    def identity(self) -> ProcessIdentity | None:
        """The process, if its host has a witness."""
        fields = json.loads(self.about).get("identity")
        return ProcessIdentity(**fields) if fields else None


class Standing(enum.Enum):
    """What a beat found of its session."""

    KEPT = "kept"
    AGAIN = "again"
    """It had run out, but nobody had acted on that."""
    BEGUN = "begun"
    LOST = "lost"
    """It was buried, or the store was emptied: only a new incarnation may take messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatAnswer:
    """What one beat brought back.

    Attributes:
        epoch: Changes when the store was emptied.
        renewals: One for each lease that was asked for, in that order.
        unknown_tags: Deliveries that the store says are ours and that were not named in the call.
    """

    standing: Standing
    epoch: str
    renewals: list[Renewal]
    unknown_tags: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """The state of the fleet, as a sweep needs it.

    Attributes:
        lead: The caller leads. Never one whose own session has run out: it must beat before it judges others.
        grace: The store was away: what has run out by itself proves nothing yet.
    """

    lead: bool
    grace: bool
    expired: list[Peer]
    neighbours: list[Peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A message that a session has taken and not settled.

    Attributes:
        received_us: Instant of its fetch by the store's clock, for the order of a restore.
        list_key: The list from which it was taken, queue and priority step included.
        message: As it lay in the list, byte for byte.
    """

    tag: str
    received_us: int
    list_key: str
    message: bytes


class SessionStore(Protocol):
    """Keeps worker sessions. Its own clock judges expiry; ``StoreError`` when it did not answer."""

    def beat(
        self, session: Session, *, join: bool, starts: Sequence[Start] = (), tags: Sequence[str] = ()
    ) -> BeatAnswer:
        """Renew the session and, where they live in the same store, leases and deliveries, in one call."""

    def census(self, *, session: Session | None, lead_ms: int, limit: int) -> Census:
        """Ask who is gone. ``session`` competes for the lead; without one the caller leads this once."""

    def condemn(self, peer: Peer) -> bool:
        """End the session of a process that its machine's kernel has seen off."""

    def bury(self, session: str, *, host: str) -> bool:
        """Forget a dead session; ``False`` while it owns deliveries or lives."""

    def leave(self, session: Session) -> None:
        """Say good-bye: what the session still owns is anybody's to restore at once."""


class DeliveryStore(Protocol):
    """Moves deliveries out of a session's hands, each at most once."""

    def owned(self, session: str) -> list[Delivery]:
        """All that the session has taken and not settled, in order of receipt."""

    def settle(self, delivery: Delivery, *, session: str, message: bytes, dead: bool, front: bool) -> bool:
        """Replace the delivery by ``message`` in its list, in one step.

        Args:
            dead: Refuse while the session lives. Else its owner itself asks.
            front: To be taken next; else behind what waits.

        Returns:
            ``False`` when it was settled already, or its owner lives.
        """

    def settle_all(
        self, moves: Sequence[tuple[Delivery, bytes]], *, session: str, dead: bool, front: bool
    ) -> list[bool]:
        """``settle`` each, one step each, in one round trip."""
