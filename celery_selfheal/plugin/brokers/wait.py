"""When an idle worker looks for messages: at once when one comes, else seldom."""

from __future__ import annotations

import logging
import select
from collections import Counter
from collections.abc import Sequence
from time import sleep
from typing import Any

from celery_selfheal.clock import monotonic
from celery_selfheal.leases.scripts import RedisError
from celery_selfheal.redis_wire import new_connection

logger = logging.getLogger("celery_selfheal")

PAUSES_SECONDS = (0.02, 0.03, 0.05, 0.07, 0.1)  # between looks at lists that nobody watches, longer each time
WATCHED_PAUSE_SECONDS = 5.0  # between looks while the only list is watched: a half-open connection costs no more
GREEN_PAUSE_SECONDS = 1.0  # a loop without events must turn, or it hears no shutdown
WAIT_SECONDS = 1.0
OVERDUE_SECONDS = 4.0  # after that long without an answer, the connection is half open


class Waiter:
    """Blocks on one list in a connection of its own.

    ``BLMOVE list list RIGHT RIGHT`` puts the message that it takes back where it was, in the same step: list and order
    stay as they are, and every waiter of the list is woken by each message. Servers before Redis 6.2 do not know it;
    then nothing is waited for and the caller's polling has to do.

    Args:
        client: Its pool makes the connection, which is never shared.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._connection: Any = None
        self._asked_at: float | None = None
        self._is_supported = True

    @property
    def socket(self) -> Any:
        """The socket to watch while an answer is due; ``None`` without a connection."""
        return getattr(self._connection, "_sock", None)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""
        return self._asked_at is not None

    @property
    def is_overdue(self) -> bool:
        """Whether an answer should have come long ago: ``begin`` will connect anew."""
        return self._asked_at is not None and monotonic() - self._asked_at >= OVERDUE_SECONDS

    def begin(self, list_key: str) -> bool:
        """Ask for the next message in a list; does nothing while an answer is due. ``False``: cannot wait now."""
        if self.is_waiting and not self.is_overdue:
            return True
        if not self._is_supported:
            return False
        try:
            if self.is_waiting:
                self.close()
            if self._connection is None:
                self._connection = new_connection(self._client.connection_pool)
            self._connection.send_command("BLMOVE", list_key, list_key, "RIGHT", "RIGHT", WAIT_SECONDS)
        except (RedisError, OSError):
            self.close()
            return False
        self._asked_at = monotonic()
        return True

    def read(self) -> bool:
        """Read the answer that has come: whether there is a message."""
        self._asked_at = None
        try:
            return self._connection.read_response() is not None
        except (RedisError, OSError) as exc:
            if "unknown command" in str(exc).lower():
                logger.info("this Redis knows no BLMOVE: an idle worker looks for messages ten times a second")
                self._is_supported = False
            self.close()
            return False

    def close(self) -> None:
        """Give the connection up, answer or not: what it asks changes nothing."""
        connection, self._connection, self._asked_at = self._connection, None, None
        if connection is not None:
            connection.disconnect()


class Idle:
    """Keeps the time between two looks.

    The list that is used most is watched by a ``Waiter``; all lists are looked at by the clock.

    Args:
        hub: Kombu's event loop; ``None`` where the consumer polls in a loop of its own (gevent, eventlet) and may
            block.
    """

    def __init__(self, waiter: Waiter, *, hub: Any) -> None:
        self._waiter = waiter
        self._hub = hub
        self._next_look = 0.0
        self._looks = 0
        self._lists = 0
        self._uses: Counter[str] = Counter()
        self._watched: str | None = None
        self._watched_fd: int | None = None
        self._wake_at = float("inf")

    def found(self, list_key: str) -> None:
        """There was a message: look again at once."""
        self._uses[list_key] += 1
        self._looks, self._next_look = 0, 0.0

    def nothing(self, lists: Sequence[str]) -> None:
        """All lists were empty."""
        self._watched = max(lists, key=lambda one: self._uses[one])
        if self._waiter.is_overdue:
            # Before its socket is closed: the next one may get the same number, and nobody would hear it.
            self._unlisten()
        is_watched = self._waiter.begin(self._watched)
        if is_watched and len(lists) == 1:
            seconds = WATCHED_PAUSE_SECONDS if self._hub is not None else GREEN_PAUSE_SECONDS
        else:
            seconds = PAUSES_SECONDS[min(self._looks, len(PAUSES_SECONDS) - 1)]
            self._looks += 1
        self._put_off(seconds)
        if is_watched:
            self._listen()

    def not_now(self, seconds: float) -> None:
        """Taking is not allowed at present: no look before ``seconds``, whatever comes."""
        self._put_off(seconds)

    def counts(self, lists: int) -> None:
        """So many lists are to be looked at: where a queue was added, the last look says nothing about it."""
        if lists != self._lists:
            self._lists, self._next_look = lists, 0.0

    def must_wait(self) -> bool:
        """Whether it is too early to look. Without an event loop this waits, and then it never is."""
        pause = self._next_look - monotonic()
        if pause <= 0:
            return False
        if self._hub is not None:
            self._wake_in(pause)
            return True
        self._wait_here(pause)
        return False

    def close(self) -> None:
        """Stop watching."""
        self._unlisten()
        self._waiter.close()

    def _put_off(self, seconds: float) -> None:
        self._next_look = monotonic() + seconds
        if self._hub is not None:
            # Asked for now: a turn of the loop reckons its sleep before it calls us, and would sleep through a timer
            # that is set in it, for up to a second.
            self._wake_in(seconds)

    def _wake_in(self, seconds: float) -> None:
        wake_at = monotonic() + seconds
        if wake_at < self._wake_at:
            self._wake_at = wake_at
            self._hub.call_later(seconds, self._woken)

    def _woken(self) -> None:
        # That the loop turns is enough: it asks again at the start of each turn.
        self._wake_at = float("inf")

    def _listen(self) -> None:
        if self._hub is None or self._watched_fd is not None or self._waiter.socket is None:
            return
        self._watched_fd = self._waiter.socket.fileno()
        self._hub.add_reader(self._watched_fd, self._readable)

    def _unlisten(self) -> None:
        if self._watched_fd is not None:
            self._hub.remove_reader(self._watched_fd)
            self._watched_fd = None

    def _readable(self) -> None:
        # Before the read: it may close the socket, and its number may then be another's.
        self._unlisten()
        if self._waiter.read():
            self._next_look = 0.0
        elif self._watched is not None and self._waiter.begin(self._watched):
            self._listen()
        else:
            # The last look put the next one off for as long as somebody watches, and nobody does.
            self._looks = 0
            self._put_off(PAUSES_SECONDS[0])

    def _wait_here(self, pause: float) -> None:
        socket = self._waiter.socket
        if not self._waiter.is_waiting or socket is None:
            sleep(pause)
            return
        readable, _, _ = select.select([socket], [], [], pause)
        if readable:
            self._waiter.read()
