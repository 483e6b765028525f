"""The same key again, at once or later: one effect, and everybody gets its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from celery import chain, chord

from integration.effects.office import Office

TWINS = 8


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def any_office(request: pytest.FixtureRequest, new_office: Callable[..., Office]) -> Office:
    """An office on Redis with each kind of database."""
    return new_office("redis", database=request.param)


def book_twins(office: Office, rounds: int) -> None:
    """Send each order several times at once, under ids of their own."""
    office.start(concurrency=TWINS, prefetch=1)
    for n in range(rounds):
        sent = [office.ledger.book_order.delay(f"order-{n}") for _ in range(TWINS)]
        assert office.results(sent) == [[f"order-{n}", 1]] * TWINS
    assert office.entries() == Counter(f"order-{n}" for n in range(rounds))
    assert set(office.jobs().values()) == {"COMPLETED"}
    log = office.logs()
    for trouble in ("ERROR", "Traceback", "deadlock"):
        assert trouble not in log


def test_twins_have_one_effect_and_one_result(any_office: Office) -> None:
    book_twins(any_office, 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_twins_have_one_effect_and_one_result_each(any_office: Office, rounds: Callable[[int], int]) -> None:
    book_twins(any_office, rounds(500))


def test_a_failure_rolls_the_effect_back_and_the_retry_has_it(any_office: Office) -> None:
    any_office.start()

    assert any_office.ledger.fail_then_book.apply_async((2,), task_id="late").get(timeout=60) == 2

    assert any_office.entries() == Counter(["late"])


def test_a_duplicate_of_another_id_goes_on_with_its_own_chain(redis_office: Office) -> None:
    office = redis_office
    office.start()
    first = office.ledger.book_order.delay("order").get(timeout=60)

    again = chain(office.ledger.book_order.s("order"), office.ledger.count.s()).apply_async()

    assert first == ["order", 1]
    assert again.get(timeout=60) == 2
    assert office.entries() == Counter(["order"])


def test_a_copy_whose_callbacks_were_sent_sends_them_no_second_time(redis_office: Office) -> None:
    """The done marker alone would end it, so another attempt of the same message is made up: the row must end it."""
    office = redis_office
    office.start()
    sent = chain(office.ledger.book.s(1).set(task_id="first"), office.ledger.add.s(1).set(task_id="then")).apply_async()
    assert sent.get(timeout=60) == 2

    office.ledger.book.apply_async((1,), task_id="first", link=office.ledger.add.s(5).set(task_id="once more"))
    office.ledger.book.apply_async((1,), task_id="last").get(timeout=60)

    office.wait("the queue is empty", office.is_idle)
    assert office.entries() == Counter(["first", "then", "last"])


def test_a_key_with_other_arguments_goes_to_the_dead_letters(redis_office: Office) -> None:
    office = redis_office
    office.start()
    office.ledger.book_order.delay("order", 1).get(timeout=60)

    other = office.ledger.book_order.delay("order", 2)

    with pytest.raises(Exception, match="was used with other arguments before"):
        other.get(timeout=60)
    office.wait("its dead letter", lambda: [one.reason for one in office.dlq.list()] == ["payload_mismatch"])
    assert office.entries() == Counter(["order"])


def test_chord_of_booked_parts_has_the_sum(office: Office) -> None:
    office.start(concurrency=2)

    sent = chord([office.ledger.book.s(n) for n in range(5)])(office.ledger.total.s())

    assert sent.get(timeout=90) == 10
    assert set(office.entries().values()) == {1}
