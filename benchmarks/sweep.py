"""One sweep beside a thousand to a million live leases."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import click
from celery import Celery

from benchmarks.machine import describe_machine
from benchmarks.report import Figure, Report, figures_of, progress
from benchmarks.spread import spread
from benchmarks.stage import Stage
from celery_selfheal import install
from celery_selfheal.agents.reaper import Reaper, SweepReport
from celery_selfheal.keys import Keys, UnackedKeys
from celery_selfheal.leases import record
from celery_selfheal.leases.port import JOURNAL_TTL, Acquired, Start
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.plugin.install import Plugin, reaper_of
from celery_selfheal.plugin.stores import Stores
from celery_selfheal.redis_wire import milliseconds
from celery_selfheal.sessions.port import Session
from celery_selfheal.sessions.redis import RedisSessionStore
from celery_selfheal.witness import ProcessIdentity, identify

SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 100_000)
WORKERS = 100  # the same fleet for every size: only the leases grow
EXPIRED = 100
RATIO = 1.5  # "as fast": without an index it would be near a thousand, and the noise of a small machine is not 1
LONG = timedelta(hours=6)  # nothing that shall live ends before the benchmark does
UNACKED = UnackedKeys(unacked="unacked", index="unacked_index")  # kombu's defaults
PAGE = 1_000  # leases written in one call; Lua can unpack some thousand values

# What leases/acquire.lua and sessions/fetch.lua leave, with as few commands as can be; ``check_format`` compares.
WRITE_PAGE = """
local first, last, session, ttl, journal_ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now_ms = math.floor(now_us / 1000)
local seconds = time[1] .. '.' .. string.format('%06d', time[2])
local inflight, index, held, unacked, unacked_index, owned = {}, {}, {}, {}, {}, {}

local function append(list, one, other)
  list[#list + 1] = one
  list[#list + 1] = other
end

for n = first, last do
  local id, token, tag = 'task-' .. n, 'token-' .. n, session .. '/' .. n
  local fence = string.format('%.0f', now_us + n)
  local lease, journal = KEYS[1] .. id, KEYS[2] .. id
  redis.call('HSET', lease, 'token', token, 'fence', fence, 'session', session, 'attempt', 'benchmark:0')
  redis.call('PEXPIRE', lease, ttl)
  redis.call('ZADD', journal, fence, token)
  redis.call('PEXPIRE', journal, journal_ttl)
  append(inflight, id, table.concat({now_ms, fence, token, session, ARGV[6]}, ' '))
  append(index, now_ms + tonumber(ttl), id)
  held[#held + 1] = id
  append(unacked, tag, '[{},"","celery"]')
  append(unacked_index, seconds, tag)
  append(owned, tag, string.format('%.0f', now_us) .. ' celery')
end
redis.call('HSET', KEYS[3], unpack(inflight))
redis.call('ZADD', KEYS[4], unpack(index))
redis.call('SADD', KEYS[5], unpack(held))
redis.call('HSET', KEYS[6], unpack(unacked))
redis.call('ZADD', KEYS[7], unpack(unacked_index))
redis.call('HSET', KEYS[8], unpack(owned))
"""


@dataclass(slots=True)
class Fleet:
    """A database with so many live leases, and the reaper that sweeps it.

    Attributes:
        idle: Seconds of sweeps that found nothing.
        healing: Seconds of sweeps that found ``EXPIRED`` expired leases.
    """

    size: int
    stores: Stores
    reaper: Reaper
    me: Session
    expire: Callable[[], None]
    end_grace: Callable[[], None]
    idle: list[float] = field(default_factory=list)
    healing: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """Sweep once: that connects and loads the scripts."""
        self.stores.sessions.beat(self.me, join=True)
        # While the other databases were filled nobody beat here, which looks like a store that was away.
        self.end_grace()
        self.sweep(stalls=0)

    def sweep(self, *, stalls: int) -> float:
        """Sweep once as the leader; the seconds it took."""
        self.stores.sessions.beat(self.me, join=True)
        began = time.perf_counter()
        report: SweepReport = self.reaper.sweep()
        seconds = time.perf_counter() - began
        if not report.led or (report.sessions, report.stalls, report.restored) != (0, stalls, 0):
            raise click.ClickException(f"a sweep beside {self.size} leases did something else: {report}")
        return seconds


def populate(client: Any, keys: Keys, size: int) -> None:
    """Write ``size`` leases of ``WORKERS`` living workers on other machines, with their deliveries."""
    sessions = RedisSessionStore(client, keys, ttl=LONG, address="")
    for n in range(WORKERS):
        host = ProcessIdentity(host=f"host-{n}", pid=1, started="1")
        sessions.beat(Session(name=f"worker-{n}", node=f"worker-{n}", identity=host), join=True)
    write = client.register_script(WRITE_PAGE)
    for page, first in enumerate(range(0, size, PAGE)):
        _write(write, keys, first, min(first + PAGE, size) - 1, session=f"worker-{page % WORKERS}")
    found = (client.zcard(keys.index), client.hlen(keys.inflight), client.hlen(UNACKED.unacked))
    if found != (size,) * 3:
        raise click.ClickException(f"{size} leases were to be written, not {found}")


def _write(write: Any, keys: Keys, first: int, last: int, *, session: str) -> None:
    about = record.encode("benchmark", node=session, pid=1, deadline_seconds=None)
    write(
        keys=[
            keys.lease(""),
            keys.journal(""),
            keys.inflight,
            keys.index,
            keys.held(session),
            UNACKED.unacked,
            UNACKED.index,
            keys.owned(session),
        ],
        args=[first, last, session, milliseconds(LONG), milliseconds(JOURNAL_TTL), about],
    )


def check_format(client: Any, keys: Keys) -> None:
    """Compare a lease as it is written here with one that was taken, in an empty database, which is left empty.

    Raises:
        click.ClickException: they differ: the store has got another format since.
    """
    _write(client.register_script(WRITE_PAGE), keys, 0, 0, session="worker-0")
    written = _shape(client, keys, "task-0", "token-0")
    client.flushdb()
    _lease_store(client, keys, ttl=LONG).acquire(_start("task-1", token="token-1", session="worker-0"))
    taken = _shape(client, keys, "task-1", "token-1")
    client.flushdb()
    if written != taken:
        raise click.ClickException(f"leases are kept in another format by now: {taken}, and not {written}")


def _shape(client: Any, keys: Keys, task_id: str, token: str) -> dict[str, object]:
    """All that is kept of one lease, with the names taken out that differ from lease to lease."""
    lease = {name.decode(): value.decode() for name, value in client.hgetall(keys.lease(task_id)).items()}
    inflight = record.InFlight.decode(client.hget(keys.inflight, task_id).decode())
    fence = int(lease.pop("fence"))
    return {
        "keys": sorted(key.decode().replace(task_id, "ID") for key in client.scan_iter(f"*{task_id}")),
        "lease": {name: value.replace(token, "TOKEN") for name, value in lease.items()},
        "inflight": (inflight.token == token, inflight.session, inflight.fence == fence, inflight.task_name),
        "journal": client.zscore(keys.journal(task_id), token) == fence,
        "held": client.sismember(keys.held("worker-0"), task_id),
        "indexed": abs(client.zscore(keys.index, task_id) - inflight.acquired_ms - milliseconds(LONG)) < 1000,
        "expire": [round(client.ttl(key) / 60) for key in (keys.lease(task_id), keys.journal(task_id))],
    }


def _lease_store(client: Any, keys: Keys, *, ttl: timedelta) -> RedisLeaseStore:
    return RedisLeaseStore(
        client, keys, ttl=ttl, max_stalls=2, done_ttl=timedelta(hours=1), address="", unacked=UNACKED
    )


def _start(task_id: str, *, token: str, session: str, tag: str | None = None) -> Start:
    return Start(
        task_id=task_id,
        task_name="benchmark",
        token=token,
        session=session,
        attempt="benchmark:0",
        marker=token,
        tag=tag,
        node=session,
        pid=1,
    )


def make_fleet(stage: Stage, database: int, size: int) -> Fleet:
    """Fill a database, and make the reaper of a worker on it, as a worker makes it."""
    app = Celery("benchmark", broker=stage.server.url(database), set_as_current=False)
    plugin: Plugin = install(app)
    stores = plugin.open_stores()
    client = stage.client(database)
    check_format(client, plugin.keys)
    began = time.monotonic()
    populate(client, plugin.keys, size)
    progress(f"{size} live leases written in {time.monotonic() - began:.0f} s")
    me = Session(name="sweeper", node="sweeper", identity=identify())
    short = _lease_store(client, plugin.keys, ttl=timedelta(milliseconds=1))

    def expire() -> None:
        for _ in range(EXPIRED):
            token = uuid.uuid4().hex
            if not isinstance(short.acquire(_start(token, token=token, session="worker-0")), Acquired):
                raise click.ClickException("no lease to let expire")
        time.sleep(0.005)

    reaper = reaper_of(plugin, stores, lambda: me)
    return Fleet(
        size=size,
        stores=stores,
        reaper=reaper,
        me=me,
        expire=expire,
        end_grace=lambda: client.delete(plugin.keys.grace),
    )


def figures(fleets: list[Fleet]) -> list[Figure]:
    """Each size, and the largest beside the smallest."""
    found: list[Figure] = []
    for name, about, at_most in (("idle", "none expired", RATIO), ("healing", f"{EXPIRED} expired", None)):
        medians = []
        for fleet in fleets:
            milliseconds = [seconds * 1000 for seconds in getattr(fleet, name)]
            medians.append(spread(milliseconds).p50)
            found += figures_of(f"{name}_{fleet.size}", f"{fleet.size:,} live leases, {about}", milliseconds, unit="ms")
        found.append(
            Figure(
                name=f"{name}_ratio",
                about=f"{about}: {fleets[-1].size:,} against {fleets[0].size:,}, ratio of medians",
                value=medians[-1] / medians[0],
                at_most=at_most,
            )
        )
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=100, show_default=True, help="Sweeps of each size.")
@click.option("--quick", is_flag=True, help="Twenty sweeps, and no million.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def main(rounds: int, quick: bool, as_json: bool) -> None:
    """Time sweeps beside live leases, with none expired and with a hundred.

    Each size has a database of its own on one server, with a hundred living workers; sweeps take turns, so that what
    else the machine does hits all sizes alike. A million leases take 1.5 GB.
    """
    rounds = 20 if quick else rounds
    sizes = QUICK_SIZES if quick else SIZES
    logging.getLogger("celery_selfheal").setLevel(logging.CRITICAL)  # each stall is a line
    with Stage() as stage:
        machine = describe_machine(stage.client())
        fleets = [make_fleet(stage, database, size) for database, size in enumerate(sizes)]
        for fleet in fleets:
            fleet.warm_up()
        for _ in range(rounds):
            for fleet in fleets:
                fleet.idle.append(fleet.sweep(stalls=0))
        progress(f"{rounds} sweeps of each size with none expired")
        for _ in range(max(1, rounds // 4)):
            for fleet in fleets:
                fleet.expire()
                fleet.healing.append(fleet.sweep(stalls=EXPIRED))
        memory = stage.client().info("memory")["used_memory"]
    progress(f"the server used {memory / 2**20:.0f} MiB")
    Report(
        benchmark="sweep",
        machine=machine,
        conditions={"sweeps": rounds, "workers": WORKERS, "memory_mib": round(memory / 2**20)},
        figures=figures(fleets),
        samples={
            f"{name}_{fleet.size}_seconds": samples
            for fleet in fleets
            for name, samples in (("idle", fleet.idle), ("healing", fleet.healing))
        },
    ).show(as_json=as_json)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.sweep")
