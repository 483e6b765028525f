from __future__ import annotations

import os

import pytest

from celery_selfheal.plugin.slots import MAX_PROGRESS_BYTES, Doom, Slot, Slots, encode_progress

TOKEN, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def slot(slots: Slots) -> Slot:
    mine = slots.mine
    assert mine is not None
    return mine


def test_main_finds_the_slot_of_a_process_by_its_pid(slots: Slots, slot: Slot) -> None:
    slot.enter(TOKEN)

    found = slots.of(os.getpid())

    assert found is not None
    assert found.running == TOKEN
    assert slots.of(os.getpid() + 1) is None
    assert slots.of(None) is None


def test_a_forked_child_is_seen_by_main(slots: Slots) -> None:
    pid = os.fork()
    if pid == 0:
        mine = slots.mine
        if mine is not None:
            mine.enter(TOKEN)
        os._exit(0)
    os.waitpid(pid, 0)

    found = slots.of(pid)

    assert found is not None
    assert found.running == TOKEN


def test_a_living_process_keeps_its_slot_from_another_that_wants_the_same_place(slots: Slots, slot: Slot) -> None:
    slot.enter(TOKEN)
    rival = slots._claim(os.getpid() + 4095)  # the same place

    assert rival is not None
    rival.enter(OTHER)
    assert slot.running == TOKEN


def test_a_new_owner_finds_nothing_of_the_old_one(slots: Slots, slot: Slot) -> None:
    slot.enter(TOKEN)
    slot.write_progress(b"7")
    slot.doom(TOKEN, Doom.SHUTDOWN)

    slot.claim(os.getpid())

    assert (slot.running, slot.doom_of(TOKEN), slot.read_progress(), slot.listens) == ("", None, None, False)


def test_only_the_start_that_is_meant_is_doomed(slot: Slot) -> None:
    slot.enter(TOKEN)
    slot.doom(TOKEN, Doom.HUNG)
    slot.leave(handed_back=True)
    slot.enter(OTHER)

    assert slot.doom_of(OTHER) is None
    assert slot.doom_of(TOKEN) is Doom.HUNG


@pytest.mark.parametrize("handed_back", [True, False])
def test_how_a_start_was_left_is_told(slot: Slot, handed_back: bool) -> None:
    slot.enter(TOKEN)

    slot.leave(handed_back=handed_back)

    assert slot.running == ""
    assert (slot.returned, slot.ended) == ((TOKEN, "") if handed_back else ("", TOKEN))


def test_progress_has_a_version_and_begins_anew_with_each_start(slot: Slot) -> None:
    slot.enter(TOKEN)
    assert slot.read_progress() is None
    slot.write_progress(b"[1]")
    first = slot.read_progress()
    slot.write_progress(b"[1,2]")
    second = slot.read_progress()
    slot.enter(OTHER)

    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (b"[1]", b"[1,2]")
    assert first[0] != second[0]
    assert slot.read_progress() is None


def test_a_progress_that_is_being_written_is_not_read(slot: Slot) -> None:
    slot.enter(TOKEN)
    slot.write_progress(b"[1]")
    version, _ = slot.read_progress() or (0, b"")
    slots_own = slot._memory
    slots_own[slot._base + 152] = version + 1  # odd: half-written

    assert slot.read_progress() is None


@pytest.mark.parametrize(
    ("progress", "why"), [({1, 2}, "nothing that JSON can hold"), ("x" * MAX_PROGRESS_BYTES, "keep a position only")]
)
def test_a_progress_that_does_not_fit_is_refused(progress: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode_progress(progress)


def test_all_processes_see_that_the_worker_drains_and_the_store_is_silent(slots: Slots) -> None:
    assert not slots.is_draining
    assert not slots.is_silent

    slots.drain()
    slots.tell_silent(True)
    slots.confirm(12.5)

    assert slots.is_draining
    assert slots.is_silent
    assert slots.confirmed_at == 12.5
