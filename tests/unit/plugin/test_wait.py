"""An idle worker hears of a message at once, asks seldom, and never turns in a busy loop."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_selfheal.plugin.brokers import wait
from celery_selfheal.plugin.brokers.wait import OVERDUE_SECONDS, PAUSES_SECONDS, WAIT_SECONDS, Idle, Waiter

ONE = ["celery"]
PRIORITIES = ["celery", "celery-3", "celery-6", "celery-9"]
IDLE_SECONDS = 20.0
TURNS = 10_000  # far more than any of these loops should need


class FakeServer:
    """Answers what is asked of it when its time has come; knows no order of lists and keeps no messages."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: list[FakeConnection] = []
        self.commands: list[str] = []
        self.knows_blmove = True
        self.is_silent = False
        self.is_down = False

    @property
    def connection_pool(self) -> FakeServer:
        return self

    @property
    def connection_kwargs(self) -> dict[str, Any]:
        return {}

    def connection_class(self) -> FakeConnection:
        self.connections.append(FakeConnection(self, fileno=40 + len(self.connections)))
        return self.connections[-1]


class FakeConnection:
    def __init__(self, server: FakeServer, *, fileno: int) -> None:
        self.server = server
        self._sock: Any = None
        self._fileno = fileno
        self._answers: list[object] = []
        self.is_open = True

    def fileno(self) -> int:
        return self._fileno

    def send_command(self, *command: Any) -> None:
        server = self.server
        if server.is_down:
            raise redis.ConnectionError("down")
        self._sock = self
        server.commands.append(command[0])
        assert command[1] == command[2], "the message must go back where it was"
        if server.is_silent:
            return
        if not server.knows_blmove:
            self.answer(redis.ResponseError("unknown command 'BLMOVE', with args beginning with: 'celery'"))
        else:
            server.world.at(command[5], lambda: self.answer(None))

    def answer(self, reply: object) -> None:
        if self.is_open:
            self._answers.append(reply)
            self.server.world.make_readable(self._fileno)

    def read_response(self) -> object:
        reply = self._answers.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def disconnect(self) -> None:
        self.is_open = False
        self._sock = None
        # As the kernel does, silently.
        self.server.world.watched.discard(self._fileno)


class World:
    """Time, and kombu's event loop in it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = 0
        self.watched: set[int] = set()
        self._readers: dict[int, Callable[[], None]] = {}
        self._readable: set[int] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), callback))

    call_later = at

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.watched.add(fd)
        self._readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        self.watched.discard(fd)
        self._readers.pop(fd, None)

    def make_readable(self, fd: int) -> None:
        self._readable.add(fd)

    def run(self, seconds: float, each_turn: Callable[[], None]) -> None:
        """Turn as kombu's hub does: ask, sleep until something is due, call it."""
        end = self.now + seconds
        while self.now < end:
            self.turns += 1
            assert self.turns < TURNS, "a busy loop"
            each_turn()
            ready = self._readable & self.watched
            if ready:
                self._readable -= ready
                for fd in ready:
                    self._readers[fd]()
                continue
            self.now = min(end, self._timers[0][0] if self._timers else end)
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()


class Looker:
    """The fetch: looks when it may, and finds what it was told that there is."""

    def __init__(self, idle: Idle, lists: list[str], world: World) -> None:
        self.idle = idle
        self.lists = lists
        self.world = world
        self.looks: list[float] = []
        self.message: str | None = None

    def turn(self) -> None:
        self.idle.counts(len(self.lists))
        if self.idle.must_wait():
            return
        self.looks.append(self.world.now)
        if self.message is None:
            self.idle.nothing(self.lists)
        else:
            self.idle.found(self.message)
            self.message = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(wait, "monotonic", lambda: world.now)
    return world


@pytest.fixture
def server(world: World) -> FakeServer:
    return FakeServer(world)


@pytest.fixture
def new_looker(world: World, server: FakeServer) -> Callable[[list[str]], Looker]:
    return lambda lists: Looker(Idle(Waiter(server), hub=world), lists, world)


@pytest.mark.parametrize(("lists", "most_a_second"), [(ONE, 2), (PRIORITIES, 15), (["a", "b", "c"], 15)])
def test_an_idle_worker_asks_seldom(
    lists: list[str],
    most_a_second: int,
    world: World,
    server: FakeServer,
    new_looker: Callable[[list[str]], Looker],
) -> None:
    looker = new_looker(lists)

    world.run(IDLE_SECONDS, looker.turn)

    asked = len(looker.looks) + len(server.commands)
    assert 0 < asked / IDLE_SECONDS <= most_a_second
    # Each look, and each wait that ends, costs few turns of the loop.
    assert world.turns <= 4 * asked


def test_an_idle_worker_without_a_loop_asks_seldom(
    world: World, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def select(sockets: list[Any], _writing: list[Any], _failing: list[Any], pause: float) -> Any:
        world.now += min(pause, WAIT_SECONDS)
        (socket,) = sockets
        socket._answers.append(None)
        return [socket], [], []

    monkeypatch.setattr(wait.select, "select", select)
    looker = Looker(Idle(Waiter(server), hub=None), ONE, world)
    began = world.now

    while world.now - began < IDLE_SECONDS:
        looker.turn()

    assert 0 < (len(looker.looks) + len(server.commands) - 2) / IDLE_SECONDS <= 2


@pytest.mark.parametrize("lists", [ONE, PRIORITIES])
def test_a_message_in_the_watched_list_is_looked_for_in_the_same_turn(
    lists: list[str], world: World, server: FakeServer, new_looker: Callable[[list[str]], Looker]
) -> None:
    looker = new_looker(lists)
    world.run(3.3, looker.turn)
    (connection,) = server.connections
    came_at = world.now + 0.001

    world.at(0.001, lambda: (setattr(looker, "message", "celery"), connection.answer(b"message")))
    world.run(0.002, looker.turn)

    assert came_at in looker.looks


def test_the_list_that_had_most_messages_is_watched(
    world: World, new_looker: Callable[[list[str]], Looker], server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send = FakeConnection.send_command
    monkeypatch.setattr(
        FakeConnection, "send_command", lambda self, *command: (asked.append(command[1]), send(self, *command))
    )
    looker = new_looker(["a", "b"])
    for name in ("a", "b", "b"):
        looker.message = name
        world.run(0.5, looker.turn)

    asked.clear()
    world.run(3, looker.turn)

    assert set(asked) == {"b"}


def test_a_message_elsewhere_is_found_by_the_clock(world: World, new_looker: Callable[[list[str]], Looker]) -> None:
    looker = new_looker(PRIORITIES)
    world.run(5, looker.turn)
    came_at = world.now
    looker.message = "celery-9"

    world.run(1, looker.turn)

    assert looker.message is None
    assert min(look for look in looker.looks if look >= came_at) - came_at <= PAUSES_SECONDS[-1] + 0.001


@pytest.mark.parametrize("lists", [ONE, PRIORITIES])
def test_a_server_that_cannot_wait_is_looked_at_by_the_clock(
    lists: list[str], world: World, server: FakeServer, new_looker: Callable[[list[str]], Looker]
) -> None:
    server.knows_blmove = False
    looker = new_looker(lists)

    world.run(IDLE_SECONDS, looker.turn)

    assert server.commands == ["BLMOVE"]
    pauses = [later - earlier for earlier, later in itertools.pairwise(looker.looks)]
    assert max(pauses) == pytest.approx(PAUSES_SECONDS[-1])
    assert len(looker.looks) / IDLE_SECONDS <= 15


def test_a_wait_that_cannot_begin_again_is_made_up_for_by_the_clock(
    world: World, server: FakeServer, new_looker: Callable[[list[str]], Looker]
) -> None:
    looker = new_looker(ONE)
    world.run(3.3, looker.turn)
    looked = len(looker.looks)
    server.is_down = True
    server.connections[-1].answer(redis.ConnectionError("closed"))

    world.run(1, looker.turn)
    assert len(looker.looks) - looked >= 5

    server.is_down = False
    world.run(0.2, looker.turn)
    assert server.connections[-1].fileno() in world.watched


def test_a_half_open_connection_is_replaced_and_the_new_one_is_heard(
    world: World, server: FakeServer, new_looker: Callable[[list[str]], Looker]
) -> None:
    looker = new_looker(ONE)
    world.run(0.1, looker.turn)
    server.is_silent = True
    world.run(OVERDUE_SECONDS * 2 + WAIT_SECONDS, looker.turn)
    assert len(server.connections) > 1
    server.is_silent = False
    world.run(OVERDUE_SECONDS * 2, looker.turn)
    *old, connection = server.connections

    looker.message = "celery"
    came_at = world.now
    connection.answer(b"message")
    world.run(0.001, looker.turn)

    assert not any(one.is_open for one in old)
    assert looker.looks[-1] == came_at
    assert world.watched <= {connection.fileno()}


def test_a_full_worker_waits_for_nothing_and_turns_no_more(
    world: World, server: FakeServer, new_looker: Callable[[list[str]], Looker]
) -> None:
    looker = new_looker(ONE)
    world.run(1.5, looker.turn)
    asked = len(server.commands)
    # A message is there, but kombu does not ask the fetch while the prefetch limit is reached.
    server.connections[-1].answer(b"message")
    turns = world.turns

    world.run(IDLE_SECONDS, int)

    assert len(server.commands) == asked
    assert world.turns - turns <= 10


def test_a_worker_that_may_take_nothing_is_woken_when_it_may_again(
    world: World, new_looker: Callable[[list[str]], Looker]
) -> None:
    looker = new_looker(ONE)
    looker.idle.counts(len(ONE))
    looker.idle.not_now(0.1)
    began = world.now

    world.run(2, looker.turn)

    assert looker.looks[0] == pytest.approx(began + 0.1)


def test_what_is_closed_watches_nothing(
    world: World, server: FakeServer, new_looker: Callable[[list[str]], Looker]
) -> None:
    looker = new_looker(ONE)
    world.run(0.1, looker.turn)

    looker.idle.close()

    assert world.watched == set()
    assert not server.connections[-1].is_open


def test_an_added_queue_is_looked_at_at_once_although_the_only_list_was_watched(
    world: World, new_looker: Callable[[list[str]], Looker]
) -> None:
    """Else its first message waits for the clock that a watched list needs seldom."""
    looker = new_looker(ONE)
    world.run(0.5, looker.turn)
    assert looker.idle.must_wait()

    looker.lists = [*ONE, "added"]

    looker.turn()
    assert looker.looks[-1] == world.now
