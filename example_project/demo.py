"""The director: feeds the orders, strikes the workers on the way, and watches what becomes of it."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from celery import chord, states

from celery_selfheal import SelfHealError
from celery_selfheal.testing.servers import RedisServer
from example_project.app import app
from example_project.display import Display
from example_project.evidence import Started, bookings, is_writable, starts
from example_project.fleet import NAMES, Fleet
from example_project.ledger import Ledger, now_ms
from example_project.orders import Order
from example_project.tasks import charge, close_day, import_statement, receipt, receipt_text
from example_project.verdict import Recovery, Seen, Strike, Verdict, judge, recovery

TICK_SECONDS = 0.05
BUSY_SECONDS = 5  # so long we wait for a worker to be in the middle of something
HEAL_SECONDS = 30  # then the show goes on, and the verdict says that it was not healed
STUCK_SECONDS = 40  # without a single start or end of a task
DRAIN_SECONDS = 15  # for copies of messages that wait for their lease to run out
REDIS_DATABASES = 16


class Director:
    """One run of the demo, in a folder of its own."""

    def __init__(self, orders: Sequence[Order], *, seed: int, folder: Path, display: Display) -> None:
        self._orders = orders
        self._chance = random.Random(seed)
        self._folder = folder
        self._display = display
        database_url = os.environ.get("SHOP_DATABASE_URL", f"sqlite:///{folder / 'ledger.db'}")
        self._ledger = Ledger(database_url)
        self._receipts = folder / "receipts"
        self._env = {"SHOP_DATABASE_URL": database_url, "SHOP_RECEIPTS": str(self._receipts)}
        self._starts: list[Started] = []
        self._strikes: list[Strike] = []
        self._recovered_told = 0
        self._poison_told = 0
        self._day_id = ""
        self._poison_id = ""
        self._moved_at = time.monotonic()
        display.tell(f"seed {seed}")

    def run(self) -> Verdict:
        """Play it. Whatever happens, no process is left when this returns.

        Raises:
            SelfHealError: there is no Redis to be had.
        """
        for name in ("receipts", "redis"):
            (self._folder / name).mkdir()
        self._ledger.create_anew()
        with RedisServer(folder=self._folder / "redis") as server:
            database = _empty_database(server)
            url = server.url(database)
            app.conf.update(broker_url=url, result_backend=url)
            self._client = server.client(database)
            self._fleet = Fleet(self._folder, {**self._env, "SHOP_REDIS_URL": url})
            try:
                self._tell(f"Redis on port {server.port}; starting {len(NAMES)} workers")
                self._fleet.start()
                self._play()
                return judge(self._seen())
            finally:
                self._fleet.stop()
                self._ledger.close()
                # Empty before us, it holds nothing that is not ours.
                self._client.flushdb()
                self._client.close()

    # -- the play

    def _play(self) -> None:
        self._tell(f"workers are ready, here come {len(self._orders)} orders")
        self._day_id = self._feed()
        scenes = self._scenes()
        while self._tick():
            is_over = next(scenes, "over") == "over"
            if is_over and self._is_ready(self._day_id) and self._is_ready(self._poison_id):
                break
        give_up_at = time.monotonic() + DRAIN_SECONDS
        while self._left_over() and time.monotonic() < give_up_at:
            self._tick()
        self._tick()

    def _feed(self) -> str:
        """Send all orders and, when the last receipt is written, the close of the day; returns the id of that."""
        steps = [charge.si(asdict(order)) | receipt.si(asdict(order)) for order in self._orders]
        closed = chord(steps)(close_day.s(self._orders[0].date))
        for written in closed.parent:
            for result in (written, written.parent):
                # We look at the books instead; Celery would go on to listen for a thousand results.
                app.backend.on_result_fulfilled(result)
        return str(closed.id)

    def _scenes(self) -> Iterator[None]:
        one, two, three = self._chance.sample(NAMES, 3)
        yield from self._until(self._chance.uniform(0.03, 0.06))
        yield from self._strike("child killed", one, "SIGKILL to a process of {}, in the middle of a charge")
        yield from self._until(self._chance.uniform(0.15, 0.2))
        yield from self._strike("worker killed", two, "SIGKILL to all of {}")
        self._tell("a poison task is sent: it kills whatever process runs it")
        self._poison_id = import_statement.delay("statement-2026-03-14.mt940").id
        yield from self._until(self._chance.uniform(0.3, 0.4))
        yield from self._strike("worker paused", three, "SIGSTOP to all of {}: no sign of life, and not dead")
        self._fleet.resume(three)
        self._tell(f"SIGCONT to {three}: it goes on with what is not its own any more", "yellow")

    def _until(self, share: float) -> Iterator[None]:
        while self._count_ended("charge") < share * len(self._orders):
            yield

    def _strike(self, what: str, name: str, words: str) -> Iterator[None]:
        give_up_at = time.monotonic() + BUSY_SECONDS
        while not (running := self._running(name)) and time.monotonic() < give_up_at:
            yield
        if what == "child killed":
            pid = running[-1].pid if running else self._fleet.workers[name].child_pids()[0]
            strike = self._timed(what, name, pid, lambda: self._fleet.kill_child(name, pid))
        elif what == "worker killed":
            strike = self._timed(what, name, None, lambda: self._fleet.kill(name))
        else:
            strike = self._timed(what, name, None, lambda: self._fleet.pause(name))
            while not is_writable(self._ledger.engine):
                # A writer that stands still keeps SQLite's one write lock from all others: that is another story.
                self._fleet.resume(name)
                yield
                strike = self._timed(what, name, None, lambda: self._fleet.pause(name))
        self._strikes.append(strike)
        self._tell(words.format(name), "bold red")
        give_up_at = time.monotonic() + HEAL_SECONDS
        while not (healed := self._recovery(strike)).held or healed.missing:
            if not healed.held and not self._left_over():
                self._tell(f"{name} held nothing: too few orders are left", "yellow")
                return
            if time.monotonic() > give_up_at:
                self._tell(f"{name} is not healed: {len(healed.missing)} of {healed.held} still wait", "bold red")
                return
            yield
        self._tell(f"healed: what {name} held has started again, {healed.seconds:.1f} s after the strike", "bold green")

    def _timed(self, what: str, name: str, pid: int | None, act: Callable[[], None]) -> Strike:
        from_ms = now_ms()
        act()
        return Strike(what=what, worker=name, pid=pid, from_ms=from_ms, until_ms=now_ms())

    # -- what is to be seen

    def _tick(self) -> bool:
        """Look at everything once; ``False`` if nothing has moved for too long."""
        time.sleep(TICK_SECONDS)
        for news in self._fleet.look():
            self._tell(news, "cyan")
        before, self._starts = self._work(), starts(self._ledger.engine)
        if before != self._work():
            self._moved_at = time.monotonic()
        fresh = self._fleet.recovered[self._recovered_told :]
        self._recovered_told += len(fresh)
        for (worker, task), count in Counter((one.worker, one.task) for one in fresh).items():
            self._tell(f"back in the queue: {count} x {task}, held by {worker}", "green")
        poison_starts = [start for start in self._starts if start.task_id == self._poison_id]
        for start in poison_starts[self._poison_told :]:
            self._poison_told += 1
            self._tell(f"poison task, start {self._poison_told}: a process of {start.worker} is dead", "magenta")
        self._display.update(
            self._count_ended("charge"),
            self._count_ended("receipt"),
            self._fleet.states,
            Counter(start.worker for start in self._starts),
        )
        return time.monotonic() - self._moved_at < STUCK_SECONDS

    def _tell(self, text: str, style: str = "") -> None:
        self._display.tell(text, style)

    def _count_ended(self, task: str) -> int:
        return len({start.subject for start in self._starts if start.task == task and start.ended_ms})

    def _work(self) -> list[Started]:
        """All starts but those of the poison task: a task that is started for ever is no progress."""
        return [start for start in self._starts if start.task_id != self._poison_id]

    def _is_ready(self, task_id: str) -> bool:
        return app.backend.get_state(task_id) in states.READY_STATES

    def _running(self, name: str) -> list[Started]:
        """Charges that are under way in a worker."""
        pids = self._fleet.workers[name].child_pids()
        return [
            start
            for start in starts(self._ledger.engine)
            if start.task == "charge" and start.ended_ms is None and start.worker == name and start.pid in pids
        ]

    def _recovered(self, strike: Strike) -> set[str]:
        held = {one.task_id for one in self._fleet.recovered if one.worker == strike.worker}
        return held - {self._poison_id}

    def _recovery(self, strike: Strike) -> Recovery:
        return recovery(strike, self._work(), self._recovered(strike))

    def _left_over(self) -> int:
        # As kombu names them: what waits in a queue, and what was taken and not acknowledged.
        waiting = sum(self._client.llen(queue.name) for queue in app.conf.task_queues)
        return waiting + self._client.hlen("unacked")

    def _seen(self) -> Seen:
        right = {
            order.number
            for order in self._orders
            if (path := self._receipts / f"{order.number}.txt").exists()
            and path.read_text(encoding="utf-8") == receipt_text(asdict(order))
        }
        backend = app.backend
        is_closed = backend.get_state(self._day_id) == states.SUCCESS
        poison_state, poison_result = backend.get_state(self._poison_id), backend.get_result(self._poison_id)
        return Seen(
            orders=self._orders,
            bookings=bookings(self._ledger.engine),
            receipts=right,
            starts=starts(self._ledger.engine),
            strikes=self._strikes,
            recovered=[self._recovered(strike) for strike in self._strikes],
            day_total=backend.get_result(self._day_id) if is_closed else None,
            poison_id=self._poison_id,
            poison_outcome=f"{poison_state} {type(poison_result).__name__}",
            left_over=self._left_over(),
            own_deaths=self._fleet.own_deaths,
        )


def _empty_database(server: RedisServer) -> int:
    """Number of a database that nobody uses: the server may be one that was given to us."""
    for number in range(REDIS_DATABASES):
        with server.client(number) as client:
            if client.dbsize() == 0:
                return number
    raise SelfHealError("all databases of this Redis are in use")
