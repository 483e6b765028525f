"""The databases of the contract tests."""

from __future__ import annotations

from contract.databases import database_url, empty, engine
from contract.servers import maria_server, postgres_server

__all__ = ["database_url", "empty", "engine", "maria_server", "postgres_server"]
