"""A private database server, to be killed, paused and restarted: what PostgreSQL and MariaDB have in common."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from celery_selfheal.database import drivers
from celery_selfheal.errors import StoreError
from celery_selfheal.testing import processes
from celery_selfheal.testing.servers import free_port

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.11 has it; type checkers know it anyway

NOBODY = 65_534  # neither server wants to run as root, and both need no account to run as somebody else
START_SECONDS = 60.0  # both answer after a second or two on an idle machine
GRACE_SECONDS = 20.0


class DatabaseServer(ABC):
    """A private database server on a free loopback port.

    Its data are in a temporary folder that ``stop`` removes. What was committed outlives ``kill``. As root it runs as
    ``nobody``. If this process dies, the server does, too, where Linux and ``setpriv`` are at hand.

    Args:
        fsync: Whether a commit waits for the disk, so that it outlives a power cut, too. Without, all is faster.
        config: More settings of the server, stronger than ours.
    """

    name: ClassVar[str]

    def __init__(self, *, fsync: bool = False, config: Mapping[str, str] | None = None) -> None:
        self._fsync = fsync
        self._config = dict(config or {})
        self._folder: Path | None = None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Its port; the same after ``restart``, another one after ``stop`` and ``start``."""
        if not self._port:
            raise RuntimeError("the server was not started, it has no port yet")
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the server, also after it was killed."""
        return self._running().pid

    @abstractmethod
    def url(self, database: str = "") -> str:
        """URL of one of its databases, by default of one that is always there; with no driver named."""

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"selfheal_{secrets.token_hex(6)}"
        engine = create_engine(drivers.parse(self.url()), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return self.url(name)

    def start(self) -> Self:
        """Start it and wait until it answers. Does nothing while it runs; after ``kill`` it is ``restart``.

        Raises:
            SettingsError: there is no server to start.
            StoreError: it did not come up; with its own last words.
        """
        if self._process is not None:
            if self._process.poll() is not None:
                self.restart()
            return self
        self._find_binaries()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"selfheal-{self.name}-"))
            if self._user is not None:
                os.chown(self._folder, self._user, self._user)
            self._port = free_port()
            self._prepare()
            self._spawn()
            self._wait_answer()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End it, also when it is paused, and remove its folder. A second call does nothing."""
        if self._process is not None:
            self._end(self._process)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """SIGKILL; when this returns, its processes are gone."""
        process = self._running()
        pids = self._stopped_pids()
        process.kill()
        process.wait(processes.SIGNAL_SECONDS)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        processes.wait_until(lambda: not set(pids) & _living(), seconds=processes.SIGNAL_SECONDS)

    def restart(self) -> None:
        """Start it again on the same port and folder, after ``kill`` or from the running state; waits for its answer.

        From the running state it ends as it would at a deploy: its clients are cut off, and what they had not
        committed is rolled back.

        Raises:
            StoreError: as ``start``.
        """
        self._end(self._running())
        self._spawn()
        self._wait_answer()

    def pause(self) -> None:
        """SIGSTOP; when this returns, it answers no more. Its kernel still takes connections and statements."""
        self._stopped_pids()

    def resume(self) -> None:
        """SIGCONT; what came during the pause is done now."""
        process = self._running()
        for pid in (*processes.children(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @abstractmethod
    def _find_binaries(self) -> None:
        """Refuse to start where there is nothing to start."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make the folder of its data."""

    @abstractmethod
    def _spawn(self) -> None:
        """Start the process."""

    @property
    @abstractmethod
    def _where_is_its_data(self) -> str:
        """Statement that tells the folder of its data."""

    #: What makes it cut off its clients and end.
    _end_signal: ClassVar[signal.Signals] = signal.SIGTERM

    @property
    def _user(self) -> int | None:
        return NOBODY if os.geteuid() == 0 else None

    @property
    def _home(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the server was not started, it has no folder yet")
        return self._folder

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started, or was stopped")
        return self._process

    def _run(self, command: Sequence[str]) -> None:
        """Run a program to its end, as the server's user."""
        log = self._home / "prepare.log"
        process = processes.spawn(command, cwd=self._home, log=log, env=self._env(), user=self._user)
        try:
            if not processes.wait_reaped(process, seconds=START_SECONDS) or process.returncode:
                raise StoreError(self.url(), f"its folder could not be made; last words:{processes.tail(log)}")
        finally:
            processes.end(process, grace=0)

    def _start(self, command: Sequence[str]) -> None:
        log = self._home / "server.log"
        self._process = processes.spawn(command, cwd=self._home, log=log, env=self._env(), user=self._user)

    def _env(self) -> dict[str, str]:
        # Neither the language nor settings for clients of another server may reach it.
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "MYSQL", "LANG"))
        }
        return {**kept, "LC_ALL": "C", "HOME": str(self._home)}

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(self._end_signal)
            self.resume()
            if not processes.wait_reaped(process, seconds=GRACE_SECONDS):
                self.kill()

    def _stopped_pids(self) -> list[int]:
        """Stop all its processes, and tell the children."""
        process = self._running()
        if process.poll() is not None:
            return []
        # The parent first: once it is stopped, there come no more children.
        process.send_signal(signal.SIGSTOP)
        processes.wait_stopped([process.pid])
        children = processes.children(process.pid)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        processes.wait_stopped(children)
        return children

    def _wait_answer(self) -> None:
        troubles: list[str] = []

        def is_settled() -> bool:
            trouble = self._find_trouble()
            troubles[:] = [trouble] if trouble else []
            return not troubles or self._running().poll() is not None

        if not processes.wait_until(is_settled, seconds=START_SECONDS) or troubles:
            raise StoreError(self.url(), f"{troubles[0]}; last words:{processes.tail(self._home / 'server.log')}")

    def _find_trouble(self) -> str:
        """What keeps the server from being of use; empty if nothing does."""
        engine = create_engine(drivers.parse(self.url()), poolclass=NullPool, connect_args={"connect_timeout": 2})
        try:
            with engine.connect() as connection:
                # Whoever got hold of the port while ours was starting would answer just as well.
                folder = connection.execute(text(self._where_is_its_data)).scalar_one()
                return "" if Path(folder).resolve() == self._data.resolve() else "another server has its port"
        except SQLAlchemyError as exc:
            return f"{type(exc).__name__}: {exc}"


def _living() -> set[int]:
    return {row.pid for row in processes.process_table() if row.state != "Z"}
