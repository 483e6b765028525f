"""Whoever sweeps, and however many at once: each orphan is restored, once."""

from __future__ import annotations

import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from celery_selfheal import witness
from celery_selfheal.agents.reaper import SweepReport
from celery_selfheal.plugin.install import plugin_of, reaper_of
from celery_selfheal.sessions.port import Session
from integration.outages.crew import PATIENCE_SECONDS, SHORT_TTL, Crew, reap_report

# The workers' own sweep comes once, at their start: what heals after that is somebody else.
NO_SWEEP = {"selfheal_reaper_interval": 3600}


def orphan(crew: Crew, reserved: int, **options: object) -> list[str]:
    """Start w0, let it take one running task and so many reserved ones, and kill it; all their ids in order."""
    victim = crew.start("w0", prefetch=reserved + 1, **options)
    run = crew.load("running", crew.gate())
    crew.wait_started([run])
    wait = [crew.ship(f"reserved-{n}") for n in range(reserved)]
    crew.wait_held(1 + reserved)
    victim.kill_group()
    return [run, *wait]


def check_healed(crew: Crew, tasks: list[str]) -> None:
    """A worker goes on with them, as soon as its gate opens."""
    (crew.folder / "gate" / "all").touch()
    crew.wait_ended(tasks)
    crew.wait_nothing_left()
    counts = crew.diary.counts("start")
    assert counts.pop(tasks[0]) == 2
    assert counts == dict.fromkeys(tasks[1:], 1)


def test_sweepers_that_meet_in_the_middle_of_it_restore_each_orphan_once(crew: Crew) -> None:
    tasks = orphan(crew, 250)
    plugin = plugin_of(crew.producer)
    together = threading.Barrier(6)

    def sweep(_: int) -> SweepReport:
        reaper = reaper_of(plugin, plugin.open_stores(), lambda: Session(name="", node="", identity=witness.identify()))
        together.wait()
        report: SweepReport = reaper.sweep()
        return report

    with ThreadPoolExecutor(6) as pool:
        reports = list(pool.map(sweep, range(6)))

    assert sum(report.restored for report in reports) == len(tasks)
    assert sum(report.stalls for report in reports) == 1
    assert crew.waiting() == tasks
    assert not crew.held()


def test_many_sweepers_at_once_restore_each_orphan_once(crew: Crew) -> None:
    crew.settings = dict(SHORT_TTL, selfheal_reaper_interval=0.05)
    bystanders = [crew.start(f"w{n}", queues="elsewhere") for n in (1, 2)]
    tasks = orphan(crew, 40, pid_namespace=True)

    # Nobody can know of the death before the TTL has run out: then all of them rush in.
    loops = [crew.command("selfheal", "reap", "--loop", "--interval", "0.1", "--json") for _ in range(2)]
    crew.wait("all orphans are back", lambda: len(crew.waiting()) == len(tasks) and not crew.held())
    outputs = []
    for loop in loops:
        loop.send_signal(signal.SIGTERM)
        outputs.append(loop.communicate(timeout=PATIENCE_SECONDS)[0])

    assert sorted(crew.waiting()) == sorted(tasks)
    by_workers = [line for worker in bystanders for line in re.findall(r"task recovered: \S+", worker.log_text())]
    reports = [reap_report(line) for output in outputs for line in output.splitlines()]
    assert len(by_workers) + sum(report["restored"] for report in reports) == len(tasks)
    stalls = [line for worker in bystanders for line in re.findall(r"task stalled: \S+", worker.log_text())]
    assert len(stalls) + sum(report["stalls"] for report in reports) == 1


def test_beat_s_reaper_heals_where_no_worker_sweeps(crew: Crew) -> None:
    crew.settings = {
        **SHORT_TTL,
        **NO_SWEEP,
        "beat_schedule": {
            "reap": {"task": "celery_selfheal.reap", "schedule": 1.0, "options": {"expires": 1.0}},
        },
    }
    other = crew.start("w1", args=["-B"], queues="celery,only-w1")
    other.wait_log("celery_selfheal.reap")
    other.pause()
    tasks = orphan(crew, 3)
    other.resume()

    check_healed(crew, tasks)
    assert "sweep:" not in other.log_text()
    assert re.search(r"task recovered: .* worker gone", other.log_text())


def test_a_sweep_on_request_heals_where_no_worker_runs(crew: Crew) -> None:
    """A command on the machine of the dead asks its kernel: it need not wait for the TTL."""
    tasks = orphan(crew, 3)

    assert crew.reap() == {"sessions": 1, "stalls": 1, "restored": 4}
    assert crew.reap() == {"sessions": 0, "stalls": 0, "restored": 0}
    assert crew.waiting() == tasks
    crew.start("w1")
    check_healed(crew, tasks)


def test_a_loop_of_sweeps_heals_where_no_worker_runs(crew: Crew) -> None:
    """Here nobody sees the dead: it is the TTL that tells, and the living are left alone until then."""
    crew.settings = dict(SHORT_TTL)
    loop = crew.command("selfheal", "reap", "--loop")
    tasks = orphan(crew, 3, pid_namespace=True)

    crew.wait("all orphans are back", lambda: crew.waiting() == tasks)
    loop.send_signal(signal.SIGTERM)
    output, _ = loop.communicate(timeout=PATIENCE_SECONDS)

    assert loop.returncode == 0
    assert output.splitlines() == ["4 messages restored, 1 dead sessions, 1 stalls"]
