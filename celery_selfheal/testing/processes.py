"""Processes that die with the one that started them, and what the kernel tells about them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from celery_selfheal import clock

PROC = Path("/proc")
POLL_SECONDS = 0.02
SIGNAL_SECONDS = 10.0  # what SIGKILL and SIGSTOP may take on a machine whose disk is busy


class Row(NamedTuple):
    """A process in the table of the system.

    Attributes:
        state: One letter, as ``ps`` shows it: ``T`` is stopped by a signal, ``Z`` ended and not yet reaped.
    """

    pid: int
    parent: int
    state: str


def spawn(
    command: Sequence[str],
    *,
    cwd: Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    user: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own and append what it prints to ``log``.

    Where Linux and ``setpriv`` are at hand, the kernel kills it as soon as this process is gone, whatever ended it.
    Elsewhere an interpreter that is killed leaves it behind. Any thread may call, and may end before the command does.

    Args:
        user: Number of a user, and group, to run it as; only root can.
    """
    return _lasting_thread(os.getpid()).submit(_spawn, [*_bound_to_us(), *command], cwd, log, env, user).result()


def process_table() -> list[Row]:
    """Every process that this one can see, by pid."""
    if not (PROC / "self" / "stat").exists():
        return _ask_ps()
    rows = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            # A process may end between the listing and the look.
            with suppress(OSError):
                # The command in field 2 may itself hold spaces and parentheses; no field after it does.
                state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                rows.append(Row(int(folder.name), int(parent), state))
    return sorted(rows)


def children(pid: int) -> list[int]:
    """Pids of the living direct children of a process, lowest first."""
    return [row.pid for row in process_table() if row.parent == pid and row.state != "Z"]


def wait_until(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Wait for something to become true; ``False`` if it did not in time."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def wait_stopped(pids: Iterable[int]) -> None:
    """Wait until SIGSTOP, sent before, has taken effect: until then a process may still answer.

    Raises:
        TimeoutError: one still runs.
    """
    wanted = set(pids)

    def are_stopped() -> bool:
        return not any(row.pid in wanted and row.state[0] not in "TZ" for row in process_table())

    if not wait_until(are_stopped, seconds=SIGNAL_SECONDS):
        raise TimeoutError(f"SIGSTOP did not stop all of the processes {sorted(wanted)}")


def wait_reaped(process: subprocess.Popen[bytes], *, seconds: float) -> bool:
    """Wait for a process of ours to end, and take it off the table; ``False`` if it lives on."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: subprocess.Popen[bytes], *, grace: float) -> None:
    """End a process, also a stopped one: SIGTERM, and after ``grace`` seconds SIGKILL."""
    # Nothing is sent to a process that was reaped: Popen knows, so that no stranger with the same pid is hit.
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    if not wait_reaped(process, seconds=grace):
        process.kill()
        process.wait(SIGNAL_SECONDS)


def tail(log: Path, *, lines: int = 25) -> str:
    """Return the end of a log for an error, indented."""
    try:
        text = log.read_text(errors="replace")
    except OSError as exc:
        text = str(exc)
    return "".join(f"\n    {line}" for line in text.splitlines()[-lines:])


@cache
def _lasting_thread(pid: int) -> ThreadPoolExecutor:
    """Thread of this process (a forked child has none of its parent's) that lives as long as the interpreter.

    The kernel's "parent" that a process must not outlive is the thread that started it, not the whole process.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"starter-{pid}")


def _spawn(
    command: Sequence[str], cwd: Path, log: Path, env: Mapping[str, str] | None, user: int | None
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the one who started us: the servers must outlast the clean-up that it causes.
            start_new_session=True,
            # Before setpriv runs: the kernel forgets the bond when the user changes.
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )


@cache
def _bound_to_us() -> tuple[str, ...]:
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    if setpriv is None:
        return ()
    # It sets the bond and becomes the command, so that the pid is the command's own.
    prefix = (setpriv, "--pdeathsig", "KILL", "--")
    # Small systems have a setpriv that knows no such option.
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0 else ()


def _ask_ps() -> list[Row]:
    output = subprocess.run(["ps", "-axo", "pid=,ppid=,state="], capture_output=True, text=True, check=True).stdout  # noqa: S607  # where it is differs by system
    columns = (line.split() for line in output.splitlines())
    return sorted(Row(int(pid), int(parent), state[0]) for pid, parent, state, *_ in columns)
