"""Memory that a worker's main process shares with its pool children: what runs there, and what main says to it."""

from __future__ import annotations

import enum
import json
import mmap
import os
from struct import Struct
from typing import Any

from celery_selfheal.clock import monotonic

SLOTS = 4096  # by process id; far more than children, so that two of them rarely want the same one
SLOT_BYTES = 2048  # two to a page; only pages of processes that ran a task are ever backed by memory
PROBES = 16  # places to look at when another living process has the first one
TOKEN_BYTES = 32

_PID = Struct("=q")
_MOMENT = Struct("=d")
_PROGRESS = Struct("=QI")  # odd while it is written; length

_PID_AT, _RUNNING_AT, _DOOMED_AT, _RETURNED_AT, _ENDED_AT = 0, 8, 40, 72, 104
_DOOM_AT, _LISTENS_AT, _OBEYS_AT, _ALIVE_AT, _PROGRESS_AT, _TEXT_AT = 136, 137, 138, 144, 152, 168
MAX_PROGRESS_BYTES = SLOT_BYTES - _TEXT_AT

_DRAINING_AT, _SILENT_AT, _CONFIRMED_AT = 0, 1, 8  # in the first slot, which belongs to main
_NOBODY = bytes(TOKEN_BYTES)


class Doom(enum.IntEnum):
    """Why main ends a start that runs."""

    TAKEN_OVER = 1
    """Another start has its lease."""
    SHUTDOWN = 2
    """The worker stops, and its patience is over."""
    CANCELLED = 3
    """Celery itself cancels the start: a cold shutdown, or the broker was lost."""
    DEADLINE = 4
    """It ran longer than its ``max_runtime``."""
    HUNG = 5
    """It showed no progress for ``stall_after``."""
    OUTAGE = 6
    """The lease store is silent, and ``selfheal_on_store_outage`` is ``"interrupt"``."""


class Slot:
    """One process's part of the memory. Only one side writes each field, so no lock is needed."""

    def __init__(self, memory: mmap.mmap, base: int) -> None:
        self._memory = memory
        self._base = base

    # -- written by the process itself

    @property
    def pid(self) -> int:
        """Its owner; 0 for nobody."""
        return int(_PID.unpack_from(self._memory, self._base + _PID_AT)[0])

    def claim(self, pid: int) -> None:
        """Make it this process's own, whatever an earlier one has left there."""
        self._memory[self._base : self._base + SLOT_BYTES] = bytes(SLOT_BYTES)
        _PID.pack_into(self._memory, self._base + _PID_AT, pid)

    @property
    def running(self) -> str:
        """Token of the start that is under way; empty between two."""
        return self._token(_RUNNING_AT)

    def enter(self, token: str) -> None:
        """A start begins."""
        self.show_life()
        self._memory[self._base + _OBEYS_AT] = 0
        _PROGRESS.pack_into(self._memory, self._base + _PROGRESS_AT, 0, 0)
        self._put(_RUNNING_AT, token)

    def leave(self, *, handed_back: bool) -> None:
        """It is over; ``handed_back`` asks main to give its message back."""
        place = _RETURNED_AT if handed_back else _ENDED_AT
        self._memory[self._at(place)] = self._memory[self._at(_RUNNING_AT)]
        self._memory[self._at(_RUNNING_AT)] = _NOBODY

    @property
    def returned(self) -> str:
        """Token of the last start that was handed back."""
        return self._token(_RETURNED_AT)

    @property
    def ended(self) -> str:
        """Token of the last start that ended in any other way."""
        return self._token(_ENDED_AT)

    @property
    def obeys(self) -> bool:
        """Whether the body of the start that runs was left as it was told."""
        return bool(self._memory[self._base + _OBEYS_AT])

    def obey(self) -> None:
        """The body is left, since main has said so."""
        self._memory[self._base + _OBEYS_AT] = 1

    @property
    def listens(self) -> bool:
        """Whether its process handles our signal: another one would die of it."""
        return bool(self._memory[self._base + _LISTENS_AT])

    def listen(self) -> None:
        """Our signal is handled from now on."""
        self._memory[self._base + _LISTENS_AT] = 1

    def show_life(self) -> None:
        """The work goes on."""
        _MOMENT.pack_into(self._memory, self._base + _ALIVE_AT, monotonic())

    @property
    def alive_at(self) -> float:
        """Monotonic seconds at which the work last showed that it goes on."""
        return float(_MOMENT.unpack_from(self._memory, self._base + _ALIVE_AT)[0])

    def write_progress(self, text: bytes) -> None:
        """Leave a progress for main to read, at most ``MAX_PROGRESS_BYTES``."""
        version, _ = _PROGRESS.unpack_from(self._memory, self._base + _PROGRESS_AT)
        _PROGRESS.pack_into(self._memory, self._base + _PROGRESS_AT, version | 1, len(text))
        self._memory[self._base + _TEXT_AT : self._base + _TEXT_AT + len(text)] = text
        _PROGRESS.pack_into(self._memory, self._base + _PROGRESS_AT, (version | 1) + 1, len(text))

    def read_progress(self) -> tuple[int, bytes] | None:
        """Version and text of the last progress; ``None`` without one, or while it is written."""
        version, length = _PROGRESS.unpack_from(self._memory, self._base + _PROGRESS_AT)
        text = bytes(self._memory[self._base + _TEXT_AT : self._base + _TEXT_AT + length])
        now, _ = _PROGRESS.unpack_from(self._memory, self._base + _PROGRESS_AT)
        return (version, text) if version and not version & 1 and now == version else None

    # -- written by main

    def doom(self, token: str, why: Doom) -> None:
        """Tell the start with this token to end."""
        self._memory[self._base + _DOOM_AT] = why
        self._put(_DOOMED_AT, token)

    def doom_of(self, token: str) -> Doom | None:
        """Why the start with this token must end; ``None`` if it need not."""
        if self._token(_DOOMED_AT) != token:
            return None
        return Doom(self._memory[self._base + _DOOM_AT])

    def _at(self, place: int) -> slice:
        return slice(self._base + place, self._base + place + TOKEN_BYTES)

    def _token(self, place: int) -> str:
        return bytes(self._memory[self._at(place)]).rstrip(b"\0").decode("ascii", "replace")

    def _put(self, place: int, token: str) -> None:
        self._memory[self._at(place)] = token.encode("ascii", "replace")[:TOKEN_BYTES].ljust(TOKEN_BYTES, b"\0")


class Slots:
    """All slots of a worker. To be made before the pool forks: a child that is started otherwise has none.

    Attributes:
        main_pid: The process that has made it.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SLOTS * SLOT_BYTES)
        self._mine: tuple[int, Slot | None] = (0, None)
        self.main_pid = os.getpid()

    @property
    def mine(self) -> Slot | None:
        """This process's slot, claimed at first use; ``None`` in the odd case that all its places are taken."""
        pid = os.getpid()
        if self._mine[0] != pid:
            self._mine = (pid, self._claim(pid))
        return self._mine[1]

    def of(self, pid: int | None) -> Slot | None:
        """The slot that a process has claimed, if it did."""
        return next((slot for slot in self._places(pid) if slot.pid == pid), None) if pid else None

    @property
    def is_draining(self) -> bool:
        """The worker stops: no start may begin any more."""
        return bool(self._memory[_DRAINING_AT])

    def drain(self) -> None:
        """Stop to begin. Safe in a signal handler: one byte is written."""
        self._memory[_DRAINING_AT] = 1

    @property
    def is_silent(self) -> bool:
        """The store did not answer the last heartbeat."""
        return bool(self._memory[_SILENT_AT])

    def tell_silent(self, silent: bool) -> None:  # the state itself
        """Whether the store answers."""
        self._memory[_SILENT_AT] = silent

    @property
    def confirmed_at(self) -> float:
        """Unix seconds at which main last began a heartbeat that was answered; 0 before the first."""
        return float(_MOMENT.unpack_from(self._memory, _CONFIRMED_AT)[0])

    def confirm(self, at: float) -> None:
        """A heartbeat that began then was answered."""
        _MOMENT.pack_into(self._memory, _CONFIRMED_AT, at)

    def _claim(self, pid: int) -> Slot | None:
        for slot in self._places(pid):
            if slot.pid in (0, pid) or not _lives(slot.pid):
                slot.claim(pid)
                if slot.pid == pid:  # another process may have claimed it at the same moment
                    return slot
        return None

    def _places(self, pid: int | None) -> list[Slot]:
        # The first one is main's.
        return [Slot(self._memory, (1 + ((pid or 0) + n) % (SLOTS - 1)) * SLOT_BYTES) for n in range(PROBES)]


def encode_progress(progress: Any) -> bytes:
    """A progress as JSON.

    Raises:
        ValueError: it is no JSON, or too long: keep a position, not the data.
    """
    try:
        text = json.dumps(progress).encode()
    except TypeError as exc:
        raise ValueError(f"heartbeat(progress): {progress!r} is nothing that JSON can hold") from exc
    if len(text) > MAX_PROGRESS_BYTES:
        raise ValueError(
            f"heartbeat(progress): {len(text)} bytes of JSON, at most {MAX_PROGRESS_BYTES} fit: keep a position only"
        )
    return text


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
