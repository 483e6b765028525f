from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import pytest

from celery_selfheal.errors import DeadlineExceeded, LeaseLost
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin import local_bodies, slot_body
from celery_selfheal.plugin.bodies import body_of
from celery_selfheal.plugin.body import Body, HandBack
from celery_selfheal.plugin.local_bodies import LocalBody, ThreadBody
from celery_selfheal.plugin.slot_body import INTERRUPT, SlotBody
from celery_selfheal.plugin.slots import Doom, Slots

PATIENCE_SECONDS = 30


def start(token: str = "t" * 32) -> Start:
    return Start(
        task_id="id", task_name="name", token=token, session="s", attempt="name:0", marker="m", deadline_seconds=3
    )


@pytest.fixture
def slots() -> Slots:
    return Slots()


def doom(slots: Slots, token: str, why: Doom = Doom.SHUTDOWN) -> None:
    slot = slots.mine
    assert slot is not None
    slot.doom(token, why)


def spin() -> NoReturn:
    over = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < over:
        time.sleep(0.001)
    pytest.fail("it was not interrupted")


def interrupt_now() -> None:
    assert INTERRUPT is not None
    os.kill(os.getpid(), INTERRUPT)


def test_outside_of_a_worker_a_body_just_runs() -> None:
    with body_of(start(), None) as body:
        assert body.run(lambda n: n + 1, 1) == 2
        body.check()


def test_in_eager_mode_a_lost_lease_is_the_outer_tasks(slots: Slots) -> None:
    def lose() -> None:
        raise LeaseLost("outer", 1)

    with pytest.raises(LeaseLost, match="outer"), Body(start()) as body:
        body.run(lose)


def test_the_first_thread_is_interrupted_by_a_signal_and_its_start_handed_back(slots: Slots) -> None:
    one = start()
    slot = slots.mine
    assert slot is not None

    def tell_and_spin() -> None:
        assert slot.listens
        doom(slots, one.token)
        interrupt_now()
        spin()

    body = body_of(one, slots)
    assert isinstance(body, SlotBody)
    with pytest.raises(HandBack) as left, body:
        body.run(tell_and_spin)

    assert left.value.doom is Doom.SHUTDOWN
    assert left.value.requeue
    assert slot.returned == one.token


def test_a_signal_for_a_start_that_has_ended_reaches_no_other(slots: Slots) -> None:
    first, second = start("1" * 32), start("2" * 32)
    with body_of(first, slots) as body:
        body.run(int)
    doom(slots, first.token)

    interrupt_now()
    with body_of(second, slots) as body:
        body.run(interrupt_now)
        interrupt_now()

    slot = slots.mine
    assert slot is not None
    assert slot.ended == second.token


def test_a_signal_between_two_bodies_is_heard_by_nobody(slots: Slots) -> None:
    one = start()
    with body_of(one, slots) as body:
        body.run(int)
        doom(slots, one.token)
        interrupt_now()


def test_what_came_before_the_body_began_is_heard_as_it_begins(slots: Slots) -> None:
    one = start()
    ran: list[int] = []
    doom(slots, one.token)

    with pytest.raises(HandBack), body_of(one, slots) as body:
        body.run(ran.append, 1)

    assert ran == []


def test_a_deadline_is_a_failure_as_any_other(slots: Slots) -> None:
    one = start()

    def overrun() -> None:
        doom(slots, one.token, Doom.DEADLINE)
        interrupt_now()
        spin()

    with pytest.raises(DeadlineExceeded, match="longer than its 3 s"), body_of(one, slots) as body:
        body.run(overrun)

    slot = slots.mine
    assert slot is not None
    assert slot.ended == one.token


def test_what_a_body_raises_while_it_cleans_up_makes_no_failure_of_an_interruption(slots: Slots) -> None:
    one = start()

    def clean_up_badly() -> None:
        doom(slots, one.token)
        try:
            interrupt_now()
            spin()
        finally:
            raise ConnectionError("rollback failed")

    with pytest.raises(HandBack), body_of(one, slots) as body:
        body.run(clean_up_badly)


def test_an_exception_of_the_bodys_own_passes(slots: Slots) -> None:
    def fail() -> None:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"), body_of(start(), slots) as body:
        body.run(fail)


def test_nothing_begins_on_a_worker_that_stops(slots: Slots) -> None:
    slots.drain()

    with pytest.raises(HandBack) as left, body_of(start(), slots) as body:
        body.refuse_while_draining()

    assert left.value.doom is Doom.SHUTDOWN


def test_a_handler_of_the_users_is_replaced_only_while_it_is_needed(slots: Slots) -> None:
    assert INTERRUPT is not None
    before = signal.signal(INTERRUPT, signal.SIG_IGN)
    try:
        with body_of(start(), slots) as body:
            body.run(int)
        assert signal.getsignal(INTERRUPT) is slot_body._interrupt
    finally:
        signal.signal(INTERRUPT, before)


def in_thread(run: Callable[[], None]) -> BaseException | None:
    """What ``run`` raises in a thread of its own."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as exc:  # noqa: BLE001  # that is what is asked for
            raised.append(exc)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_a_thread_is_interrupted_when_it_runs_python_code(slots: Slots) -> None:
    one = start()

    def run() -> None:
        with body_of(one, slots) as body:
            assert isinstance(body, ThreadBody)
            threading.Timer(0.1, body.interrupt, [Doom.TAKEN_OVER]).start()
            body.run(spin)

    raised = in_thread(run)

    assert isinstance(raised, HandBack)
    assert raised.doom is Doom.TAKEN_OVER
    assert local_bodies.local == {}


def test_a_thread_that_was_told_too_late_goes_on_unharmed(slots: Slots) -> None:
    """Told while it ends: in no round may what was sent arrive after the body."""

    def run() -> None:
        for n in range(300):
            with body_of(start(f"{n:032d}"), slots) as body:
                assert isinstance(body, ThreadBody)
                teller = threading.Thread(target=body.interrupt, args=[Doom.TAKEN_OVER])
                with suppress(LeaseLost):
                    body.run(teller.start)
                teller.join()
                sum(range(1000))

    assert in_thread(run) is None


def test_check_leaves_a_body_that_nothing_else_can_interrupt(slots: Slots) -> None:
    body = LocalBody(start(), slots)

    body.interrupt(Doom.SHUTDOWN)

    with pytest.raises(HandBack), body:
        body.run(spin)


def test_a_silent_store_is_told_as_unconfirmed(slots: Slots) -> None:
    with body_of(start(), slots) as body:
        assert body.is_confirmed
        slots.tell_silent(True)
        assert not body.is_confirmed
