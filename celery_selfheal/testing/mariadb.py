"""A private MariaDB."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing.databases import DatabaseServer
from celery_selfheal.testing.servers import HOST

BINARY_VARIABLE = "SELFHEAL_MARIADB_BIN"
PACKAGED = Path("/usr/sbin/mariadbd")  # not on everybody's PATH
ALWAYS_THERE = "selfheal"


def find_mariadb_binary() -> str:
    """Find the server to start; ``mariadb-install-db`` is on the PATH or near it.

    First what ``SELFHEAL_MARIADB_BIN`` names (a path, or a command), then ``mariadbd`` on the PATH, then Debian's.

    Raises:
        SettingsError: there is none, or ``SELFHEAL_MARIADB_BIN`` names none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    binary = shutil.which(named) if named else shutil.which("mariadbd") or shutil.which(PACKAGED)
    if named and binary is None:
        raise SettingsError(f"{BINARY_VARIABLE} names no program that can be started: {named}", BINARY_VARIABLE)
    if binary is None or _find_installer(binary) is None:
        raise SettingsError(
            "no MariaDB to start: install the package mariadb-server (Debian), which brings mariadb-install-db, or name"
            f" its mariadbd in {BINARY_VARIABLE}",
            BINARY_VARIABLE,
        )
    return binary


class MariaServer(DatabaseServer):
    """A private MariaDB, reached without password as ``selfheal``, who may do everything."""

    name = "mariadb"

    def url(self, database: str = "") -> str:
        return f"mysql://selfheal@{HOST}:{self.port}/{database or ALWAYS_THERE}"

    @property
    def _where_is_its_data(self) -> str:
        return "SELECT @@datadir"

    def _find_binaries(self) -> None:
        find_mariadb_binary()

    def _prepare(self) -> None:
        installer = _find_installer(find_mariadb_binary())
        self._run(
            [
                *(str(installer), "--no-defaults", f"--datadir={self._data}", "--skip-test-db"),
                "--auth-root-authentication-method=normal",
            ]
        )
        # Run at each start. Not root, who may only come from this host by name.
        (self._home / "init.sql").write_text(
            f"CREATE DATABASE IF NOT EXISTS {ALWAYS_THERE};\n"
            "CREATE USER IF NOT EXISTS selfheal@'%';\n"
            "GRANT ALL PRIVILEGES ON *.* TO selfheal@'%';\n"
        )

    def _spawn(self) -> None:
        options = {
            "datadir": str(self._data),
            "port": str(self.port),
            "bind-address": HOST,
            "socket": str(self._home / "socket"),  # it cannot do without
            "pid-file": str(self._home / "pid"),
            "init-file": str(self._home / "init.sql"),
            "skip-name-resolve": "1",
            # 2: written at each commit, which outlives its own death; 1: and flushed, which outlives the machine's.
            "innodb-flush-log-at-trx-commit": "1" if self._fsync else "2",
            "innodb-buffer-pool-size": "64M",
            "max-connections": "300",
            **self._config,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._start([find_mariadb_binary(), "--no-defaults", *arguments])


def _find_installer(binary: str) -> str | None:
    near = Path(binary).resolve().parent.parent
    candidates = (near / "bin" / "mariadb-install-db", near / "scripts" / "mariadb-install-db")
    return shutil.which("mariadb-install-db") or next(
        (found for one in candidates if (found := shutil.which(one))), None
    )
