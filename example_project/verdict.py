"""The verdict: decided from what was seen, by pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from example_project.evidence import Booked, Started
from example_project.orders import Order, in_words, total
from example_project.strikes import Strike, recovery, started_twice

ALLOWED_STARTS = 3  # selfheal_max_stalls is 2: a task that kills its process is recovered twice


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that the verdict stands on.

    Attributes:
        receipts: Numbers of orders whose receipt is written and says the right thing.
        day_total: Result of the chord, cents by currency; ``None`` while it waits.
        recovered: Ids of tasks that each strike's worker held, by the logs of those that took them.
        stalled: Ids of those among them whose start was under way.
        poison_outcome: State of the poison task, and what it failed with.
        left_over: Messages that nobody has settled.
        own_deaths: Workers that ended although nobody ended them.
    """

    orders: Sequence[Order]
    bookings: Sequence[Booked]
    receipts: Collection[str]
    starts: Sequence[Started]
    strikes: Sequence[Strike]
    recovered: Sequence[Collection[str]]
    stalled: Sequence[Collection[str]]
    day_total: Mapping[str, int] | None
    poison_id: str
    poison_outcome: str
    left_over: int
    own_deaths: Sequence[str]


@dataclass(frozen=True)
class Line:
    """One line of the verdict: ``key`` and ``value`` for programs, the texts for people.

    Attributes:
        is_right: ``None`` where nothing can be wrong.
    """

    key: str
    value: Any
    label: str
    found: str
    rule: str
    is_right: bool | None


@dataclass(frozen=True)
class Verdict:
    """What the run has shown."""

    lines: list[Line] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether nothing was lost, stuck, doubled or wrong."""
        return not self.wrong

    @property
    def wrong(self) -> list[str]:
        """Keys of the lines that are not as they must be."""
        return [line.key for line in self.lines if line.is_right is False]

    def as_document(self) -> dict[str, Any]:
        """The verdict for programs."""
        return {"ok": self.is_right, "wrong": self.wrong, **{line.key: line.value for line in self.lines}}


def judge(seen: Seen) -> Verdict:
    """Say what was found, what must be, and whether they agree."""
    starts = [start for start in seen.starts if start.task_id != seen.poison_id]
    booked = Counter(booking.order_number for booking in seen.bookings)
    numbers = {order.number for order in seen.orders}
    finished = {number for number in numbers if booked[number] and number in seen.receipts}
    lost = sorted(numbers - finished)
    double = sorted(number for number, times in booked.items() if times > 1)
    excused, unexplained = started_twice(starts, seen.strikes, seen.stalled)
    due = total((order.currency, order.amount_cents) for order in seen.orders)
    booked_total = total((booking.currency, booking.amount_cents) for booking in seen.bookings)
    twice, in_vain = sorted(excused.values()), sorted(unexplained.values())
    closed = "never" if seen.day_total is None else in_words(seen.day_total)
    deaths = list(seen.own_deaths)
    as_ordered = "sum of the orders" if seen.day_total == booked_total == due else in_words(due)
    return Verdict(
        [
            Line("orders", len(numbers), "orders", str(len(numbers)), "", None),
            Line("finished", len(finished), "finished", str(len(finished)), "all", finished == numbers),
            Line("lost", lost, "lost", _some(lost), "none", not lost),
            Line("started_twice", twice, "started twice", str(len(twice)), "only what ran where we struck", None),
            Line("started_in_vain", in_vain, "twice for no reason", _some(in_vain), "none", not in_vain),
            Line("charged_twice", double, "charged twice", _some(double), "none", not double),
            Line("booked", booked_total, "booked", in_words(booked_total), as_ordered, booked_total == due),
            Line("day_total", seen.day_total, "day closed with", closed, as_ordered, seen.day_total == due),
            *_strike_lines(seen, starts),
            _poison_line(seen),
            Line("left_over", seen.left_over, "left in the broker", str(seen.left_over), "nothing", not seen.left_over),
            Line("own_deaths", deaths, "died by themselves", _some(deaths), "none", not deaths),
        ]
    )


def _strike_lines(seen: Seen, starts: Sequence[Started]) -> list[Line]:
    lines = []
    for strike, ids in zip(seen.strikes, seen.recovered, strict=True):
        healed = recovery(strike, starts, ids)
        found = f"{healed.held} held, healed in {healed.seconds:.1f} s"
        if healed.missing:
            found = f"{len(healed.missing)} of {healed.held} never started again"
        elif not healed.held:
            found = "held nothing"
        value = {
            "worker": strike.worker,
            "held": healed.held,
            "missing": list(healed.missing),
            "seconds": round(healed.seconds, 3),
        }
        key = strike.what.replace(" ", "_")
        label = f"{strike.what} ({strike.worker})"
        lines.append(Line(key, value, label, found, "all started again", not healed.missing))
    return lines


def _poison_line(seen: Seen) -> Line:
    times = sum(start.task_id == seen.poison_id for start in seen.starts)
    value = {"outcome": seen.poison_outcome, "starts": times}
    rule = f"FAILURE StalledTooOften, {ALLOWED_STARTS} starts"
    found = f"{seen.poison_outcome}, {times} starts"
    return Line("poison", value, "poison task", found, rule, found == rule)


def _some(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{len(names)}: {', '.join(names[:3])} …"
    return f"{len(names)}: {', '.join(names)}" if names else "0"
