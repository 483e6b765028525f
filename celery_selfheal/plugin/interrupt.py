"""Main ends starts that must not go on: it tells them, gives them a grace, and then kills their process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any

from celery.worker import state as worker_state

from celery_selfheal.clock import monotonic
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.local_bodies import LocalBody, local
from celery_selfheal.plugin.slot_body import INTERRUPT
from celery_selfheal.plugin.slots import Doom, Slot, Slots

logger = logging.getLogger("celery_selfheal")

LOOK = timedelta(milliseconds=50)  # between two looks at starts that are told to end
STOP_PATIENCE_SECONDS = 0.1  # for a process to stand still, before it is killed


@dataclass(slots=True)
class Interruption:
    """A start that is told to end.

    Attributes:
        request: Kept alive until it is settled.
        since: Monotonic seconds.
        body: The start itself, where it runs in this process.
        is_killed: Its process was killed.
        is_out_of_reach: It could not be, and that was said.
    """

    request: Any
    why: Doom
    since: float
    body: LocalBody | None = None
    is_killed: bool = False
    is_out_of_reach: bool = False

    @property
    def start(self) -> Start:
        """What was announced."""
        start: Start = self.request.start
        return start


class Interruptions:
    """Every start that is told to end, until it has.

    Args:
        grace: How long a start has to obey.
        terminate: Sends a signal to a pool child as Celery would, so that its pool knows that it was meant.
        settle: Called once for each start that was ended, with whether it had obeyed.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        grace: timedelta,
        terminate: Callable[[int, int], object],
        settle: Callable[[Interruption], object],
    ) -> None:
        self._slots = slots
        self._grace = grace.total_seconds()
        self._terminate = terminate
        self._settle = settle
        self._open: dict[str, Interruption] = {}

    def begin(self, request: Any, why: Doom) -> None:
        """Tell the start to end. A second call changes nothing."""
        start: Start = request.start
        if start.token in self._open:
            return
        body = local.get(start.token)
        self._open[start.token] = Interruption(request, why, monotonic(), body)
        if body is not None:
            body.interrupt(why)
            return
        slot = self._slots.of(request.worker_pid)
        if slot is None or start.token in (slot.ended, slot.returned):
            return
        slot.doom(start.token, why)
        if slot.listens and slot.running == start.token:
            _wake(slot.pid, self._slots.main_pid)

    def of(self, token: str) -> Interruption | None:
        """The interruption of a start; ``None`` if it is not told to end."""
        return self._open.get(token)

    def close(self, token: str) -> Interruption | None:
        """It has ended, and whoever asks settles it; ``None`` if somebody does already."""
        return self._open.pop(token, None)

    @property
    def is_idle(self) -> bool:
        """Nobody is told to end."""
        return not self._open

    def out_of_reach(self) -> list[Interruption]:
        """Starts that neither obeyed nor can be killed without this process."""
        return [one for one in list(self._open.values()) if one.is_out_of_reach]

    def press(self) -> timedelta | None:
        """Look after all of them; returns when to look again."""
        for one in list(self._open.values()):
            if self._has_gone_on(one):
                self.close(one.start.token)
            elif self._is_over(one):
                if self.close(one.start.token) is not None:
                    self._settle(one)
            elif monotonic() - one.since >= self._grace:
                self._force(one)
        return LOOK if self._open else None

    def _has_gone_on(self, one: Interruption) -> bool:
        """It ended by itself, or as any failure does: its own process settles it."""
        if one.body is not None:
            return one.body.ended
        slot = self._slots.of(one.request.worker_pid)
        if slot is not None and slot.ended == one.start.token:
            return True
        return not one.is_killed and one.request not in worker_state.active_requests and not self._is_over(one)

    def _is_over(self, one: Interruption) -> bool:
        if one.body is not None or one.why is Doom.DEADLINE:
            # Its end is reported in main's own way, at once, or means another attempt, which only the loop can send.
            return False
        pid = one.request.worker_pid
        slot = self._slots.of(pid)
        if slot is not None and slot.returned == one.start.token:
            return True
        return pid != self._slots.main_pid and has_ended(pid)

    def _force(self, one: Interruption) -> None:
        pid = one.request.worker_pid
        if one.body is not None or pid == self._slots.main_pid:
            if not one.is_out_of_reach and not (one.body and one.body.obeys):
                one.is_out_of_reach = True
                logger.warning(
                    "%s[%s] was told to end (%s) and does not, nor can this pool kill it: self.check() in loops helps",
                    one.start.task_name,
                    one.start.task_id,
                    one.why.name.lower().replace("_", " "),
                )
            return
        slot = self._slots.of(pid)
        if one.is_killed or (slot is not None and slot.obeys and one.why not in (Doom.SHUTDOWN, Doom.CANCELLED)):
            return
        if self._kill(one, pid, slot):
            one.is_killed = True

    def _kill(self, one: Interruption, pid: int, slot: Slot | None) -> bool:
        """Kill the start's process, and no other start's: stopped first, so that it cannot go on to the next one."""
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return True
        give_up_at = monotonic() + STOP_PATIENCE_SECONDS
        while state_of(pid) not in ("T", "Z", "") and monotonic() < give_up_at:
            sleep(0.001)
        if slot is not None and slot.running not in ("", one.start.token):
            os.kill(pid, signal.SIGCONT)
            return False
        logger.warning(
            "%s[%s] did not end in %g s (%s): its process %d is killed",
            one.start.task_name,
            one.start.task_id,
            self._grace,
            one.why.name.lower().replace("_", " "),
            pid,
        )
        self._terminate(pid, signal.SIGKILL)
        return True


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does; ``Z`` for one that is gone, empty where nobody tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "Z" if os.path.isdir("/proc/self") else ""
    except OSError:
        return ""


def has_ended(pid: int | None) -> bool:
    """Whether a process is surely gone."""
    return pid is not None and state_of(pid) in ("Z", "X")


def _wake(pid: int, main_pid: int) -> None:
    if INTERRUPT is None:
        return
    try:
        if pid == main_pid:
            # A signal to the process could be handled by any thread, and would not wake the one that waits.
            ident = threading.main_thread().ident
            if ident is not None:
                signal.pthread_kill(ident, INTERRUPT)
        else:
            os.kill(pid, INTERRUPT)
    except ProcessLookupError:
        pass
