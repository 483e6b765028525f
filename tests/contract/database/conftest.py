"""Databases of each kind for each test."""

from __future__ import annotations

from contract.databases import database_url, empty, engine

__all__ = ["database_url", "empty", "engine"]
