"""Three real workers, and whoever keeps them running: what systemd or Kubernetes is elsewhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from celery_selfheal.testing import processes
from celery_selfheal.testing.workers import WorkerProcess
from example_project.evidence import Healed, Log, healed

ROOT = Path(__file__).parent.parent
NAMES = ("w1", "w2", "w3")
CONCURRENCY = 2
PREFETCH = 4  # for each of its processes: two tasks run in a worker, and six are reserved
START_SECONDS = 60  # on a small machine that is busy
RESTART_PAUSE_SECONDS = 1.5  # supervisors do not restart at once


class Fleet:
    """The workers by name, with what each is doing: starting, running, killed or paused.

    Attributes:
        healed: What the logs tell of healing so far.
        own_deaths: Workers that ended although nobody ended them.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.workers = {
            name: WorkerProcess(
                "example_project.app",
                cwd=ROOT,
                log=folder / f"{name}.log",
                name=name,
                concurrency=CONCURRENCY,
                prefetch=PREFETCH,
                env=env,
            )
            for name in NAMES
        }
        self.states = dict.fromkeys(NAMES, "stopped")
        self.healed: list[Healed] = []
        self.own_deaths: list[str] = []
        self._logs = {name: Log(worker.log) for name, worker in self.workers.items()}
        self._restart_at: dict[str, float] = {}

    def start(self) -> None:
        """Start all at once and wait until they take tasks."""
        for name in NAMES:
            self._start(name)
        for worker in self.workers.values():
            worker.wait_ready(START_SECONDS)
        self.look()

    def look(self) -> list[str]:
        """Read the logs and restart what is down; what is new, in words."""
        news = []
        for name, log in self._logs.items():
            for line in log.new_lines():
                found = healed(line)
                if found:
                    self.healed.append(found)
                elif line.endswith(" ready.") and self.states[name] == "starting":
                    self.states[name] = "running"
                    news.append(f"{name} is ready")
        for name, worker in self.workers.items():
            if self.states[name] in ("starting", "running") and not worker.alive:
                self.own_deaths.append(name)
                news.append(f"{name} died by itself")
                self._down(name)
        for name, at in list(self._restart_at.items()):
            if time.monotonic() >= at:
                del self._restart_at[name]
                self._start(name)
                news.append(f"{name} is started again by its supervisor")
        return news

    def hold_child(self, pid: int) -> None:
        """SIGSTOP to one process of a pool; when this returns, it stands still."""
        os.kill(pid, signal.SIGSTOP)
        processes.wait_stopped([pid])

    def release_child(self, pid: int) -> None:
        """SIGCONT to a process that was held."""
        os.kill(pid, signal.SIGCONT)

    def kill_child(self, name: str, pid: int) -> None:
        """SIGKILL to one process of a worker's pool; the worker replaces it by itself."""
        self.workers[name].kill_child(pid)

    def kill(self, name: str) -> None:
        """SIGKILL to a worker and all its processes; its supervisor starts it again a little later."""
        self.workers[name].kill_group()
        self._down(name)

    def pause(self, name: str) -> None:
        """SIGSTOP: the worker stands still, as on a host that swaps or is being moved."""
        self.workers[name].pause()
        self.states[name] = "paused"

    def resume(self, name: str) -> None:
        """SIGCONT: it goes on, and knows nothing of the time between."""
        self.workers[name].resume()
        self.states[name] = "running"

    def stop(self) -> None:
        """End all of them, whatever their state."""
        for worker in self.workers.values():
            worker.stop(grace=0)

    def _down(self, name: str) -> None:
        self.states[name] = "killed"
        self._restart_at[name] = time.monotonic() + RESTART_PAUSE_SECONDS

    def _start(self, name: str) -> None:
        self.workers[name].start()
        self.states[name] = "starting"
