"""The ticker runs each step at its interval, whatever the others do."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from celery_selfheal import clock, ticker
from celery_selfheal.ticker import Step, Ticker

SECOND = timedelta(seconds=1)
NOW = timedelta(0)
PATIENCE = timedelta(seconds=10)


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(clock, "monotonic", fake)
    return fake


class Stage:
    """Steps that note when they ran; no thread, unless a test starts one."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.loops: list[Callable[[], None]] = []
        self.ticker: Ticker

    def step(self, name: str, *, seconds: float = 1.0, does: Callable[[], object] = lambda: None) -> Step:
        def run() -> object:
            self.ran.append(name)
            return does()

        return Step(name, run, timedelta(seconds=seconds))

    def build(self, *steps: Step) -> Ticker:
        self.ticker = Ticker(
            list(steps),
            start_thread=self.loops.append,
            farewell=lambda: self.ran.append("farewell"),
        )
        return self.ticker

    def run_loop(self) -> None:
        """What the thread would do, here and now; ends since it was told to."""
        self.ticker.stop(timeout=NOW)
        self.loops.pop()()


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_each_step_runs_at_its_own_interval(stage: Stage, time: FakeClock) -> None:
    running = stage.build(stage.step("beat", seconds=3), stage.step("sweep", seconds=2))
    for _ in range(13):
        running.run_due(now=time.now)
        time.now += 1

    assert (stage.ran.count("beat"), stage.ran.count("sweep")) == (5, 7)


def test_pause_lasts_until_the_next_step_is_due(stage: Stage, time: FakeClock) -> None:
    running = stage.build(stage.step("beat", seconds=3), stage.step("sweep", seconds=2))

    assert running.run_due(now=time.now) == 2
    time.now += 1.5
    assert running.run_due(now=time.now) == 0.5
    time.now += 5
    assert running.run_due(now=time.now) == 2
    assert stage.ran == ["beat", "sweep"] * 2


def test_interval_begins_when_a_step_ends(stage: Stage, time: FakeClock) -> None:
    """A slow store must not be asked again at once."""

    def takes_long() -> None:
        time.now += 10

    running = stage.build(stage.step("slow", seconds=3, does=takes_long))

    assert running.run_due(now=time.now) == 3


def test_step_that_asks_for_another_turn_gets_it_after_the_others(stage: Stage, time: FakeClock) -> None:
    """A sweep with more to do must not hold up the heartbeat."""
    answers = iter([True, True, None])
    running = stage.build(stage.step("sweep", does=lambda: next(answers)), stage.step("beat", seconds=0.0))

    pauses = [running.run_due(now=time.now) for _ in range(3)]

    assert stage.ran == ["sweep", "beat"] * 3
    assert pauses == [0, 0, 0]
    time.now += 0.5
    running.run_due(now=time.now)
    assert stage.ran[6:] == ["beat"]


@pytest.mark.parametrize("answer", [1, "yes", object(), False, None])
def test_only_true_asks_for_another_turn(stage: Stage, time: FakeClock, answer: object) -> None:
    running = stage.build(stage.step("sweep", does=lambda: answer))

    assert running.run_due(now=time.now) == 1


def test_step_that_fails_is_logged_and_stops_nobody(
    stage: Stage, time: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ValueError("out of order")

    running = stage.build(stage.step("beat", does=fails), stage.step("sweep"))
    for _ in range(2):
        running.run_due(now=time.now)
        time.now += 1

    assert stage.ran == ["beat", "sweep"] * 2
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "beat failed" in caplog.text
    assert "out of order" in caplog.text


def test_all_steps_run_at_the_start_and_the_farewell_at_the_end(stage: Stage, time: FakeClock) -> None:
    stage.build(stage.step("beat"), stage.step("sweep")).start()

    stage.run_loop()

    assert stage.ran == ["beat", "sweep", "farewell"]


def test_farewell_that_fails_ends_the_thread_all_the_same(time: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    loops: list[Callable[[], None]] = []

    def fails() -> None:
        raise ValueError("no answer")

    running = Ticker([Step("beat", lambda: None, SECOND)], start_thread=loops.append, farewell=fails)
    running.start()
    running.stop(timeout=NOW)

    loops[0]()

    assert "farewell failed" in caplog.text


def test_second_start_begins_nothing(stage: Stage) -> None:
    running = stage.build(stage.step("beat"))

    running.start()
    running.start()

    assert len(stage.loops) == 1


def test_wake_ups_that_come_while_the_thread_is_busy_are_one(stage: Stage, time: FakeClock) -> None:
    """A thousand dead letters are no thousand sweeps, and the order to stop does not wait behind them."""
    running = stage.build(stage.step("beat"), stage.step("sweep"))
    running.start()
    for _ in range(1_000):
        running.wake()

    stage.run_loop()

    assert stage.ran in (["beat", "sweep", "farewell"], ["beat", "sweep"] * 2 + ["farewell"])


def test_wake_up_by_name_runs_that_step_alone(stage: Stage, time: FakeClock) -> None:
    def wakes_another() -> None:
        if stage.ran.count("sweep") == 1:
            stage.ticker.wake("settling")
        else:
            stage.ticker.stop(timeout=NOW)

    def stops() -> None:
        if stage.ran.count("settling") == 2:
            stage.ticker.stop(timeout=NOW)

    steps = [stage.step("settling", does=stops), stage.step("sweep", does=wakes_another)]
    stage.build(*steps).start()

    stage.loops.pop()()

    assert stage.ran == ["settling", "sweep", "settling", "farewell"]


def test_woken_step_waits_its_whole_interval_again(stage: Stage, time: FakeClock) -> None:
    running = stage.build(stage.step("beat", seconds=3))
    running.run_due(now=time.now)
    time.now += 2

    assert running.run_due(now=time.now, asked={"beat"}) == 3
    assert stage.ran == ["beat", "beat"]


def test_stop_before_the_start_and_after_the_end_is_no_wait(stage: Stage) -> None:
    running = stage.build(stage.step("beat"))

    assert running.stop(timeout=PATIENCE)


# -- with a real thread


def start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True).start()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Lets a step that waits for it go on, at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def test_stop_waits_for_the_step_under_way_and_for_the_farewell(gate: threading.Event) -> None:
    ran: list[str] = []
    entered = threading.Event()

    def slow() -> None:
        entered.set()
        gate.wait(10)
        ran.append("slow")

    running = Ticker([Step("slow", slow, SECOND)], start_thread=start_thread, farewell=lambda: ran.append("farewell"))
    running.start()
    assert entered.wait(10)
    threading.Timer(0.05, gate.set).start()

    assert running.stop(timeout=PATIENCE)

    assert ran == ["slow", "farewell"]
    assert running.stop(timeout=NOW), "a second call does nothing"


def test_stop_gives_up_on_a_step_that_hangs(gate: threading.Event) -> None:
    running = Ticker([Step("hangs", lambda: gate.wait(10), SECOND)], start_thread=start_thread)
    running.start()

    assert not running.stop(timeout=timedelta(milliseconds=20))


def test_wake_up_ends_the_pause_at_once() -> None:
    runs: list[None] = []
    ran = threading.Semaphore(0)

    def step() -> None:
        runs.append(None)
        ran.release()

    running = Ticker([Step("beat", step, timedelta(hours=1))], start_thread=start_thread)
    running.start()
    assert ran.acquire(timeout=10)

    running.wake()

    assert ran.acquire(timeout=10)
    assert running.stop(timeout=PATIENCE)
    assert len(runs) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_waits_for_the_step_under_way_and_its_child_has_no_ticker(gate: threading.Event) -> None:
    """A child that inherits half a conversation with the store would go on with it."""
    inside = threading.Event()
    is_inside = [False]

    def step() -> None:
        is_inside[0] = True
        inside.set()
        gate.wait(10)
        is_inside[0] = False

    running = Ticker([Step("beat", step, timedelta(hours=1))], start_thread=start_thread)
    running.start()
    assert inside.wait(10)
    threading.Timer(0.1, gate.set).start()

    pid = os.fork()
    if pid == 0:
        # A step can run in the child, so no lock is held there; and its ticker is none that could be stopped.
        done = not is_inside[0] and running.stop(timeout=NOW) and running.run_due(now=clock.monotonic()) >= 0
        os._exit(0 if done else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert running.stop(timeout=PATIENCE), "the parent's thread goes on"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_does_not_wait_for_ever(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs must not keep the pool from replacing a child."""
    monkeypatch.setattr(ticker, "FORK_PATIENCE_SECONDS", 0.05)
    inside = threading.Event()

    def hangs() -> None:
        inside.set()
        gate.wait(10)

    running = Ticker([Step("hangs", hangs, timedelta(hours=1))], start_thread=start_thread)
    running.start()
    assert inside.wait(10)

    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    gate.set()
    assert running.stop(timeout=PATIENCE), "the lock is still the thread's own"
