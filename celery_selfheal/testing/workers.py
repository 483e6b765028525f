"""A real ``celery worker``, to be killed, paused and read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from celery_selfheal.testing import processes

GRACE_SECONDS = 5.0


class WorkerProcess:
    """A real ``celery worker`` in its own process group.

    "Group" is the worker and all that it started. When this process is killed, the worker dies with it, as servers
    do (see ``processes.spawn``).

    Args:
        app: What ``celery -A`` takes.
        cwd: Where the worker starts, and where its app is imported from.
        log: File to which its output is appended. ``log_text`` and the waits see what came since ``start``.
        name: First part of its node name.
        prefetch: Celery's prefetch multiplier.
        queues: What ``-Q`` takes.
        env: Added to the environment of this process.
        args: More arguments of ``celery worker``.
        pid_namespace: Whether it gets pids of its own, as in a container, so that no worker outside can judge by pid
            whether it lives (Linux with ``unshare``, as root or where users may make namespaces). Our methods take and
            return pids as seen from outside.
    """

    def __init__(
        self,
        app: str,
        *,
        cwd: Path,
        log: Path,
        name: str = "w1",
        pool: str = "prefork",
        concurrency: int = 1,
        prefetch: int = 4,
        queues: str | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        pid_namespace: bool = False,
    ) -> None:
        self.name = name
        self.log = log.absolute()
        self._cwd = cwd
        self._env = dict(env or {})
        self._pid_namespace = pid_namespace
        self._command = [
            *(_unshare() if pid_namespace else []),
            *(sys.executable, "-m", "celery", "-A", app, "worker", "--without-mingle", "--without-gossip"),
            *("-P", pool, "-c", str(concurrency), "--prefetch-multiplier", str(prefetch)),
            *("-n", f"{name}@%h", "-l", "INFO"),
            *(["-Q", queues] if queues else []),
            *args,
        ]
        # Workers that are killed leave their temporary files behind.
        self._temporary = self.log.with_name(f"{log.name}.tmp")
        self._log_start = 0
        self._main_pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the worker's main process, also after its end."""
        self._started()
        return self._main_pid

    @property
    def alive(self) -> bool:
        """Whether the main process runs, or is paused."""
        return self._process is not None and self._process.poll() is None

    def child_pids(self) -> list[int]:
        """Process ids of the living pool children, lowest first; empty for pools of threads or greenlets."""
        return processes.children(self.pid)

    def start(self) -> WorkerProcess:
        """Start it, without waiting until it is ready. After its end it may be started again.

        Raises:
            RuntimeError: it runs.
            ChildProcessError: it could not be put in a pid namespace.
        """
        if self.alive:
            raise RuntimeError(f"worker {self.name} runs already")
        self._temporary.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_size()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(self._temporary), **self._env}
        self._process = processes.spawn(self._command, cwd=self._cwd, log=self.log, env=env)
        self._main_pid = self._process.pid
        if self._pid_namespace:
            self._main_pid = self._find_main_in_namespace(self._process)
        return self

    def wait_ready(self, timeout: float = 30) -> None:
        """Wait until it takes tasks.

        Raises:
            ChildProcessError, TimeoutError: as ``wait_log``.
        """
        self.wait_log("ready.", timeout)

    def wait_log(self, text: str, timeout: float = 30, after: int = 0) -> str:
        """Wait until the log holds a text, and return the first whole line with it.

        Args:
            timeout: Seconds.
            after: Only what follows so many characters of the log counts: ``after=len(worker.log_text())`` waits
                for something new.

        Raises:
            ChildProcessError: the worker ended without it; with the end of its log.
            TimeoutError: it did not come in time; with the end of the log.
        """
        line: str | None = None
        size_read = -1

        def is_settled() -> bool:
            nonlocal line, size_read
            # Read before the log: what a worker writes just before its end still counts.
            is_over = not self.alive
            size = self._log_size()
            if size != size_read or is_over:
                size_read = size
                line = _find_line(text, self.log_text()[after:], is_over=is_over)
            return line is not None or is_over

        in_time = processes.wait_until(is_settled, seconds=timeout)
        if line is not None:
            return line
        trouble = f"worker {self.name} wrote no {text!r}"
        if in_time:
            raise ChildProcessError(f"{trouble}, it ended with {self._started().returncode}:{processes.tail(self.log)}")
        raise TimeoutError(f"{trouble} in {timeout:g} s:{processes.tail(self.log)}")

    def log_text(self) -> str:
        """All that it wrote since ``start``."""
        with suppress(FileNotFoundError), self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")
        return ""

    def kill_group(self) -> None:
        """SIGKILL to the worker and all that it started; when this returns, its main process is gone."""
        if self._pid_namespace:
            # With the first process of a namespace the kernel ends all others, whatever their group.
            self.kill_main()
        else:
            self._signal_group(signal.SIGKILL)
            self._wait_killed()

    def kill_main(self) -> None:
        """SIGKILL to the main process only; when this returns, it is gone.

        On Linux prefork children follow by themselves: Celery has asked the kernel for it.
        """
        self._signal_main(signal.SIGKILL)
        if self._pid_namespace and self.alive:
            # Its starter ends with it, unless it was paused.
            self._started().send_signal(signal.SIGCONT)
        self._wait_killed()

    def kill_child(self, pid: int | None = None) -> int:
        """SIGKILL to one pool child, by default the first; returns its pid.

        Raises:
            ChildProcessError: the worker has no such child.
        """
        pids = self.child_pids()
        wanted = pids[0] if pid is None and pids else pid
        if wanted not in pids or wanted is None:
            raise ChildProcessError(f"worker {self.name} has no pool child {'' if pid is None else pid} among {pids}")
        os.kill(wanted, signal.SIGKILL)
        return wanted

    def pause(self) -> None:
        """SIGSTOP to the worker and all that it started; when this returns, main process and children stand still."""
        self._signal_group(signal.SIGSTOP)
        processes.wait_stopped([self.pid, *self.child_pids()])

    def resume(self) -> None:
        """SIGCONT to the worker and all that it started."""
        self._signal_group(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM to the main process: a warm shutdown, which waits for running tasks."""
        self._signal_main(signal.SIGTERM)

    def quit(self) -> None:
        """SIGQUIT to the main process: a cold shutdown."""
        self._signal_main(signal.SIGQUIT)

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit status, which is negative if a signal ended it.

        From a pid namespace it comes by way of ``unshare``, which makes a 1 of SIGKILL.

        Raises:
            TimeoutError: it still runs after so many seconds; with the end of its log.
        """
        process = self._started()
        if not processes.wait_reaped(process, seconds=timeout):
            raise TimeoutError(f"worker {self.name} still runs after {timeout:g} s:{processes.tail(self.log)}")
        return int(process.returncode)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """End it, whatever its state: warm, and after ``grace`` seconds all that is left of it by SIGKILL.

        Does nothing if it was not started or was stopped before. The log stays.
        """
        if self._process is None:
            return
        if self.alive:
            self._signal_main(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)
            processes.wait_reaped(self._process, seconds=grace)
        self.kill_group()
        self._process = None
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> WorkerProcess:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop(grace=0)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"worker {self.name} was not started, or was stopped")
        return self._process

    def _signal_main(self, number: signal.Signals) -> None:
        # While the starter of a namespace is not reaped, its child is there too, and the pid is no stranger's.
        if self._started().poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._main_pid, number)

    def _signal_group(self, number: signal.Signals) -> None:
        # Also after the main process: its number is not given away while others of the group live.
        with suppress(ProcessLookupError):
            os.killpg(self._started().pid, number)

    def _wait_killed(self) -> None:
        if not processes.wait_reaped(self._started(), seconds=processes.SIGNAL_SECONDS):
            raise TimeoutError(f"SIGKILL did not end worker {self.name}, process {self.pid}")

    def _find_main_in_namespace(self, starter: subprocess.Popen[bytes]) -> int:
        found: list[int] = []

        def is_settled() -> bool:
            found[:] = processes.children(starter.pid)
            return bool(found) or not self.alive

        if not processes.wait_until(is_settled, seconds=processes.SIGNAL_SECONDS) or not found:
            processes.end(starter, grace=0)
            raise ChildProcessError(f"no pid namespace for worker {self.name}:{processes.tail(self.log)}")
        return found[0]

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


def _unshare() -> list[str]:
    # Who is not root may do it inside a user namespace, where the system allows those.
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    return ["unshare", *user, "--pid", "--fork", "--kill-child", "--"]


def _find_line(text: str, log: str, *, is_over: bool) -> str | None:
    position = log.find(text)
    if position < 0:
        return None
    begin = log.rfind("\n", 0, position) + 1
    end = log.find("\n", position + len(text))
    if end < 0:
        # The rest of the line may not have been written yet.
        return log[begin:] if is_over else None
    return log[begin:end]
