"""The director: feeds the orders, strikes the workers on the way, and waits for what becomes of it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from celery import chord, states

from celery_selfheal import SelfHealError
from celery_selfheal.testing.servers import RedisServer
from example_project.app import app
from example_project.display import Display
from example_project.evidence import bookings, is_writable, starts
from example_project.fleet import NAMES, Fleet
from example_project.ledger import Ledger, now_ms
from example_project.orders import Order
from example_project.strikes import Strike
from example_project.tasks import charge, close_day, import_statement, receipt, receipt_text
from example_project.verdict import Seen, Verdict, judge
from example_project.watch import Watch

TICK_SECONDS = 0.05
BUSY_SECONDS = 5  # so long we wait for a worker to be in the middle of something
HEAL_SECONDS = 30  # then the show goes on, and the verdict says that it was not healed
DRAIN_SECONDS = 15  # for copies of messages that wait until a lease has run out
REDIS_DATABASES = 16


class Director:
    """One run of the demo, in a folder of its own."""

    def __init__(self, orders: Sequence[Order], *, seed: int, folder: Path, display: Display) -> None:
        self._orders = orders
        self._chance = random.Random(seed)
        self._folder = folder
        self._receipts = folder / "receipts"
        self._database_url = os.environ.get("SHOP_DATABASE_URL", f"sqlite:///{folder / 'ledger.db'}")
        self._ledger = Ledger(self._database_url)
        self._strikes: list[Strike] = []
        self._tell = display.tell
        self._display = display
        display.tell(f"seed {seed}")

    def run(self) -> Verdict:
        """Play it. Whatever happens, no process is left when this returns.

        Raises:
            SelfHealError: there is no Redis to be had.
            OSError: a worker did not start.
        """
        for name in ("receipts", "redis"):
            (self._folder / name).mkdir()
        self._ledger.create_anew()
        with RedisServer(folder=self._folder / "redis") as server:
            database = _empty_database(server)
            url = server.url(database)
            app.conf.update(broker_url=url, result_backend=url)
            env = {"SHOP_REDIS_URL": url, "SHOP_DATABASE_URL": self._database_url, "SHOP_RECEIPTS": str(self._receipts)}
            client = server.client(database)
            self._fleet = Fleet(self._folder, env)
            self._watch = Watch(self._ledger, self._fleet, client, self._display)
            try:
                self._tell(f"Redis on port {server.port}; starting {len(NAMES)} workers")
                self._fleet.start()
                return judge(self._seen(self._play()))
            finally:
                self._fleet.stop()
                self._ledger.close()
                # Celery listens for the results of all tasks that we sent, and would say good-bye to a server that has
                # gone when this process ends.
                app.backend.result_consumer.subscribed_to.clear()
                # Empty before us, it holds nothing that is not ours.
                client.flushdb()
                client.close()

    def _play(self) -> str:
        """Feed the orders, play all scenes, wait for the end; returns the id of the close of the day."""
        self._tell(f"workers are ready, here come {len(self._orders)} orders")
        day_id = self._feed()
        scenes = self._scenes()
        while not self._watch.is_stuck:
            self._tick()
            if next(scenes, "over") == "over" and self._watch.are_ready(day_id, self._watch.poison_id):
                break
        give_up_at = time.monotonic() + DRAIN_SECONDS
        while self._watch.left_over() and time.monotonic() < give_up_at:
            self._tick()
        self._tick()
        return day_id

    def _tick(self) -> None:
        time.sleep(TICK_SECONDS)
        self._watch.look()

    def _feed(self) -> str:
        """Send all orders and, when the last receipt is written, the close of the day; returns the id of that."""
        steps = [charge.si(asdict(order)) | receipt.si(asdict(order)) for order in self._orders]
        return str(chord(steps)(close_day.s(self._orders[0].date)).id)

    # -- scenes: generators that are continued after each look

    def _scenes(self) -> Iterator[None]:
        one, two, three = self._chance.sample(NAMES, 3)
        yield from self._until(self._chance.uniform(0.03, 0.06))
        yield from self._kill_child(one)
        yield from self._until(self._chance.uniform(0.15, 0.2))
        yield from self._kill(two)
        self._tell("a poison task is sent: it kills whatever process runs it")
        self._watch.poison_id = import_statement.delay("statement-2026-03-14.mt940").id
        yield from self._until(self._chance.uniform(0.3, 0.4))
        yield from self._pause(three)

    def _until(self, share: float) -> Iterator[None]:
        while self._watch.count_ended("charge") < share * len(self._orders):
            yield

    def _kill_child(self, name: str) -> Iterator[None]:
        pid = yield from self._busy_child(name)
        strike = _timed(lambda: self._fleet.kill_child(name, pid), what="child killed", worker=name, pid=pid)
        yield from self._healed(strike, f"SIGKILL to a process of {name}, in the middle of a charge")

    def _kill(self, name: str) -> Iterator[None]:
        yield from self._busy(name)
        strike = _timed(lambda: self._fleet.kill(name), what="worker killed", worker=name)
        yield from self._healed(strike, f"SIGKILL to all of {name}")

    def _pause(self, name: str) -> Iterator[None]:
        while True:
            yield from self._busy(name)
            strike = _timed(lambda: self._fleet.pause(name), what="worker paused", worker=name, goes_on=True)
            if is_writable(self._ledger.engine):
                break
            # A writer that stands still keeps SQLite's one write lock from all others: that is another story.
            self._fleet.resume(name)
        yield from self._healed(strike, f"SIGSTOP to all of {name}: no sign of life, and not dead")
        self._fleet.resume(name)
        self._tell(f"SIGCONT to {name}: it goes on with what is not its own any more", "yellow")

    def _busy(self, name: str) -> Iterator[None]:
        """Wait until a worker is in the middle of a charge, if it will be."""
        give_up_at = time.monotonic() + BUSY_SECONDS
        while not self._watch.running(name) and time.monotonic() < give_up_at:
            yield

    def _busy_child(self, name: str) -> Generator[None, None, int]:
        """Hold a process that is in the middle of a charge, so that it cannot get to its end before the blow."""
        give_up_at = time.monotonic() + BUSY_SECONDS
        while time.monotonic() < give_up_at:
            for start in self._watch.running(name):
                self._fleet.hold_child(start.pid)
                if start in self._watch.running(name):
                    return start.pid
                self._fleet.release_child(start.pid)
            yield
        return self._fleet.workers[name].child_pids()[0]

    def _healed(self, strike: Strike, words: str) -> Iterator[None]:
        """Wait until all that a strike has hit was started again."""
        self._strikes.append(strike)
        self._tell(words, "bold red")
        give_up_at = time.monotonic() + HEAL_SECONDS
        while not (healed := self._watch.recovery(strike)).held or healed.missing:
            if not healed.held and not self._watch.left_over():
                self._tell(f"{strike.worker} held nothing: too few orders are left", "yellow")
                return
            if time.monotonic() > give_up_at:
                self._tell(f"not healed: {len(healed.missing)} of {healed.held} still wait", "bold red")
                return
            yield
        self._tell(f"healed: all that {strike.worker} held runs again, {healed.seconds:.1f} s later", "bold green")

    # -- what has come of it

    def _seen(self, day_id: str) -> Seen:
        backend, watch = app.backend, self._watch
        right = {order.number for order in self._orders if self._has_receipt(order)}
        is_closed = backend.get_state(day_id) == states.SUCCESS
        poison_error = type(backend.get_result(watch.poison_id)).__name__
        return Seen(
            orders=self._orders,
            bookings=bookings(self._ledger.engine),
            receipts=right,
            starts=starts(self._ledger.engine),
            strikes=self._strikes,
            recovered=[watch.ids(strike, "recovered") for strike in self._strikes],
            stalled=[watch.ids(strike, "stalled") for strike in self._strikes],
            day_total=backend.get_result(day_id) if is_closed else None,
            poison_id=watch.poison_id,
            poison_outcome=f"{backend.get_state(watch.poison_id)} {poison_error}",
            left_over=watch.left_over(),
            own_deaths=self._fleet.own_deaths,
        )

    def _has_receipt(self, order: Order) -> bool:
        path = self._receipts / f"{order.number}.txt"
        return path.exists() and path.read_text(encoding="utf-8") == receipt_text(asdict(order))


def _timed(act: Callable[[], None], *, what: str, worker: str, pid: int | None = None, goes_on: bool = False) -> Strike:
    from_ms = now_ms()
    act()
    return Strike(what=what, worker=worker, pid=pid, from_ms=from_ms, until_ms=now_ms(), goes_on=goes_on)


def _empty_database(server: RedisServer) -> int:
    """Number of a database that nobody uses: the server may be one that was given to us."""
    for number in range(REDIS_DATABASES):
        with server.client(number) as client:
            if client.dbsize() == 0:
                return number
    raise SelfHealError("all databases of this Redis are in use")
