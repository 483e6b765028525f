"""The day's orders, as they come out of the shop."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ORDERS_CSV = Path(__file__).with_name("orders.csv")


@dataclass(frozen=True)
class Order:
    """One line of ``orders.csv``."""

    number: str
    date: str
    customer: str
    email: str
    item: str
    quantity: int
    currency: str
    amount_cents: int


def read_orders(path: Path = ORDERS_CSV) -> list[Order]:
    """All orders of the file, in its sequence."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = csv.reader(lines)
        next(rows)  # the names, in the sequence of the fields
        return [
            Order(number, date, customer, email, item, int(quantity), currency, int(cents))
            for number, date, customer, email, item, quantity, currency, cents in rows
        ]


def total(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sum of cents by currency, of pairs of currency and cents."""
    sums: Counter[str] = Counter()
    for currency, cents in amounts:
        sums[currency] += cents
    return dict(sums)


def in_words(totals: Mapping[str, int]) -> str:
    """Amounts for people: ``CHF 13.10, EUR 1,027.90``."""
    return ", ".join(f"{currency} {cents / 100:,.2f}" for currency, cents in sorted(totals.items())) or "nothing"
