"""Every way a task can end by itself: the table of the design, row by row, on each broker and in each pool.

What a shutdown, a lost lease or a limit ends is in the files beside this one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from integration.endings.yard import Yard

ALL = ("prefork", "threads", "solo", "gevent")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ending, with what must be seen of it.

    Attributes:
        starts: Attempt number of each start.
        letter: Reason code of the dead letter; empty for none.
        stalls: What the journal counts.
        pools: Where it can happen.
    """

    starts: tuple[int, ...] = (0,)
    state: str = "SUCCESS"
    letter: str = ""
    stalls: int = 0
    pools: tuple[str, ...] = ALL


TABLE: dict[str, Row] = {
    "returns": Row(),
    "raises, attempts left": Row(starts=(0, 1)),
    "raises, attempts used up": Row(starts=(0, 1), state="FAILURE", letter="exhausted"),
    "raises, unrecoverable": Row(state="FAILURE", letter="unrecoverable"),
    "retries by hand": Row(starts=(0, 1)),
    "is ignored": Row(state="PENDING"),
    "is rejected": Row(state="FAILURE", letter="rejected"),
    "is requeued": Row(starts=(0, 0)),
    "soft time limit": Row(starts=(0, 1), state="FAILURE", letter="exhausted", pools=("prefork",)),
    "memory is used up": Row(starts=(0, 1), state="FAILURE", letter="exhausted"),
    "its process is killed": Row(starts=(0, 0, 0), state="FAILURE", letter="stalled", stalls=3, pools=("prefork",)),
    "leaves its process": Row(starts=(0, 0, 0), state="FAILURE", letter="stalled", stalls=3, pools=("prefork",)),
    "its process is killed once": Row(starts=(0, 0), stalls=1, pools=("prefork",)),
    "is revoked and terminated": Row(state="REVOKED", pools=("prefork",)),
}

CASES = [(pool, ending) for pool in ALL for ending, row in TABLE.items() if pool in row.pools]


@pytest.mark.parametrize(("pool", "ending"), CASES)
@pytest.mark.parametrize("kind", ["redis", "classic"])
def test_ending(shared_yard: Callable[[str, str], Yard], kind: str, pool: str, ending: str) -> None:
    row, yard = TABLE[ending], shared_yard(kind, pool)
    task_id = uuid.uuid4().hex
    stalls_before = yard.counted("stalls")

    yard.send("leave", ending, task_id=task_id)
    if ending == "is revoked and terminated":
        yard.wait_noted("start", task_id)
        yard.app.control.revoke(task_id, terminate=True)

    starts = yard.wait_noted("start", task_id, times=len(row.starts))
    yard.wait(f"its state is {row.state}", lambda: yard.state(task_id) == row.state)
    letters: list[str] = []

    def find_letter() -> list[str]:
        letters[:] = [death.reason for death in yard.deaths() if death.id == task_id]
        return letters

    if row.letter:
        yard.wait("its dead letter", find_letter)
    yard.wait_nothing_left()
    assert tuple(entry.retries for entry in starts) == row.starts
    assert len(yard.entries("start", task_id)) == len(row.starts)
    assert letters == [row.letter] * bool(row.letter)
    assert yard.counted("stalls") - stalls_before == row.stalls
    assert yard.leases.exists(yard.keys.journal(task_id)) == 0
