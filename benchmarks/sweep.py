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
from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import Acquired, Start
from celery_selfheal.leases.redis import PACKAGE, RedisLeaseStore, UnackedKeys
from celery_selfheal.leases.scripts import source
from celery_selfheal.plugin.install import Plugin, reaper_of
from celery_selfheal.plugin.stores import Stores
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
PAGE = 5_000  # leases written in one call

# Leases are written by the very script that takes them, called as the store calls it: their format cannot be another.
POPULATE = """
local function acquire(KEYS, ARGV)
@acquire@
end

local first, last, workers = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now, micros = time[1], string.format('%06d', time[2])
local keys, arguments, templates = {}, {}, {}
for m, key in ipairs(KEYS) do
  keys[m] = key
end
for m = 5, #ARGV do
  arguments[m - 4] = ARGV[m]
end
for _, list in ipairs({keys, arguments}) do
  for m, text in ipairs(list) do
    if string.find(text, '<%u+>') then
      templates[#templates + 1] = {list, m, text}
    end
  end
end

for n = first, last do
  local values = {ID = 'task-' .. n, TOKEN = 'token-' .. n, SESSION = 'worker-' .. n % workers}
  values.TAG = values.SESSION .. '/' .. n
  for _, template in ipairs(templates) do
    template[1][template[2]] = string.gsub(template[3], '<(%u+)>', values)
  end
  redis.call('HSET', 'unacked', values.TAG, '[{},"","celery"]')
  redis.call('ZADD', 'unacked_index', now .. '.' .. micros, values.TAG)
  redis.call('HSET', string.gsub(ARGV[4], '<(%u+)>', values), values.TAG, now .. micros .. ' celery')
  local reply = acquire(keys, arguments)
  if reply[1] ~= 'held' then
    return redis.error_reply('lease ' .. n .. ' is ' .. reply[1])
  end
end
return last - first + 1
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
    idle: list[float] = field(default_factory=list)
    healing: list[float] = field(default_factory=list)

    def sweep(self, *, stalls: int) -> float:
        """Sweep once as the leader; the seconds it took."""
        self.stores.sessions.beat(self.me, join=True)
        began = time.perf_counter()
        report: SweepReport = self.reaper.sweep()
        seconds = time.perf_counter() - began
        if not report.led or (report.sessions, report.stalls, report.restored) != (0, stalls, 0):
            raise click.ClickException(f"a sweep beside {self.size} leases did something else: {report}")
        return seconds


class _Recorder:
    """Stands in for a client, and keeps what a script would have been called with."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.arguments: list[str | int] = []

    def register_script(self, _text: str) -> Callable[..., list[bytes]]:
        return self._run

    def _run(self, *, keys: list[str], args: list[str | int]) -> list[bytes]:
        self.keys, self.arguments = keys, args
        return [b"not mine"]


def populate(client: Any, keys: Keys, size: int) -> None:
    """Take ``size`` leases for ``WORKERS`` living workers on other machines, with their deliveries."""
    sessions = RedisSessionStore(client, keys, ttl=LONG, address="")
    for n in range(WORKERS):
        host = ProcessIdentity(host=f"host-{n}", pid=1, started="1")
        sessions.beat(Session(name=f"worker-{n}", node=f"worker-{n}", identity=host), join=True)
    recorder: Any = _Recorder()
    _lease_store(recorder, keys, ttl=LONG).acquire(_start("<ID>", token="<TOKEN>", session="<SESSION>", tag="<TAG>"))
    script = client.register_script(POPULATE.replace("@acquire@", source(PACKAGE, "acquire")))
    written = 0
    for first in range(0, size, PAGE):
        last = min(first + PAGE, size) - 1
        written += script(keys=recorder.keys, args=[first, last, WORKERS, keys.owned("<SESSION>"), *recorder.arguments])
    found = (client.zcard(keys.index), client.hlen(keys.inflight), client.hlen(UNACKED.unacked), written)
    if found != (size,) * 4 or not client.exists(keys.lease("task-0"), keys.journal("task-0")):
        raise click.ClickException(f"{size} leases were to be written, not {found}")


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
    return Fleet(size=size, stores=stores, reaper=reaper, me=me, expire=expire)


def figures(fleets: list[Fleet]) -> list[Figure]:
    """Each size, and the largest beside the smallest."""
    found: list[Figure] = []
    for name, about in (("idle", "none expired"), ("healing", f"{EXPIRED} expired")):
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
                at_most=RATIO,
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
            fleet.sweep(stalls=0)  # the first one connects and loads the scripts
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
