"""Claims for effects that no rollback undoes: told apart are those that ran, that failed and that nobody knows of."""

from __future__ import annotations

from collections import Counter

import pytest

from integration.effects.office import Office


@pytest.fixture(params=["mail", "send_text"])
def claimant(request: pytest.FixtureRequest, redis_office: Office) -> tuple[Office, str]:
    """An office, and a task that claims its key in the database or in Redis."""
    redis_office.settings.update(selfheal_lease_ttl=3, selfheal_heartbeat_interval=1)
    return redis_office, str(request.param)


def noted(office: Office) -> Counter[str]:
    return Counter(line["id"] for line in (*office.diary("mail"), *office.diary("text")))


def test_twins_have_one_effect_and_one_result(claimant: tuple[Office, str]) -> None:
    office, task = claimant
    office.start(concurrency=4, prefetch=1)

    for n in range(5):
        sent = [getattr(office.ledger, task).delay(f"c{n}") for _ in range(4)]
        assert office.results(sent) == [f"sent to c{n}"] * 4

    assert noted(office) == Counter(f"c{n}" for n in range(5))


def test_twin_of_a_running_one_waits_for_its_result(claimant: tuple[Office, str]) -> None:
    office, task = claimant
    office.start(concurrency=2, prefetch=1)
    gate = office.gate("first")
    first = getattr(office.ledger, task).apply_async(("c",), task_id="first")
    office.wait("it runs", lambda: noted(office))

    twin = getattr(office.ledger, task).apply_async(("c",), task_id="twin")
    office.wait("its twin is parked", lambda: "parked: " in office.log("w"))
    gate.unlink()

    assert office.results([first, twin]) == ["sent to c"] * 2
    assert noted(office) == Counter(["c"])


def test_failure_withdraws_the_claim_and_the_retry_has_it(claimant: tuple[Office, str]) -> None:
    office, task = claimant
    office.start()
    (office.folder / "fail.c").touch()

    sent = getattr(office.ledger, task).apply_async(("c",), task_id="first")

    assert sent.get(timeout=60) == "sent to c"
    assert noted(office) == Counter({"c": 2})


def test_successor_of_a_killed_one_takes_over(claimant: tuple[Office, str]) -> None:
    office, task = claimant
    gate = office.gate("first")
    worker = office.start("killed")
    sent = getattr(office.ledger, task).apply_async(("c",), task_id="first")
    office.wait("it runs", lambda: noted(office))

    worker.kill_group()
    gate.unlink()
    office.start("other")

    assert sent.get(timeout=60) == "sent to c"
    assert noted(office) == Counter({"c": 2})


def test_claim_of_a_killed_one_is_left_to_a_person(redis_office: Office) -> None:
    office = redis_office
    office.gate("first")
    worker = office.start("killed")
    sent = office.ledger.letter.apply_async(("c",), task_id="first")
    office.wait("it runs", lambda: noted(office))

    worker.kill_group()
    office.start("other")

    with pytest.raises(Exception, match="it may have happened or not"):
        sent.get(timeout=60)
    office.wait("its dead letter", lambda: [one.reason for one in office.dlq.list()] == ["in_doubt"])
    assert office.jobs() == {"letter:c": "IN_DOUBT"}
    assert noted(office) == Counter(["c"])

    again = office.ledger.letter.apply_async(("c",), task_id="another")
    with pytest.raises(Exception, match="it may have happened or not"):
        again.get(timeout=60)
    assert noted(office) == Counter(["c"])


def test_late_end_of_a_woken_worker_is_refused(claimant: tuple[Office, str]) -> None:
    office, task = claimant
    gate = office.gate("first")
    sleeper = office.start("sleeper")
    sent = getattr(office.ledger, task).apply_async(("c",), task_id="first")
    office.wait("it runs", lambda: noted(office))
    office.start("other")

    sleeper.pause()
    office.wait("it is taken over", lambda: noted(office)["c"] == 2)
    gate.unlink()
    assert sent.get(timeout=60) == "sent to c"
    sleeper.resume()

    office.wait("the late end is refused", lambda: "completion refused" in office.log("sleeper"))
    assert noted(office) == Counter({"c": 2})
