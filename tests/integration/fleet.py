"""The workers of one test, what they wrote down, and what they left behind."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest
from celery import _state

from celery_selfheal.keys import Keys
from celery_selfheal.testing import RedisServer, WorkerProcess

APPS = Path(__file__).parent / "apps"
BROKER, RESULTS = 0, 1  # databases
PATIENCE_SECONDS = 60.0  # of a machine that does much else; no promise


@dataclass(frozen=True)
class Entry:
    """One line of the diary.

    Attributes:
        at: Monotonic seconds, the same for all processes of a machine.
        clock: Unix seconds.
    """

    event: str
    id: str
    pid: int
    at: float
    clock: float


class Diary:
    """What task bodies wrote down, in one file that outlives every process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def entries(self, event: str = "", task_id: str = "") -> list[Entry]:
        lines = self.path.read_text().splitlines()
        entries = [Entry(**json.loads(line)) for line in lines]
        return [entry for entry in entries if event in ("", entry.event) and task_id in ("", entry.id)]

    def starts(self, task_id: str = "") -> list[Entry]:
        return self.entries("start", task_id)

    def ends(self, task_id: str = "") -> list[Entry]:
        return self.entries("end", task_id)

    def start_counts(self) -> Counter[str]:
        return Counter(entry.id for entry in self.starts())


class Fleet:
    """Starts workers of the apps in ``apps`` on one server, and ends them all.

    Args:
        settings: Celery's and ours, for producer and workers alike.
    """

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.folder = folder
        self.diary = Diary(folder / "diary.jsonl")
        self.settings: dict[str, Any] = {}
        self.workers: list[WorkerProcess] = []
        self._broker = server.client(BROKER)
        self._results = server.client(RESULTS)
        self._keys = Keys(prefix="selfheal", app="shop")
        self._urls = {"SHOP_BROKER": server.url(BROKER), "SHOP_RESULTS": server.url(RESULTS)}
        self._app_before = _state._tls.current_app
        self._shop: ModuleType | None = None
        self._empty()

    @property
    def shop(self) -> Any:
        """The shop's app in this process, for sending; loaded with the settings at first use."""
        if self._shop is None:
            with mock.patch.dict(os.environ, self._env()):
                spec = importlib.util.spec_from_file_location("shop", APPS / "shop.py")
                assert spec is not None
                assert spec.loader is not None
                self._shop = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(self._shop)
        return self._shop

    def start(self, name: str, *, app: str = "shop", **options: Any) -> WorkerProcess:
        """Start a worker in the test's folder; ``options`` as for ``WorkerProcess``."""
        if options.get("pool") == "gevent" and importlib.util.find_spec("gevent") is None:
            _leave_out("gevent is not installed")
        worker = WorkerProcess(
            app, cwd=self.folder, log=self.folder / f"{name}.log", name=name, env=self._env(), **options
        )
        self.workers.append(worker)
        try:
            worker.start()
        except (ChildProcessError, FileNotFoundError) as exc:
            _leave_out(str(exc))
        worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def wait(
        self,
        what: str,
        condition: Callable[[], object],
        *,
        meanwhile: Callable[[], object] = int,
        trouble: Callable[[], object] = str,
    ) -> None:
        """Wait until something is true.

        Args:
            meanwhile: Called again and again until then.
            trouble: What to show if it does not come true.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s in vain until {what}: {trouble()}"
            meanwhile()
            time.sleep(0.02)

    def wait_held(self, count: int) -> None:
        """Wait until workers hold so many messages, running and reserved."""
        self.wait(f"{count} messages are held", lambda: self._broker.hlen("unacked") == count, trouble=self.left)

    def wait_started(self, *task_ids: str) -> None:
        self._wait_noted("start", task_ids)

    def wait_ended(self, *task_ids: str) -> None:
        self._wait_noted("end", task_ids)

    def wait_nothing_left(self) -> None:
        """Wait until no message, lease or record of one is left, nor a session of a dead worker."""
        self.wait("nothing is left", lambda: self.left() == {}, trouble=self.left)

    def left(self) -> dict[str, object]:
        """All that must be gone when every task has ended; empty if it is."""
        root = self._keys.root
        keys = sorted(key.decode() for key in self._broker.keys("*"))
        traces = ("lease:", "journal:", "inflight", "expiry", "owned:", "held:")
        left: dict[str, object] = {
            key: self._content(key)
            for key in keys
            if key.startswith(("celery", "unacked", *(f"{root}:{trace}" for trace in traces)))
        }
        sessions = [session.decode() for session in self._broker.zrange(self._keys.sessions, 0, -1)]
        living = sum(worker.alive for worker in self.workers)
        if len(sessions) > living:
            left["sessions"] = sessions
        return left

    def dead_letters(self) -> list[str]:
        """Task ids in the dead letter queue, newest first."""
        return [json.loads(message)["headers"]["id"] for message in self._broker.lrange("shop.dlq", 0, -1)]

    def delivery_score(self, tag: str) -> float:
        """Since when the delivery is unacknowledged, as kombu's visibility timeout sees it: Unix seconds."""
        score = self._broker.zscore("unacked_index", tag)
        return -math.inf if score is None else float(score)

    def delivery_tags(self) -> dict[str, str]:
        """Tag of the held delivery, by task id."""
        held = self._broker.hgetall("unacked")
        return {json.loads(entry)[0]["headers"]["id"]: tag.decode() for tag, entry in held.items()}

    def store_seconds(self) -> float:
        """The broker's clock, Unix seconds."""
        seconds, micros = self._broker.time()
        return float(seconds + micros / 1e6)

    def counted(self, event: str) -> int:
        """How often the lease store counted an event, over all tasks."""
        counts = self._broker.hgetall(self._keys.counters)
        return sum(int(count) for name, count in counts.items() if name.decode().startswith(f"{event}|"))

    def session_ends(self, node: str) -> float:
        """When the session of a worker runs out unless it beats again, in monotonic seconds."""
        to_monotonic = time.monotonic() - self.store_seconds()
        for session, expires_ms in self._broker.zrange(self._keys.sessions, 0, -1, withscores=True):
            if session.decode().startswith(f"{node}@"):
                return float(expires_ms) / 1000 + to_monotonic
        raise LookupError(f"no session of {node}")

    def close(self) -> None:
        """End everything; the logs stay."""
        for worker in self.workers:
            worker.stop(grace=0)
        if self._shop is not None:
            self._shop.app.close()
        _state._set_current_app(self._app_before)
        self._empty()
        self._broker.close()
        self._results.close()

    def _wait_noted(self, event: str, task_ids: Iterable[str]) -> None:
        def missing() -> set[str]:
            return set(task_ids) - {entry.id for entry in self.diary.entries(event)}

        self.wait(f"the {event} of all is noted", lambda: not missing(), trouble=missing)

    def _empty(self) -> None:
        self._broker.flushdb()
        self._results.flushdb()

    def _env(self) -> Mapping[str, str]:
        return {
            **self._urls,
            "SHOP_SETTINGS": json.dumps(self.settings),
            "SHOP_DIARY": str(self.diary.path),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }

    def _content(self, key: str) -> object:
        read = {
            b"list": lambda: self._broker.lrange(key, 0, -1),
            b"hash": lambda: self._broker.hgetall(key),
            b"zset": lambda: self._broker.zrange(key, 0, -1, withscores=True),
            b"set": lambda: self._broker.smembers(key),
        }.get(self._broker.type(key), lambda: self._broker.type(key))
        return read()


def _leave_out(why: str) -> NoReturn:
    """Skip the test on a machine that cannot run it; in CI, which must, fail it."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(why)
    pytest.skip(why)
