"""What becomes of a start that main has ended: its lease and its message, by the reason why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_selfheal.plugin.interrupt import Interruption
from celery_selfheal.plugin.progress import ProgressKeeper
from celery_selfheal.plugin.settling import Settling
from celery_selfheal.plugin.slots import Doom
from celery_selfheal.plugin.stalled import StalledFailure

if TYPE_CHECKING:
    from celery_selfheal.plugin.worker import Worker

logger = logging.getLogger("celery_selfheal")

GREEN_PAUSE_SECONDS = 0.1  # for the lease to be given back before the broker delivers a copy


def settle(one: Interruption, *, worker: Worker, settling: Settling, progress: ProgressKeeper) -> None:
    """Give lease and message back, or count a stall. Does no I/O: the agents' thread does it.

    A lease that another start has taken is left alone, and this start stays in the journal until that one ends: it
    was one that did not end by itself. All else is a hand-over, and not counted; a start that hung is a stall.
    """
    request, start = one.request, one.start
    if request.is_settled:
        return
    request.is_settled = True
    worker.drain.has_ended(start.token)

    if one.why is Doom.HUNG:
        failure = StalledFailure(request, worker.max_stalls)

        def heal() -> None:
            progress.save_last(request)
            settling.heal_stalled(start, failure, reason="no progress")
            reject()
    else:

        def heal() -> None:
            # Whose lock key was taken has the lease of its id all the same.
            if one.why is not Doom.TAKEN_OVER or settling.holds(start):
                progress.save_last(request)
                settling.release_handed_over(start)
            settling.hand_over_started(start)
            reject()

    def reject() -> None:
        # Through the loop, which owns the connection; on Redis the message has been moved by now.
        if start.tag is None and worker.hub is not None:
            _reject(one, settling)

    if start.tag is not None:
        request.acknowledged = True
        forget = getattr(request.message.channel, "selfheal_forget", None)
        if forget is not None:
            forget(start.tag)
    elif worker.hub is None:
        worker.timer.call_after(GREEN_PAUSE_SECONDS, _reject, (one, settling))
    settling.later(heal, tag=start.tag)


def _reject(one: Interruption, settling: Settling) -> None:
    request = one.request
    if not request.acknowledged:
        # Not by Request.reject: it sends an event, on the connection of another thread.
        request.acknowledged = True
        request.on_reject(logger, request.connection_errors, True)
        settling.handed_over += one.why is not Doom.HUNG
