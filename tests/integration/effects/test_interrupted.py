"""A body that is interrupted by its worker leaves nothing in the database, and its effect happens elsewhere, once."""

from __future__ import annotations

from collections import Counter

from integration.effects.office import Office


def test_body_that_is_handed_over_at_shutdown_is_rolled_back(office: Office) -> None:
    office.settings["selfheal_shutdown_grace"] = 1
    gate = office.gate("moved")
    leaving = office.start("leaving")
    sent = office.ledger.book.apply_async((7,), task_id="moved")
    office.wait("it has written", lambda: office.diary("written", "moved"))
    office.start("staying")

    leaving.terminate()
    office.wait("it starts elsewhere", lambda: len(office.diary("written", "moved")) == 2)
    gate.unlink()

    assert sent.get(timeout=60) == 7
    assert office.entries() == Counter(["moved"])
    assert leaving.wait(timeout=60) == 0
    assert "task stalled" not in office.logs()


def test_body_beyond_its_limit_is_rolled_back_and_tried_again(office: Office) -> None:
    gate = office.gate("hangs")
    office.start()

    sent = office.ledger.book_in_time.apply_async((7,), task_id="hangs")
    office.wait("its second attempt has written", lambda: len(office.diary("written", "hangs")) == 2)
    gate.unlink()

    assert sent.get(timeout=60) == 7
    assert office.entries() == Counter(["hangs"])
