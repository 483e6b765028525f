"""The outbox of an application: its table, its courier, and the step of a worker that lets it work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from celery_selfheal.agents.outbox import Courier, Sent
from celery_selfheal.clock import monotonic
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin import native
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.sending import send
from celery_selfheal.plugin.unsent import Unsent
from celery_selfheal.ticker import Step, Ticker

if TYPE_CHECKING:
    from celery_selfheal.outbox.store import Outbox

logger = logging.getLogger("celery_selfheal")


def outbox_of(plugin: Plugin) -> Outbox:
    """The table in this process' database.

    Raises:
        SettingsError: no database is set, or it cannot be used.
    """
    # Imported late: nothing else may load SQLAlchemy where no database is set.
    from celery_selfheal.database.engines import engine_of
    from celery_selfheal.outbox.store import Outbox

    return Outbox(engine_of(plugin.settings))


def courier_of(plugin: Plugin) -> Courier | None:
    """What publishes the rows that a crash has left; ``None`` without ``selfheal_outbox``."""
    if not plugin.settings.outbox:
        return None

    def send_texts(texts: Sequence[str]) -> list[Sent]:
        read = [_read(text) for text in texts]
        refusals = iter(send(plugin.publisher, [one for one in read if isinstance(one, Unsent)]))
        return [
            Sent(refusal=next(refusals), task_name=one.task_name) if isinstance(one, Unsent) else one for one in read
        ]

    return Courier(outbox_of(plugin), send=send_texts, tell=plugin.tell, now=monotonic)


class OutboxStep:
    """Lets a courier work at intervals, and says once when it cannot, and when it can again."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._answered = True

    def run(self) -> bool:
        """Deliver once; ``True`` when there is more to do at once."""
        try:
            report = self._courier.deliver()
        except StoreError as exc:
            if self._answered:
                logger.warning("the outbox waits: %s", exc)
            self._answered = False
            return False
        if not self._answered:
            logger.warning("the outbox is served again")
        self._answered = True
        if report.sent:
            logger.info("outbox: %d messages sent that were left behind", report.sent)
        return report.unfinished


def outbox_ticker(plugin: Plugin) -> Ticker | None:
    """A worker's thread for the courier; ``None`` without ``selfheal_outbox``.

    One of its own: a database or a broker that hangs must not keep the heartbeat waiting.
    """
    courier = courier_of(plugin)
    if courier is None:
        return None
    step = Step("outbox", OutboxStep(courier).run, plugin.settings.reaper_interval)
    return Ticker([step], start_thread=native.start_thread)


def _read(text: str) -> Unsent | Sent:
    try:
        return Unsent.decode(text)
    except ValueError as exc:
        return Sent(refusal=f"it cannot be read: {exc}")
