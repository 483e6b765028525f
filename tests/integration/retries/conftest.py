"""Fixtures of the retry tests: one bank that serves all tests which break nothing, and banks of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from celery_selfheal.testing import RedisServer
from integration.retries.crew import Bank

LOG_LINES = 80


def add_logs(request: pytest.FixtureRequest, folder: Path) -> None:
    """If the test fails, these logs are in its report."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture(scope="session")
def open_bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    """Server and worker are started once: most tests only look at what becomes of their own task."""
    with RedisServer() as server:
        bank = Bank(server, tmp_path_factory.mktemp("bank"))
        try:
            bank.start(concurrency=4)
            yield bank
        finally:
            bank.close()


@pytest.fixture
def bank(open_bank: Bank, request: pytest.FixtureRequest) -> Iterator[Bank]:
    """The bank of all tests: each uses task ids of its own."""
    yield open_bank
    add_logs(request, open_bank.folder)


@pytest.fixture
def new_bank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], Bank]]:
    """Opens a bank on a server of its own, without a worker yet."""
    with ExitStack() as ends:

        def make() -> Bank:
            server = ends.enter_context(RedisServer())
            bank = Bank(server, tmp_path)
            ends.callback(bank.close)
            return bank

        yield make
    add_logs(request, tmp_path)
