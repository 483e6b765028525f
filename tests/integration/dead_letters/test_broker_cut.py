"""The broker is cut off at the moment of the dead letter: it is sent later, once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from celery_selfheal.testing import TcpProxy
from integration.dead_letters.desk import Desk

SEED = 20_260_702


def cut_at_the_dead_letter(desk: Desk, rounds: int, outage: Callable[[random.Random], float]) -> None:
    """Let a body fail for good while the worker's only way to the broker is cut, for so many seconds."""
    chance = random.Random(SEED)
    ids = [f"order-{n}" for n in range(rounds)]
    with TcpProxy("127.0.0.1", desk.broker_port) as proxy:
        worker = desk.start(via=proxy)
        for n, task_id in enumerate(ids):
            told = desk.folder / f"told-{n}"
            desk.orders.charge_when_told.apply_async((str(told),), task_id=task_id)
            desk.wait(f"{task_id} runs", lambda task_id=task_id: desk.events()[task_id])

            proxy.refuse()
            proxy.cut()
            told.touch()
            desk.wait(f"{task_id} fails", lambda task_id=task_id: desk.events("fail")[task_id])
            time.sleep(outage(chance))
            proxy.refuse(on=False)

            desk.wait(f"{task_id} is dead", lambda n=n: {one.id for one in desk.dlq.list()} == set(ids[: n + 1]))
        desk.wait("nothing waits", lambda: desk.deliveries(desk.queue) == [])
        worker.stop(grace=30)
    lying = Counter(letter["headers"]["id"] for letter in desk.deliveries(desk.dlq_name))
    assert lying == Counter(ids)
    assert desk.deliveries(desk.queue) == []
    assert desk.events() == Counter(ids)


def test_dead_letter_is_sent_once_when_the_broker_is_back(desk: Desk) -> None:
    cut_at_the_dead_letter(desk, rounds=2, outage=lambda chance: chance.uniform(0.5, 1.5))


@pytest.mark.slow
def test_dead_letter_is_sent_once_however_often_the_broker_is_cut(desk: Desk, rounds: Callable[[int], int]) -> None:
    cut_at_the_dead_letter(desk, rounds=rounds(100), outage=lambda chance: chance.uniform(0, 3))
