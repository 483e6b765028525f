"""Fixtures of the tests of how messages are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_selfheal.testing import RedisServer
from integration.fetch.mill import Mill


@pytest.fixture
def new_mill(server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Mill]]:
    """Makes a mill with its settings. If the test fails, the workers' logs are in its report."""
    mills: list[Mill] = []

    def make(*, db: int = 0, stock: bool = False, **settings: Any) -> Mill:
        mills.append(Mill(server, tmp_path, db=db, stock=stock, settings=settings))
        return mills[-1]

    try:
        yield make
    finally:
        for mill in mills:
            mill.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-60:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture
def mill(new_mill: Callable[..., Mill]) -> Mill:
    """Workers of this test only, with default queues and priority steps."""
    return new_mill()
