"""The broker is cut off at the moment of the retry: it is sent later, once."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator

import pytest

from celery_selfheal.leases.scripts import source
from celery_selfheal.testing import TcpProxy
from integration.retries.crew import Bank

SEED = 20_260_702
SETTLE = hashlib.sha1(source("celery_selfheal.sessions", "settle").encode()).hexdigest().encode()


@pytest.fixture
def proxied(new_bank: Callable[[], Bank]) -> Iterator[tuple[Bank, TcpProxy]]:
    bank = new_bank()
    with TcpProxy("127.0.0.1", bank.server.port) as proxy:
        yield bank, proxy
        bank.close()


def cut_at_the_retry(bank: Bank, proxy: TcpProxy, rounds: int, outage: Callable[[random.Random], float]) -> None:
    """Let a body fail while the worker's only way to the broker is cut, for so many seconds."""
    chance = random.Random(SEED)
    bank.start(via=proxy)
    for n in range(rounds):
        task_id, gate = f"pay-{n}", bank.folder / f"gate-{n}"
        bank.send("pay", 2, str(gate), task_id=task_id)
        bank.wait(f"{task_id} runs", lambda task_id=task_id: bank.attempts(task_id))

        proxy.refuse()
        proxy.cut()
        gate.touch()
        bank.wait(f"{task_id} fails", lambda task_id=task_id: bank.counts("fail")[task_id, 0])
        time.sleep(outage(chance))
        proxy.refuse(on=False)

        bank.wait_ended([task_id])
        assert bank.attempts(task_id) == [0, 1, 2]
    bank.wait_nothing_left()
    assert set(bank.counts("start").values()) == {1}
    assert all(bank.result(f"pay-{n}") == "paid" for n in range(rounds))


def test_retry_is_sent_once_when_the_broker_is_back(proxied: tuple[Bank, TcpProxy]) -> None:
    cut_at_the_retry(*proxied, rounds=2, outage=lambda chance: chance.uniform(0.5, 1.5))


@pytest.mark.slow
def test_retry_is_sent_once_however_often_the_broker_is_cut(
    proxied: tuple[Bank, TcpProxy], rounds: Callable[[int], int]
) -> None:
    cut_at_the_retry(*proxied, rounds=rounds(100), outage=lambda chance: chance.uniform(0, 3))


def test_retry_whose_confirmation_is_lost_is_not_sent_twice(proxied: tuple[Bank, TcpProxy]) -> None:
    bank, proxy = proxied
    bank.start(via=proxy)
    for n in range(2):
        task_id, gate = f"pay-{n}", bank.folder / f"gate-{n}"
        bank.send("pay", 1, str(gate), task_id=task_id)
        bank.wait(f"{task_id} runs", lambda task_id=task_id: bank.attempts(task_id))

        proxy.drop_reply(request=SETTLE)
        gate.touch()
        bank.wait("a reply is lost", lambda n=n: proxy.replies_dropped == n + 1)

        bank.wait_ended([task_id])
    bank.wait_nothing_left()
    assert set(bank.counts("start").values()) == {1}


def test_failure_during_an_outage_longer_than_the_lease_is_neither_lost_nor_doubled(
    proxied: tuple[Bank, TcpProxy],
) -> None:
    """The pool process gives up after one TTL: the message comes back, and the attempt is made again."""
    bank, proxy = proxied
    bank.settings = {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 1, "selfheal_reaper_interval": 0.5}
    bank.start(via=proxy)
    gate = bank.folder / "gate"
    bank.send("pay", 1, str(gate), task_id="pay")
    bank.wait("it runs", lambda: bank.attempts("pay"))

    proxy.refuse()
    proxy.cut()
    gate.touch()
    bank.wait("it fails", lambda: bank.entries("fail"))
    time.sleep(4)
    proxy.refuse(on=False)

    bank.wait_ended(["pay"])
    bank.wait_nothing_left()
    attempts = bank.attempts("pay")
    assert attempts in ([0, 1], [0, 0, 1])
    assert bank.counts("end") == {("pay", 1): 1}
