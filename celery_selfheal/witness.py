"""Host witness: asks the kernel whether a process of this machine is gone.

A worker killed beside a living one is dead now, whatever its TTL says. ``is_gone`` says so only if the kernel does:
every doubt is ``None``, and the TTL decides.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")

_DEAD_STATES = frozenset("ZXx")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, told from any other that gets its pid later.

    Attributes:
        host: Digest of the boot and the pid namespace: processes with the same one can judge each other.
        pid: As seen in that namespace.
        started: Start time in clock ticks since boot, as the kernel writes it.
    """

    host: str
    pid: int
    started: str


def identify(pid: int | None = None) -> ProcessIdentity | None:
    """Describe a process of this machine (by default, this one).

    Returns:
        ``None`` where there is no witness: no such process, no ``/proc``, or one of another pid namespace.
    """
    pid = os.getpid() if pid is None else pid
    host = _host()
    if host is None or pid <= 0:
        return None
    try:
        stat = _read_stat(pid)
    except OSError:
        return None
    return ProcessIdentity(host=host, pid=pid, started=stat.started)


def is_gone(identity: ProcessIdentity) -> bool | None:
    """Tell whether the process has ended.

    Returns:
        ``True`` if the kernel says that it runs no more, ``False`` if it lives (also when stopped by a signal),
        ``None`` if this process cannot judge.
    """
    if identity.pid <= 0 or identity.host != _host():
        return None
    try:
        stat = _read_stat(identity.pid)
    except (FileNotFoundError, ProcessLookupError):
        return _is_unknown_to_kernel(identity.pid)
    except OSError:
        return None
    if stat.started != identity.started:
        return True
    # While a thread is left, the process can still write: a core dump or a disk that hangs may hold it for long.
    return stat.state in _DEAD_STATES and stat.threads <= 1


def _is_unknown_to_kernel(pid: int) -> bool | None:
    # A /proc mounted with hidepid leaves out living processes of other users: absence there proves nothing.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return None


class _Stat(NamedTuple):
    state: str
    threads: int
    started: str


def _read_stat(pid: int) -> _Stat:
    text = (PROC / str(pid) / "stat").read_bytes()
    # The command in field 2 may itself hold spaces and parentheses; no field after it does.
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 20:
        raise OSError(f"{PROC}/{pid}/stat is not as Linux writes it")
    return _Stat(state=fields[0].decode(), threads=int(fields[17]), started=fields[19].decode())


def _host() -> str | None:
    """Digest of what must be equal for two processes to see each other's pids; ``None`` without a witness."""
    try:
        if not _sees_own_namespace():
            return None
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink(PROC / "self/ns/pid")
    except OSError:
        return None
    # Boot and pid namespace would do, were there no copied virtual machines and no numbers used again.
    parts = (boot, pid_namespace, _time_namespace(), os.uname().nodename, _machine_id())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _sees_own_namespace() -> bool:
    pid = os.getpid()
    if os.readlink(PROC / "self") != str(pid):
        return False
    # Both could have the same number by accident; then the kernel lists one pid for each namespace below the mount.
    for line in (PROC / "self/status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1:] == [str(pid)]
    return True


def _time_namespace() -> str:
    # The kernel shifts start times by the reader's time namespace; before Linux 5.6 there is none.
    try:
        return os.readlink(PROC / "self/ns/time")
    except OSError:
        return ""


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
