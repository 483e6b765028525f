"""Whatever a worker does when it is killed, each message is somewhere; on Celery as it is, some are nowhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from integration.fetch.mill import Mill

SEED = 20_260_901
BACKLOG_TASKS = 400  # more than a victim does before its kill, so that it is busy then
LONGEST_LIFE_SECONDS = 0.25
TASK_SECONDS = 0.002
SETTLED_SECONDS = 1.0


def busy_kills(mill: Mill, rounds: int) -> None:
    """Kill one busy worker after the other, each a random moment after its first start; then let one do the rest."""
    chance = random.Random(SEED)
    mill.start_healer()
    for n in range(rounds):
        victim = mill.start(f"victim-{n}", concurrency=2, prefetch=8, ready=False, args=["-l", "WARNING"])
        mill.send(max(0, BACKLOG_TASKS - mill.redis.llen("celery")), args=(TASK_SECONDS,))
        started = len(mill.diary.ids("start"))
        mill.wait("it is busy", lambda started=started: len(mill.diary.ids("start")) > started)
        time.sleep(chance.uniform(0, LONGEST_LIFE_SECONDS))
        victim.kill_group()
        assert mill.redis.llen("celery"), "the victim was not busy when it was killed"
        mill.workers.remove(victim)
    mill.start("last", concurrency=2, prefetch=8, ready=False, args=["-l", "WARNING"])


def paused_kills(mill: Mill, rounds: int) -> None:
    """Publish to an idle worker that is paused and then killed; then let another one do what is left."""
    mill.start_healer()
    for n in range(rounds):
        victim = mill.start(f"victim-{n}")
        mill.wait("it has done what was left", lambda: not mill.redis.llen("celery"))
        mill.wait_idle(workers=2)
        victim.pause()
        mill.send()
        victim.kill_group()
        mill.workers.remove(victim)
    mill.start("last")


def wait_settled(mill: Mill) -> None:
    """Wait until the list is empty and no task has ended for a while: whoever is left has done what is left."""
    ended, since = -1, time.monotonic()

    def is_settled() -> bool:
        nonlocal ended, since
        now_ended = len(mill.diary.ids("end"))
        if mill.redis.llen("celery") or now_ended != ended:
            ended, since = now_ended, time.monotonic()
        return time.monotonic() - since > SETTLED_SECONDS

    mill.wait("everything settles", is_settled)


def check_none_lost(mill: Mill, rounds: int, record_property: Callable[[str, object], None]) -> None:
    mill.wait_drained()
    again = len(mill.diary.ids("start")) - len(mill.sent)
    record_property("figures", f"{rounds} kills (seed {SEED}), {len(mill.sent)} messages, {again} second starts")
    assert mill.lost() == set()
    assert mill.dead() == []
    assert set(mill.diary.ids("end")) == set(mill.sent)


def test_a_busy_worker_that_is_killed_loses_no_message(
    mill: Mill, rounds: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    count = rounds(6)

    busy_kills(mill, count)

    check_none_lost(mill, count, record_property)


def test_an_idle_worker_that_is_killed_while_a_message_reaches_it_loses_none(
    mill: Mill, rounds: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    count = rounds(2)

    paused_kills(mill, count)

    check_none_lost(mill, count, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_of_a_busy_worker_lose_no_message(
    mill: Mill, rounds: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    count = rounds(200)

    busy_kills(mill, count)

    check_none_lost(mill, count, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_of_a_paused_idle_worker_lose_no_message(
    mill: Mill, rounds: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    count = rounds(20)

    paused_kills(mill, count)

    check_none_lost(mill, count, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kills", "usual"), [(busy_kills, 40), (paused_kills, 5)], ids=["busy", "paused"])
def test_the_same_kills_lose_messages_on_celery_as_it_is(
    kills: Callable[[Mill, int], None],
    usual: int,
    new_mill: Callable[..., Mill],
    rounds: Callable[[int], int],
    record_property: Callable[[str, object], None],
) -> None:
    """The control: without it, nobody would know that the tests above can see a loss."""
    mill = new_mill(stock=True, selfheal_redis_reliable_fetch=False)
    count = rounds(usual)

    kills(mill, count)
    wait_settled(mill)

    lost = mill.lost()
    record_property("figures", f"{count} kills (seed {SEED}), {len(mill.sent)} messages, {len(lost)} lost")
    assert lost
