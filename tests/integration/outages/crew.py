"""The servers, workers and messages of one test, what the bodies wrote down, and what is left of it all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from celery_selfheal import install
from celery_selfheal.keys import Keys
from celery_selfheal.testing import RedisServer, TcpProxy, WorkerProcess

APPS = Path(__file__).parent / "apps"
APP = "depot"
PATIENCE_SECONDS = 60.0  # of a machine that does much else; no promise

SHORT_TTL: Mapping[str, Any] = {
    "selfheal_lease_ttl": 3,
    "selfheal_heartbeat_interval": 1,
    "selfheal_reaper_interval": 0.5,
}


@dataclass(frozen=True)
class Entry:
    """One line of the diary.

    Attributes:
        node: First part of the worker's node name.
        at: Monotonic seconds, the same for all processes of a machine.
        clock: Unix seconds.
    """

    event: str
    id: str
    node: str
    pid: int
    at: float
    clock: float


class Diary:
    """What task bodies wrote down, in one file that outlives every process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def entries(self, event: str, task_id: str = "") -> list[Entry]:
        # A line that is just being written has no end yet.
        *lines, _ = self.path.read_text().split("\n")
        entries = [Entry(**json.loads(line)) for line in lines]
        return [entry for entry in entries if entry.event == event and task_id in ("", entry.id)]

    def starts(self, task_id: str = "") -> list[Entry]:
        return self.entries("start", task_id)

    def ends(self, task_id: str = "") -> list[Entry]:
        return self.entries("end", task_id)

    def counts(self, event: str) -> Counter[str]:
        return Counter(entry.id for entry in self.entries(event))


class Gate:
    """Holds back the bodies of ``depot.load``, until it opens for all or for those of one worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def __str__(self) -> str:
        return str(self.folder)

    def open(self, node: str = "all") -> None:
        (self.folder / node).touch()


class Crew:
    """Starts workers of the apps in ``apps`` and sends to them; ends them all.

    Args:
        server: The broker, with the results in the database after ``db``.
        leases: Another server, if the leases live there.
        prefix: What ``settings`` give as kombu's ``global_keyprefix``.

    Attributes:
        settings: Celery's and ours, for producer and workers alike; to be set before first use.
    """

    def __init__(
        self, server: RedisServer, folder: Path, *, db: int = 0, prefix: str = "", leases: RedisServer | None = None
    ) -> None:
        self.server = server
        self.folder = folder
        self.diary = Diary(folder / "diary.jsonl")
        self.settings: dict[str, Any] = {}
        self.workers: list[WorkerProcess] = []
        self.keys = Keys(prefix="selfheal", app=APP)
        self.broker = server.client(db)
        self.lease_store = leases.client() if leases else self.broker
        self._db = db
        self._prefix = prefix
        self._producer: Celery | None = None
        self._commands: list[subprocess.Popen[str]] = []

    @property
    def producer(self) -> Any:
        """The application as a web process has it, for sending and for results."""
        if self._producer is None:
            self._producer = Celery(
                APP, broker=self.server.url(self._db), backend=self.server.url(self._db + 1), set_as_current=False
            )
            self._producer.conf.update(self.settings)
            install(self._producer)
        return self._producer

    def gate(self, name: str = "gate") -> Gate:
        return Gate(self.folder / name)

    def ship(self, task_id: str, *, seconds: float = 0, **options: Any) -> str:
        self.producer.send_task("depot.ship", (seconds,), task_id=task_id, **options)
        return task_id

    def load(self, task_id: str, gate: Gate, **options: Any) -> str:
        self.producer.send_task("depot.load", (str(gate),), task_id=task_id, **options)
        return task_id

    def result(self, task_id: str) -> Any:
        return self.producer.AsyncResult(task_id).get(timeout=10)

    def start(
        self, name: str, *, app: str = APP, via: TcpProxy | None = None, ready: bool = True, **options: Any
    ) -> WorkerProcess:
        """Start a worker.

        Args:
            via: The only way to the server that it gets.
            options: As for ``WorkerProcess``.
        """
        worker = WorkerProcess(
            app, cwd=self.folder, log=self.folder / f"{name}.log", name=name, env=self.env(via), **options
        )
        self.workers.append(worker)
        worker.start()
        if ready:
            worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``celery -A depot ...``; what it prints is to be read from its pipes."""
        command = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", APP, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.env()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._commands.append(command)
        return command

    def reap(self) -> dict[str, int]:
        """What ``celery -A depot selfheal reap --json`` says that it did."""
        command = self.command("selfheal", "reap", "--json")
        output, errors = command.communicate(timeout=PATIENCE_SECONDS)
        assert command.returncode == 0, errors
        return reap_report(output)

    def wait(self, what: str, condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> float:
        """Wait until something is true; returns when that was seen, in monotonic seconds.

        A server that is away makes nothing true.
        """
        deadline = time.monotonic() + seconds
        while True:
            with suppress(redis.ConnectionError):
                if condition():
                    return time.monotonic()
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
            time.sleep(0.02)

    def wait_held(self, count: int) -> None:
        """Wait until workers hold so many messages, running and reserved."""
        self.wait(f"{count} messages are held", lambda: len(self.held()) == count)

    def wait_started(self, task_ids: Iterable[str], *, times: int = 1, seconds: float = PATIENCE_SECONDS) -> None:
        wanted = set(task_ids)

        def have_started() -> bool:
            counts = self.diary.counts("start")
            return all(counts[task_id] >= times for task_id in wanted)

        self.wait(f"{sorted(wanted)} start {times} times", have_started, seconds=seconds)

    def wait_ended(self, task_ids: Iterable[str], *, seconds: float = PATIENCE_SECONDS) -> None:
        wanted = set(task_ids)
        self.wait(f"all of {len(wanted)} end", lambda: wanted <= set(self.diary.counts("end")), seconds=seconds)

    def wait_nothing_left(self) -> None:
        """Wait until no message, lease or record of one is left, nor a session of a dead worker."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, left

    def held(self) -> dict[str, str]:
        """Tag of each held delivery, by task id."""
        entries = self.broker.hgetall(self._prefix + "unacked")
        return {json.loads(entry)[0]["headers"]["id"]: tag.decode() for tag, entry in entries.items()}

    def waiting(self, queue: str = "celery") -> list[str]:
        """Ids of the messages in one list, the next to be taken first."""
        messages = self.broker.lrange(self._prefix + queue, 0, -1)
        return [json.loads(message)["headers"]["id"] for message in reversed(messages)]

    def received_at(self, task_id: str) -> float:
        """Since when a delivery is unacknowledged, as the visibility timeout sees it: Unix seconds."""
        score = self.broker.zscore(self._prefix + "unacked_index", self.held()[task_id])
        assert score is not None
        return float(score)

    def leased(self) -> set[str]:
        """Ids of the tasks on which somebody has a lease."""
        root = self.keys.lease("")
        return {key.decode().removeprefix(root) for key in self.lease_store.keys(f"{root}*")}

    def sessions(self) -> list[str]:
        """Names of the sessions that are not buried."""
        return [session.decode() for session in self.broker.zrange(self.keys.sessions, 0, -1)]

    def sessions_of(self, node: str) -> list[str]:
        return [session for session in self.sessions() if session.startswith(f"{node}@")]

    def is_alive(self, session: str) -> bool:
        """Whether the session has neither run out nor ended."""
        return bool(self.broker.exists(self.keys.session(session)))

    def check_each_ran_once(self) -> None:
        """No body started or ended twice, nobody was taken for dead, and no worker has died of it."""
        assert set(self.diary.counts("start").values()) == {1}
        assert set(self.diary.counts("end").values()) == {1}
        for worker in self.workers:
            log = worker.log_text()
            assert worker.alive, log
            assert "stalled" not in log, log

    def left(self) -> dict[str, object]:
        """All that must be gone when every task has ended; empty if it is."""
        left: dict[str, object] = {}
        traces = tuple(f"{self.keys.root}:{name}" for name in ("lease:", "journal:", "inflight", "expiry", "owned:"))
        lasting = (self.keys.root, f"{self._prefix}_kombu.binding", f"{self._prefix}unacked_mutex")
        for client in {id(one): one for one in (self.broker, self.lease_store)}.values():
            for key in sorted(key.decode() for key in client.keys("*")):
                if key.startswith(traces) or not key.startswith(lasting):
                    left[key] = client.type(key)
        sessions = self.sessions()
        if len(sessions) > sum(worker.alive for worker in self.workers):
            left["sessions"] = sessions
        return left

    def env(self, via: TcpProxy | None = None) -> dict[str, str]:
        """What the apps read."""
        urls = [self.server.url(self._db), self.server.url(self._db + 1)]
        if via is not None:
            urls = [re.sub(r":\d+/", f":{via.port}/", url) for url in urls]
        return {
            "DEPOT_BROKER": urls[0],
            "DEPOT_RESULTS": urls[1],
            "DEPOT_SETTINGS": json.dumps(self.settings),
            "DEPOT_DIARY": str(self.diary.path),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }

    def close(self) -> None:
        """End everything; the logs stay."""
        for worker in self.workers:
            worker.stop(grace=0)
        for command in self._commands:
            command.kill()
            command.communicate()
        if self._producer is not None:
            self._producer.close()
        self.broker.close()
        self.lease_store.close()


def reap_report(output: str) -> dict[str, int]:
    """The document that a sweep on request printed."""
    report: dict[str, int] = json.loads(output)
    return report
