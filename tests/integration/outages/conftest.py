"""Fixtures of the outage tests: servers that may be killed, a network that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_selfheal.testing import RedisServer, TcpProxy
from integration.outages.crew import Crew


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A private Redis of this test alone, that forgets nothing it acknowledged."""
    with RedisServer(appendonly=True) as running:
        yield running


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[TcpProxy]:
    """The way to the server of those workers that are started ``via`` it."""
    with TcpProxy("127.0.0.1", server.port) as running:
        yield running


@pytest.fixture
def new_crew(server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Crew]]:
    """Makes a crew with other servers, databases or keys. If the test fails, their logs are in its report."""
    crews: list[Crew] = []

    def make(**options: Any) -> Crew:
        crews.append(Crew(options.pop("server", server), tmp_path, **options))
        return crews[-1]

    try:
        yield make
    finally:
        for crew in crews:
            crew.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-80:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture
def crew(new_crew: Callable[..., Crew]) -> Crew:
    """Workers of this test only."""
    return new_crew()
