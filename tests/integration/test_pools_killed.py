"""Workers with pools of threads and greenlets heal like those with processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration.fleet import Fleet
from integration.killing import busy_kill_rounds, kill_rounds

LONG_TTL = {"selfheal_lease_ttl": 600}
SHORT_TTL = {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 1, "selfheal_reaper_interval": 0.5}

pytestmark = pytest.mark.parametrize("pool", ["threads", "gevent"])


def test_a_living_worker_of_the_machine_heals_a_killed_one_long_before_its_leases_run_out(
    pool: str,
    fleet: Fleet,
    rounds: Callable[[int], int],
    figures: Callable[[str, list[float]], dict[str, float]],
) -> None:
    fleet.settings = LONG_TTL

    healings = kill_rounds(fleet, rounds(2), by_expiry=False, pool=pool)

    figures("until all had ended", [healing.ended for healing in healings])


def test_a_worker_that_cannot_see_the_killed_one_heals_it_when_its_session_has_run_out(
    pool: str,
    fleet: Fleet,
    rounds: Callable[[int], int],
    figures: Callable[[str, list[float]], dict[str, float]],
) -> None:
    fleet.settings = SHORT_TTL

    healings = kill_rounds(fleet, rounds(1), by_expiry=True, pool=pool, pid_namespace=True)

    figures("until all had ended", [healing.ended for healing in healings])


def test_no_message_of_a_busy_worker_is_lost_with_it(pool: str, fleet: Fleet, rounds: Callable[[int], int]) -> None:
    busy_kill_rounds(fleet, rounds(1), pool=pool, concurrency=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("pid_namespace", "percentile", "bound_seconds"), [(False, "p95", 3), (True, "p99", 13)], ids=["seen", "unseen"]
)
def test_a_killed_worker_heals_in_the_promised_time(
    pool: str,
    pid_namespace: bool,
    percentile: str,
    bound_seconds: float,
    fleet: Fleet,
    rounds: Callable[[int], int],
    figures: Callable[[str, list[float]], dict[str, float]],
) -> None:
    healings = kill_rounds(fleet, rounds(20), by_expiry=pid_namespace, pool=pool, pid_namespace=pid_namespace)

    figures("until the running one started again", [healing.restarted for healing in healings])
    assert figures("until all had ended", [healing.ended for healing in healings])[percentile] <= bound_seconds
