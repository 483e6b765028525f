"""A private RabbitMQ node, to be killed, paused and restarted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kombu.connection import Connection

from celery_selfheal.errors import SettingsError, StoreError
from celery_selfheal.testing import processes
from celery_selfheal.testing.servers import HOST, free_port

BINARY_VARIABLE = "SELFHEAL_RABBITMQ_BIN"
# What Debian puts on the PATH is a wrapper that changes the user, and so cannot be given folders of ours.
PACKAGED_BINARY = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
NODE = "selfheal@localhost"
START_SECONDS = 60.0  # it answers after 5 s on an idle machine
GRACE_SECONDS = 20.0


def find_rabbitmq_binary() -> str:
    """Find the script that starts the server.

    First what ``SELFHEAL_RABBITMQ_BIN`` names (a path, or a command), then the one of the distribution's package, then
    ``rabbitmq-server`` on the PATH.

    Raises:
        SettingsError: there is none, or ``SELFHEAL_RABBITMQ_BIN`` names none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        binary = shutil.which(named)
        if binary is None:
            raise SettingsError(f"{BINARY_VARIABLE} names no program that can be started: {named}", BINARY_VARIABLE)
    else:
        binary = str(PACKAGED_BINARY) if PACKAGED_BINARY.exists() else shutil.which("rabbitmq-server")
    # The port mapper is a part of Erlang.
    if binary is None or shutil.which("epmd") is None:
        raise SettingsError(
            "no RabbitMQ to start: install the package rabbitmq-server (Debian), which brings epmd, or name its start"
            f" script in {BINARY_VARIABLE}",
            BINARY_VARIABLE,
        )
    return binary


class RabbitServer:
    """A private RabbitMQ node on free loopback ports, beside any other node of the machine.

    What it has confirmed for durable queues outlives ``kill``. A quorum queue does so only if it was there before the
    last clean ``restart``.

    Args:
        folder: Where its data, configuration and log go; kept. By default a temporary one, removed by ``stop``.
        config: Lines for its ``rabbitmq.conf``.
    """

    def __init__(self, *, folder: Path | None = None, config: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._own_folder: Path | None = None
        self._config = dict(config or {})
        self._port = 0
        self._ports_of_erlang = (0, 0)
        self._node: subprocess.Popen[bytes] | None = None
        self._mapper: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Its AMQP port; the same after ``restart``, another one after ``stop`` and ``start``."""
        if not self._port:
            raise RuntimeError("the server was not started, it has no port yet")
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the node, also after it was killed."""
        return self._running().pid

    def url(self) -> str:
        """URL of its default virtual host."""
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def start(self) -> RabbitServer:
        """Start it and wait until it answers. Does nothing while it runs; after ``kill`` it is ``restart``.

        Raises:
            SettingsError: there is no server to start.
            StoreError: it did not come up; with its own last words.
        """
        if self._node is not None:
            if self._node.poll() is not None:
                self.restart()
            return self
        find_rabbitmq_binary()
        try:
            if self._folder is None:
                self._own_folder = Path(tempfile.mkdtemp(prefix="selfheal-rabbitmq-"))
            self._port = free_port()
            self._ports_of_erlang = (free_port(), free_port())
            self._spawn()
            self._wait_answer()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End it, also when it is paused, and remove its temporary folder. A second call does nothing."""
        for process in (self._node, self._mapper):
            if process is not None:
                processes.end(process, grace=GRACE_SECONDS)
        self._node = self._mapper = None
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            self._own_folder = None

    def kill(self) -> None:
        """SIGKILL; when this returns, its process is gone."""
        process = self._running()
        process.kill()
        process.wait(processes.SIGNAL_SECONDS)

    def restart(self) -> None:
        """Start it again on the same ports and folder, after ``kill`` or from the running state; waits for its answer.

        Raises:
            StoreError: as ``start``.
        """
        processes.end(self._running(), grace=GRACE_SECONDS)
        self._spawn()
        self._wait_answer()

    def pause(self) -> None:
        """SIGSTOP; when this returns, it answers no more. Its kernel still takes connections and messages."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        processes.wait_stopped([process.pid])

    def resume(self) -> None:
        """SIGCONT; what came during the pause is handled now."""
        self._running().send_signal(signal.SIGCONT)

    def __enter__(self) -> RabbitServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _home(self) -> Path:
        home = self._folder or self._own_folder
        if home is None:
            raise RuntimeError("the server was not started, it has no folder yet")
        return home

    def _running(self) -> subprocess.Popen[bytes]:
        if self._node is None:
            raise RuntimeError("the server was not started, or was stopped")
        return self._node

    def _spawn(self) -> None:
        home = self._home
        (home / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in self._config.items()))
        (home / "enabled_plugins").write_text("[].\n")
        (home / "rabbitmq-env.conf").touch()
        mapper_port, distribution_port = self._ports_of_erlang
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))},
            "HOME": str(home),  # where Erlang keeps its cookie
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": NODE,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "rabbitmq-env.conf"),
            # The script then becomes the node, so that the pid that we know, and signal, is the node's own.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        if self._mapper is None or self._mapper.poll() is not None:
            # Started by us: the one that Erlang starts by itself outlives the node.
            command = [str(shutil.which("epmd")), "-port", str(mapper_port), "-address", HOST]
            self._mapper = processes.spawn(command, cwd=home, log=home / "epmd.log", env=env)
        self._node = processes.spawn([find_rabbitmq_binary()], cwd=home, log=home / "server.log", env=env)

    def _wait_answer(self) -> None:
        troubles: list[str] = []

        def is_settled() -> bool:
            trouble = self._find_trouble()
            troubles[:] = [trouble] if trouble else []
            return not troubles or self._running().poll() is not None

        if not processes.wait_until(is_settled, seconds=START_SECONDS) or troubles:
            words = processes.tail(self._home / "server.log")
            raise StoreError(f"amqp://{HOST}:{self.port}", f"{troubles[0]}; its last words:{words}")

    def _find_trouble(self) -> str:
        """What keeps the server from being of use; empty if nothing does."""
        with Connection(self.url(), connect_timeout=2) as connection:  # type: ignore[no-untyped-call]  # kombu is untyped
            try:
                connection.connect()
                # Whoever got hold of the port while ours was starting would answer just as well.
                name = str(connection.connection.server_properties.get("cluster_name"))
                if not name.startswith(f"{NODE.partition('@')[0]}@"):
                    return f"another server, {name}, has its port"
            except (OSError, *connection.connection_errors) as exc:
                return f"{type(exc).__name__}: {exc}"
        return ""
