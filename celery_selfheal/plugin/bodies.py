"""Which kind of body a start has, by the pool that runs it."""

from __future__ import annotations

import threading

from celery_selfheal.leases.port import Start
from celery_selfheal.plugin import native
from celery_selfheal.plugin.body import Body
from celery_selfheal.plugin.local_bodies import GreenBody, LocalBody, ThreadBody
from celery_selfheal.plugin.slot_body import SlotBody
from celery_selfheal.plugin.slots import Slots


def body_of(start: Start, slots: Slots | None) -> Body:
    """The body of a start in this thread, as its pool can have it; a plain one outside of a worker."""
    if slots is None:
        return Body(start)
    if native.is_patched():
        return GreenBody(start, slots) if native.is_gevent() else LocalBody(start, slots)
    if threading.current_thread() is not threading.main_thread():
        return ThreadBody(start, slots)
    slot = slots.mine
    return Body(start, slots) if slot is None else SlotBody(start, slots, slot)
