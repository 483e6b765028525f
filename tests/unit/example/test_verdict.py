from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "example_project"


def load_example_project() -> None:
    """The example is in no wheel, and the checkout must stay off the path: the wheel's package is tested."""
    spec = importlib.util.spec_from_file_location(
        "example_project", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_project"] = module
    spec.loader.exec_module(module)


load_example_project()
evidence, ledger, orders, strikes, verdict = (
    importlib.import_module(f"example_project.{name}")
    for name in ("evidence", "ledger", "orders", "strikes", "verdict")
)
ORDERS = [
    orders.Order("SO-1", "2026-03-14", "Ada", "ada@example.org", "Mug", 1, "EUR", 1000),
    orders.Order("SO-2", "2026-03-14", "Ben", "ben@example.org", "Pan", 2, "USD", 2000),
]
KILLED = strikes.Strike(what="worker killed", worker="w1", pid=None, from_ms=5_000, until_ms=5_010)
CHILD_KILLED = replace(KILLED, what="child killed", pid=7)
PAUSED = replace(KILLED, what="worker paused", goes_on=True)


def started(task_id: str, started_ms: int, ended_ms: int | None, **changes: Any) -> Any:
    start = evidence.Started("charge", task_id, f"order of {task_id}", "w1", 7, started_ms, ended_ms)
    return start._replace(**changes)


def a_good_run() -> Any:
    poison = [started("poison", at_ms, None, task="import_statement") for at_ms in (7_000, 8_000, 9_000)]
    starts = [
        started("one", 4_900, None, subject="SO-1"),
        started("two", 4_000, 4_100, subject="SO-2"),
        started("one", 6_500, 6_600, subject="SO-1", worker="w2"),
    ]
    return verdict.Seen(
        orders=ORDERS,
        bookings=[evidence.Booked("SO-1", "EUR", 1000), evidence.Booked("SO-2", "USD", 2000)],
        receipts={"SO-1", "SO-2"},
        starts=starts + poison,
        strikes=[KILLED],
        recovered=[{"one"}],
        stalled=[{"one"}],
        day_total={"EUR": 1000, "USD": 2000},
        poison_id="poison",
        poison_outcome="FAILURE StalledTooOften",
        left_over=0,
        own_deaths=[],
    )


def test_a_good_run_is_right_and_says_how_long_each_recovery_took():
    found = verdict.judge(a_good_run())

    assert found.is_right
    document = json.loads(json.dumps(found.as_document()))
    assert document["ok"] is True
    assert document["wrong"] == []
    assert document["finished"] == 2
    assert document["started_twice"] == ["charge SO-1"]
    assert document["worker_killed"] == {"worker": "w1", "held": 1, "missing": [], "seconds": 1.5}
    assert document["poison"] == {"outcome": "FAILURE StalledTooOften", "starts": 3}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"receipts": {"SO-1"}}, {"finished", "lost"}),
        ({"bookings": [evidence.Booked("SO-1", "EUR", 1000)]}, {"finished", "lost", "booked"}),
        ({"bookings": [*a_good_run().bookings, evidence.Booked("SO-2", "USD", 2000)]}, {"charged_twice", "booked"}),
        ({"day_total": None}, {"day_total"}),
        ({"day_total": {"EUR": 1000, "USD": 1999}}, {"day_total"}),
        ({"strikes": [], "recovered": [], "stalled": []}, {"started_in_vain"}),
        ({"starts": [start for start in a_good_run().starts if start.worker != "w2"]}, {"worker_killed"}),
        ({"poison_outcome": "PENDING NoneType"}, {"poison"}),
        ({"starts": a_good_run().starts[:-1]}, {"poison"}),
        ({"starts": [*a_good_run().starts, a_good_run().starts[-1]]}, {"poison"}),
        ({"left_over": 1}, {"left_over"}),
        ({"own_deaths": ["w3"]}, {"own_deaths"}),
    ],
)
def test_what_is_lost_stuck_doubled_or_wrong_is_named(changes, wrong):
    found = verdict.judge(replace(a_good_run(), **changes))

    assert not found.is_right
    assert set(found.wrong) == wrong
    assert set(found.as_document()["wrong"]) == wrong


def test_an_undisturbed_run_is_right_too():
    calm = replace(a_good_run(), starts=a_good_run().starts[1:], strikes=[], recovered=[], stalled=[])

    assert verdict.judge(calm).is_right


@pytest.mark.parametrize(
    ("first", "is_excused"),
    [
        (started("one", 4_900, None), True),
        (started("one", 4_900, 9_000), True),
        (started("one", 4_000, 4_500), True),
        (started("one", 3_000, 3_500), False),
        (started("one", 5_500, None), False),
        (started("one", 4_900, None, worker="w2"), False),
        (started("one", 4_900, None, pid=8), False),
    ],
    ids=[
        "was running",
        "was paused, and ended later",
        "had just ended, its result was on its way",
        "had ended long before",
        "began after the strike",
        "ran in another worker",
        "ran in another process of the worker",
    ],
)
def test_a_second_start_is_excused_only_where_a_strike_met_the_first(first, is_excused):
    second = started("one", 6_500, 6_600, worker="w3")

    excused, unexplained = strikes.started_twice([second, first], [CHILD_KILLED], [set()])

    assert bool(excused) is is_excused
    assert bool(unexplained) is not is_excused


def test_each_start_but_the_last_needs_an_excuse():
    starts = [started("one", 4_900, None), started("one", 6_000, 6_100), started("one", 7_000, 7_100)]

    assert strikes.started_twice(starts, [KILLED], [set()]) == ({}, {"one": "charge order of one"})


@pytest.mark.parametrize(
    ("strike", "stalled", "is_excused"),
    [(PAUSED, {"one"}, True), (PAUSED, set(), False), (KILLED, {"one"}, False)],
    ids=["was at the door", "was only reserved", "was killed, and cannot enter any more"],
)
def test_a_paused_worker_may_enter_the_body_at_whose_door_it_stood(strike, stalled, is_excused):
    elsewhere = started("one", 11_000, 11_300, worker="w3")
    at_last = started("one", 13_000, 13_100)

    excused, unexplained = strikes.started_twice([elsewhere, at_last], [strike], [stalled])

    assert bool(excused) is is_excused
    assert bool(unexplained) is not is_excused


def test_a_paused_worker_stands_at_the_door_of_a_body_once():
    starts = [
        started("one", 11_000, 11_300, worker="w3"),
        started("one", 13_000, 13_100),
        started("one", 14_000, 14_100),
    ]

    assert strikes.started_twice(starts, [PAUSED], [{"one"}])[0] == {}


def test_a_body_that_was_running_at_the_pause_is_not_entered_again():
    starts = [
        started("one", 4_900, 13_100),
        started("one", 11_000, 11_300, worker="w3"),
        started("one", 13_200, 13_300),
    ]

    assert strikes.started_twice(starts, [PAUSED], [{"one"}])[0] == {}


def test_a_receipt_may_be_ordered_twice_by_a_charge_that_was_started_twice():
    charges = [started("charge", 4_900, None, subject="SO-1"), started("charge", 6_000, 6_100, subject="SO-1")]
    receipts = [
        started("receipt", at_ms, at_ms + 5, task="receipt", subject=subject)._replace(task_id=subject)
        for subject in ("SO-1", "SO-2")
        for at_ms in (7_000, 7_100)
    ]

    excused, unexplained = strikes.started_twice(charges + receipts, [KILLED], [set()])

    assert set(excused.values()) == {"charge SO-1", "receipt SO-1"}
    assert set(unexplained.values()) == {"receipt SO-2"}


def test_recovery_counts_what_ran_and_what_was_reserved_until_the_last_has_started_again():
    starts = [
        started("running", 4_900, None),
        started("running", 6_000, None, worker="w2"),
        started("reserved", 7_500, 7_600, worker="w3"),
        started("of another worker", 4_900, 8_000, worker="w2"),
    ]

    healed = strikes.recovery(KILLED, starts, {"reserved"})

    assert healed == strikes.Recovery(held=2, missing=(), seconds=2.5)


def test_what_has_not_started_again_is_missing():
    starts = [started("running", 4_900, None)]

    healed = strikes.recovery(KILLED, starts, {"reserved"})

    assert healed.held == 2
    assert healed.missing == ("reserved", "running")


def test_a_message_whose_task_was_through_needs_no_other_start():
    starts = [started("through", 4_000, 4_900)]

    assert strikes.recovery(KILLED, starts, {"through"}).held == 0


def test_the_shipped_orders_are_500_of_one_day_with_numbers_of_their_own():
    found = orders.read_orders()

    assert len({order.number for order in found}) == 500
    assert len({order.date for order in found}) == 1
    assert all(order.quantity > 0 and order.amount_cents > 0 for order in found)
    assert all(order.email.rpartition("@")[2].startswith("example.") for order in found)


def test_totals_are_kept_apart_by_currency():
    sums = orders.total([("EUR", 100), ("USD", 5), ("EUR", 102_690)])

    assert sums == {"EUR": 102_790, "USD": 5}
    assert orders.in_words(sums) == "EUR 1,027.90, USD 0.05"
    assert orders.in_words({}) == "nothing"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "MainProcess] task recovered: example_project.tasks.charge[id-1] from w2@host.org after 1.5 s: worker gone",
            ("recovered", "charge", "id-1", "w2"),
        ),
        (
            "MainProcess] task stalled: example_project.tasks.charge[id-1] on w2@host after 1.5 s: worker gone",
            ("stalled", "charge", "id-1", "w2"),
        ),
        ("MainProcess] Task example_project.tasks.charge[id-1] received", None),
    ],
)
def test_acts_of_healing_are_read_from_the_logs(line, expected):
    found = evidence.healed(line)

    assert (found and tuple(found)) == expected


def test_a_log_is_read_by_whole_lines_from_where_the_last_look_ended(tmp_path):
    path = tmp_path / "w1.log"
    log = evidence.Log(path)

    assert log.new_lines() == []

    path.write_text("one\ntwo\nthr")

    assert log.new_lines() == ["one", "two"]
    assert log.new_lines() == []

    path.write_text("one\ntwo\nthree\n")

    assert log.new_lines() == ["three"]


@pytest.fixture
def books(tmp_path):
    found = ledger.Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    found.create_anew()
    yield found
    found.close()


def test_an_order_is_booked_once_however_often_it_is_paid(books):
    order = {"number": "SO-1", "customer": "Ada", "currency": "EUR", "amount_cents": 1000}

    answers = [books.pay(order) for _ in range(3)]

    assert answers == [True, False, False]
    assert evidence.bookings(books.engine) == [("SO-1", "EUR", 1000)]


def test_a_start_whose_body_is_left_by_an_error_has_no_end(books):
    class Task:
        name = "example_project.tasks.charge"

        class request:  # noqa: N801  # as Celery names it
            id = "id-1"
            hostname = "w1@host"

    with books.start(Task, "SO-1"):
        pass
    with pytest.raises(ZeroDivisionError), books.start(Task, "SO-2"):
        raise ZeroDivisionError

    ends = {start.subject: start.ended_ms is not None for start in evidence.starts(books.engine)}
    assert ends == {"SO-1": True, "SO-2": False}
    assert {start.worker for start in evidence.starts(books.engine)} == {"w1"}


def test_a_writer_that_stands_still_is_noticed(books):
    assert evidence.is_writable(books.engine)

    with books.engine.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")

        assert not evidence.is_writable(books.engine)

    assert evidence.is_writable(books.engine)
