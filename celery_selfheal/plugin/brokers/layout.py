"""How kombu lays out its keys in Redis, read from the connection's own options without connecting."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery

from celery_selfheal.keys import UnackedKeys

LEAST_PRIORITY, MOST_PRIORITY = 0, 9  # what kombu makes of any number


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


def list_of(queue: str, priority: object, layout: RedisLayout) -> str:
    """The list into which kombu would put a message of this priority: the inverse of ``queue_of``."""
    try:
        number = max(LEAST_PRIORITY, min(int(priority), MOST_PRIORITY))  # type: ignore[call-overload]  # caught
    except (TypeError, ValueError):
        number = LEAST_PRIORITY
    step = layout.priority_steps[bisect(layout.priority_steps, number) - 1]
    return layout.prefix + (f"{queue}{layout.sep}{step}" if step else queue)


def lists_of(queue: str, layout: RedisLayout) -> list[str]:
    """Every list of a queue."""
    return [list_of(queue, step, layout) for step in layout.priority_steps]
