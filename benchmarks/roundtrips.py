"""Calls to Redis for each task, counted on the server beside plain Celery; and one beat with a thousand leases."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import Machine, describe_machine
from benchmarks.report import Figure, Report, figures_of, progress
from benchmarks.stage import Stage, is_drained
from benchmarks.tasks import make_app
from celery_selfheal.keys import Keys, UnackedKeys, delivery_tag
from celery_selfheal.leases.port import Acquired, Renewal, Start
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.sessions.port import Session
from celery_selfheal.sessions.redis import RedisSessionStore
from celery_selfheal.settings import SelfHealSettings
from celery_selfheal.witness import identify

TASK = "nothing_with_result"  # results are stored as most applications do
WARM_UP_TASKS = 20
SETTLE_SECONDS = 1.0  # acknowledgements come after results
DRAIN_SECONDS = 120.0
LEASES = 1_000
UNACKED = UnackedKeys(unacked="unacked", index="unacked_index")  # kombu's defaults
SCRIPT_PACKAGES = ("celery_selfheal.leases", "celery_selfheal.sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One command as the server saw it, or one transaction: what a client waits for once.

    Attributes:
        port: The client's.
        name: The command; for a script of ours its name, for a transaction the commands in it.
        took: A fetch that brought a message.
    """

    port: int
    name: str
    took: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Calls of one worker, by process and name.

    Attributes:
        background: What main does whether tasks come or not: beats, sweeps, looks at empty queues.
    """

    child: Counter[str]
    main: Counter[str]
    background: Counter[str]


class Monitor:
    """Records what all clients send, by ``MONITOR``, while it is entered."""

    def __init__(self, stage: Stage) -> None:
        self._client = stage.client()
        self._stop = f"stop-{uuid.uuid4().hex}"
        self._stopper = stage.client()
        self._stopper.ping()  # connected now: the handshake would be recorded, too
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._record, name="monitor")
        self.commands: list[dict[str, Any]] = []

    def __enter__(self) -> Monitor:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopper.echo(self._stop)
        self._thread.join()

    def _record(self) -> None:
        with self._client.monitor() as monitor:
            self._begun.set()
            for command in monitor.listen():
                if command["command"].endswith(self._stop):
                    return
                self.commands.append(command)


def calls_of(commands: Iterable[Mapping[str, Any]], scripts: Mapping[str, str]) -> Iterator[Call]:
    """What clients waited for; the commands inside of scripts and transactions belong to these.

    Args:
        commands: As redis-py's ``Monitor`` gives them.
        scripts: Digest -> name.
    """
    script: Call | None = None
    open_transactions: dict[int, list[str]] = {}
    for command in commands:
        words = command["command"].split(" ")
        name = words[0].upper()
        if command["client_type"] == "lua":
            # A look at empty lists and a fetch differ only in what the script went on to do.
            if script is not None and script.name == "fetch" and name == "RPOP":
                script = Call(port=script.port, name=script.name, took=True)
            continue
        if script is not None:
            yield script
            script = None
        port = int(command["client_port"])
        if name == "EVALSHA":
            name = scripts.get(words[1], "EVALSHA of Celery's")
        if name == "MULTI":
            open_transactions[port] = []
        elif name == "EXEC":
            yield Call(port=port, name=f"MULTI {' '.join(open_transactions.pop(port))}")
        elif port in open_transactions:
            open_transactions[port].append(name)
        else:
            script = Call(port=port, name=name)
    if script is not None:
        yield script


def our_scripts() -> dict[str, str]:
    """Digest -> name of each script in the package."""
    files = [file for package in SCRIPT_PACKAGES for file in resources.files(package).iterdir()]
    return {
        hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest(): file.name.removesuffix(".lua")
        for file in files
        if file.name.endswith(".lua")
    }


def ports_of(pid: int) -> set[int]:
    """Local TCP ports of the connections that a process holds (Linux)."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def tally_tasks(stage: Stage, *, plain: bool, tasks: int) -> Tally:
    """Run no-op tasks on one worker, and count its calls."""
    stage.client().flushall()
    app = make_app(stage.url, plain=plain)
    task = app.tasks[TASK]
    broker = stage.client()
    worker = stage.worker(plain=plain)
    worker.wait_ready()
    for _ in range(WARM_UP_TASKS):
        task.delay()
    _drain(broker)
    with Monitor(stage) as monitor:
        for _ in range(tasks):
            task.delay()
        _drain(broker)
    (child,) = worker.child_pids()
    child_ports, main_ports, own_ports = ports_of(child), ports_of(worker.pid), ports_of(os.getpid())
    worker.stop()

    calls = list(calls_of(monitor.commands, our_scripts()))
    ticker_ports = {call.port for call in calls if call.name == "beat"}
    tally = Tally(child=Counter(), main=Counter(), background=Counter())
    for call in calls:
        if call.port in main_ports:
            idle = call.port in ticker_ports or (call.name == "fetch" and not call.took)
            (tally.background if idle else tally.main)[call.name] += 1
        elif call.port in child_ports:
            tally.child[call.name] += 1
        elif call.port not in own_ports:
            raise click.ClickException(f"neither main nor child nor this process sent {call}")
    return tally


def beat_calls_and_seconds(stage: Stage, *, leases: int, beats: int) -> tuple[float, list[float], float]:
    """Beat for one session that runs ``leases`` starts and holds their deliveries.

    Returns:
        Calls a beat; seconds of each beat, as the worker waits for it; seconds a beat that the server worked.
    """
    client = stage.client()
    client.flushall()
    ttl = SelfHealSettings().lease_ttl
    keys = Keys(prefix="selfheal", app="benchmark")
    session = Session(name="w1:1:benchmark", node="w1", identity=identify())
    sessions = RedisSessionStore(client, keys, ttl=ttl, address=stage.url, unacked=UNACKED)
    store = RedisLeaseStore(
        client,
        keys,
        ttl=ttl,
        max_stalls=2,
        done_ttl=timedelta(hours=1),
        address=stage.url,
        unacked=UNACKED,
    )
    sessions.beat(session, join=True)
    starts = [_running(session, n, client, keys) for n in range(leases)]
    for start in starts:
        if not isinstance(store.acquire(start), Acquired):
            raise click.ClickException(f"no lease for {start}")
    tags = [str(start.tag) for start in starts]

    def beat() -> float:
        began = time.perf_counter()
        answer = sessions.beat(session, join=False, starts=starts, tags=tags)
        seconds = time.perf_counter() - began
        if answer.unknown_tags or set(answer.renewals) != {Renewal.HELD}:
            raise click.ClickException("a beat did not renew what is held")
        return seconds

    counted = 5
    with Monitor(stage) as monitor:
        for _ in range(counted):
            beat()
    own = ports_of(os.getpid())
    calls = [call for call in calls_of(monitor.commands, our_scripts()) if call.port in own and call.name != "ECHO"]
    client.config_resetstat()
    seconds = [beat() for _ in range(beats)]
    server = client.info("commandstats")["cmdstat_evalsha"]
    return len(calls) / counted, seconds, float(server["usec_per_call"]) / 1e6


def _running(session: Session, number: int, client: Any, keys: Keys) -> Start:
    """A start as a worker announces it, with its delivery as the fetch leaves it."""
    tag = delivery_tag(session.name, number)
    with client.pipeline(transaction=False) as pipe:
        pipe.hset(UNACKED.unacked, tag, '[{},"","celery"]')
        pipe.zadd(UNACKED.index, {tag: time.time()})
        pipe.hset(keys.owned(session.name), tag, f"{time.time_ns() // 1000} celery")
        pipe.execute()
    return Start(
        task_id=str(uuid.uuid4()),
        task_name=TASK,
        token=uuid.uuid4().hex,
        session=session.name,
        attempt=f"{TASK}:0",
        marker=uuid.uuid4().hex,
        tag=tag,
        node="w1",
        pid=1,
    )


def figures(plain: Tally, ours: Tally, *, tasks: int) -> list[Figure]:
    """Calls for each task: beyond plain Celery's, and of each kind."""

    def beyond(mine: Counter[str], theirs: Counter[str]) -> float:
        return (mine.total() - theirs.total()) / tasks

    def of(name: str) -> float:
        return (ours.child[name] + ours.main[name]) / tasks

    child, main = beyond(ours.child, plain.child), beyond(ours.main, plain.main)

    found = [
        Figure(name="child", about="child, calls a task beyond plain Celery", value=child, at_most=2),
        Figure(name="acquire", about="acquire, calls a task", value=of("acquire"), at_most=1, at_least=1),
        Figure(name="release", about="release, calls a task", value=of("release"), at_most=1, at_least=1),
        Figure(name="fetch", about="fetch that brings a message, calls a task", value=of("fetch")),
        Figure(name="main", about="main, calls a task beyond plain Celery", value=main),
    ]
    for who, tally in (("plain", plain), ("ours", ours)):
        for process in ("child", "main"):
            calls: Counter[str] = getattr(tally, process)
            found.append(
                Figure(name=f"{who}_{process}", about=f"{who}, {process}, calls a task", value=calls.total() / tasks)
            )
    return found


def show_calls(who: str, tally: Tally) -> None:
    """Every kind of call, on standard error: where figures come from."""
    for process in ("child", "main", "background"):
        for name, count in getattr(tally, process).most_common():
            progress(f"    {who:5} {process:10} {count:6} {name}")


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=200, show_default=True, help="Tasks, and beats.")
@click.option("--quick", is_flag=True, help="Fifty of each.")
@click.option("--leases", type=click.IntRange(1), default=LEASES, show_default=True, help="Leases of the beats.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, quick: bool, leases: int, as_json: bool) -> None:
    """Count calls for each no-op task with plain Celery (late acknowledgement) and with ours; time beats.

    The server counts (MONITOR), so nothing is missed. Needs Linux, to tell child from main.
    """
    rounds = 50 if quick else rounds
    if not Path("/proc/self/net/tcp").exists():
        raise click.UsageError("this needs Linux: /proc tells which process a connection belongs to")
    tallies: dict[str, Tally] = {}
    with Stage() as stage:
        machine: Machine = describe_machine(stage.client())
        for who in ("plain", "ours"):
            tallies[who] = tally_tasks(stage, plain=who == "plain", tasks=rounds)
            progress(f"{who}, {rounds} tasks:")
            show_calls(who, tallies[who])
        calls_a_beat, seconds, server_seconds = beat_calls_and_seconds(stage, leases=leases, beats=rounds)
    milliseconds = [one * 1000 for one in seconds]
    Report(
        benchmark="roundtrips",
        machine=machine,
        conditions={"tasks": rounds, "beats": rounds, "leases": leases},
        figures=[
            *figures(tallies["plain"], tallies["ours"], tasks=rounds),
            Figure(
                name="beat_calls", about=f"beat with {leases} leases, calls", value=calls_a_beat, at_most=1, at_least=1
            ),
            *figures_of(
                "beat",
                f"beat with {leases} leases and deliveries",
                milliseconds,
                unit="ms",
                p50_at_most=5.0 if leases <= LEASES else None,
            ),
            Figure(
                name="beat_server", about="beat, mean time of the server in it", value=server_seconds * 1000, unit="ms"
            ),
        ],
        samples={"beat": milliseconds},
    ).show(as_json=as_json)


def _drain(broker: Any) -> None:
    deadline = time.monotonic() + DRAIN_SECONDS
    while not is_drained(broker):
        if time.monotonic() > deadline:
            raise click.ClickException(f"the worker did not finish its tasks in {DRAIN_SECONDS:g} s")
        time.sleep(0.1)
    time.sleep(SETTLE_SECONDS)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.roundtrips")
