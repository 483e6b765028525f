"""The tasks: an order is charged, its receipt is written, and the day is closed with a total."""

from __future__ import annotations

import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

from celery_selfheal import SelfHealTask
from example_project.app import app
from example_project.ledger import Ledger
from example_project.orders import in_words, total

ledger = Ledger(os.environ.get("SHOP_DATABASE_URL", "sqlite:///shop.db"))
receipts = Path(os.environ.get("SHOP_RECEIPTS", "receipts"))


@app.task(bind=True, base=SelfHealTask)
def charge(self: SelfHealTask, order: dict[str, Any]) -> None:
    """Charge an order. Started again, it finds the order paid and books nothing."""
    with ledger.start(self, order["number"]):
        _card_network(order["number"])
        ledger.pay(order)


@app.task(bind=True, base=SelfHealTask)
def receipt(self: SelfHealTask, order: dict[str, Any]) -> tuple[str, int]:
    """Write the receipt of an order, and return its amount. Started again, it writes the same file."""
    with ledger.start(self, order["number"]):
        path = receipts / f"{order['number']}.txt"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(receipt_text(order), encoding="utf-8")
        draft.replace(path)
    return order["currency"], order["amount_cents"]


@app.task(bind=True, base=SelfHealTask)
def close_day(self: SelfHealTask, amounts: list[tuple[str, int]], day: str) -> dict[str, int]:
    """Add up the day, by currency, when all its receipts are written."""
    with ledger.start(self, day):
        return total(amounts)


@app.task(bind=True, base=SelfHealTask)
def import_statement(self: SelfHealTask, statement: str) -> None:
    """Poison: a bank statement so large that the kernel kills whoever reads it."""
    with ledger.start(self, statement):
        os.kill(os.getpid(), signal.SIGKILL)


def receipt_text(order: dict[str, Any]) -> str:
    """What a receipt says."""
    lines = (
        f"Order {order['number']} of {order['date']}",
        order["customer"],
        f"{order['quantity']} x {order['item']}",
        in_words({order["currency"]: order["amount_cents"]}),
    )
    return "".join(f"{line}\n" for line in lines)


def _card_network(order_number: str) -> None:
    """Wait as for a bank: 100 to 250 ms, always the same for the same order."""
    time.sleep(0.1 + zlib.crc32(order_number.encode()) % 151 / 1000)
