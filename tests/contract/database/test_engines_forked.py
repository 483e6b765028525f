"""Connections of a real server do not leave the process that opened them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, text

from celery_selfheal.database import drivers, engines
from celery_selfheal.settings import SelfHealSettings
from celery_selfheal.testing.databases import DatabaseServer

CHILDREN = 4


@pytest.fixture(params=["postgres_server", "maria_server"])
def database_server(request: pytest.FixtureRequest) -> DatabaseServer:
    server: DatabaseServer = request.getfixturevalue(request.param)
    return server


def backend(engine: Engine) -> int:
    """Number of the connection on the server's side."""
    with engine.connect() as connection:
        statement = "SELECT pg_backend_pid()" if engine.dialect.name == "postgresql" else "SELECT CONNECTION_ID()"
        return int(connection.execute(text(statement)).scalar_one())


def in_children(work: Callable[[], object]) -> list[str]:
    readers = []
    for _ in range(CHILDREN):
        reader, writer = os.pipe()
        if not os.fork():
            try:
                os.write(writer, str(work()).encode())
            except BaseException as exc:  # noqa: BLE001  # whatever it is, the parent must see it
                os.write(writer, repr(exc).encode())
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(reader)
    answers = []
    for reader in readers:
        with os.fdopen(reader) as answer:
            answers.append(answer.read())
        os.wait()
    return answers


@pytest.mark.parametrize("setting", ["database_url", "engine"])
def test_children_neither_use_nor_close_what_their_parent_has_opened(
    database_server: DatabaseServer, setting: str
) -> None:
    url = database_server.new_database()
    theirs = create_engine(drivers.parse(url))
    settings = SelfHealSettings(**{setting: url if setting == "database_url" else theirs})
    engine = engines.engine_of(settings)
    mine = backend(engine)

    def work() -> int:
        number = backend(engines.engine_of(settings))
        gc.collect()
        return number

    numbers = in_children(work)

    assert len({*numbers, str(mine)}) == CHILDREN + 1
    assert all(number.isdigit() for number in numbers)
    assert backend(engine) == mine  # and not a new one in the place of one that was closed
    engine.dispose()


def test_a_child_whose_parent_never_asked_leaves_the_applications_pool_alone_too(
    database_server: DatabaseServer,
) -> None:
    theirs = create_engine(drivers.parse(database_server.new_database()))
    mine = backend(theirs)

    numbers = in_children(lambda: backend(engines.engine_of(SelfHealSettings(engine=theirs))))

    assert len({*numbers, str(mine)}) == CHILDREN + 1
    assert backend(theirs) == mine
    theirs.dispose()
