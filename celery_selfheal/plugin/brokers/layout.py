"""How kombu lays out its keys in Redis, read from the connection's own options without connecting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery

from celery_selfheal.leases.redis import UnackedKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLayout:
    """Names and options of kombu's Redis transport, as an application has set them."""

    prefix: str
    unacked_key: str
    index_key: str
    sep: str
    priority_steps: Sequence[int]
    visibility_timeout: timedelta
    ack_emulation: bool

    @property
    def unacked(self) -> UnackedKeys:
        """The unacked hash and its index, with ``global_keyprefix``."""
        return UnackedKeys(unacked=self.prefix + self.unacked_key, index=self.prefix + self.index_key)


def layout_of(app: Celery) -> RedisLayout | None:
    """Layout of the application's broker; ``None`` when the broker is not Redis."""
    with app.connection_for_read() as connection:
        transport = connection.get_transport_cls()
        if getattr(transport, "driver_type", None) != "redis":
            return None
        options = dict(connection.transport_options or {})
    channel = transport.Channel

    def option(name: str) -> Any:
        return options.get(name, getattr(channel, name))

    return RedisLayout(
        prefix=option("global_keyprefix"),
        unacked_key=option("unacked_key"),
        index_key=option("unacked_index_key"),
        sep=option("sep"),
        priority_steps=tuple(option("priority_steps")),
        visibility_timeout=timedelta(seconds=float(option("visibility_timeout"))),
        ack_emulation=bool(option("ack_emulation")),
    )


def queue_of(list_key: str, layout: RedisLayout) -> str:
    """Name of the queue to which a list belongs: without prefix and priority step."""
    name = list_key.removeprefix(layout.prefix)
    queue, mark, step = name.rpartition(layout.sep)
    return queue if mark and step.isdigit() else name
