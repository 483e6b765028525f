"""One engine a process, from whichever of the three settings; and what a wrong one is answered with."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, StaticPool, create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_selfheal.database import drivers, engines
from celery_selfheal.errors import SettingsError
from celery_selfheal.settings import SelfHealSettings


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    engines.close_all()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module, as an application has it."""
    module = types.ModuleType("shop_database")
    monkeypatch.setitem(sys.modules, "shop_database", module)
    return module


@pytest.fixture
def own(tmp_path: Path) -> Engine:
    return create_engine(f"sqlite:///{tmp_path / 'own.db'}")


def refusal(**settings: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        engines.database_of(SelfHealSettings(**settings))
    return str(caught.value)


def test_a_url_gives_one_engine_that_asks_nothing_of_its_own(tmp_path: Path) -> None:
    settings = SelfHealSettings(database_url=f"sqlite:///{tmp_path / 'shop.db'}")

    engine = engines.engine_of(settings)

    assert engines.engine_of(SelfHealSettings(database_url=settings.database_url)) is engine
    # A start would pay for the question; its own first statement finds out as well.
    assert not engine.pool._pre_ping
    with engines.session_factory(settings)() as session, engine.connect() as connection:
        assert session.get_bind() is engine
        assert connection.execute(text("PRAGMA busy_timeout")).scalar_one() == engines.SQLITE_BUSY_SECONDS * 1000


def test_sessions_are_new_ones_and_keep_what_was_loaded_before_the_commit(tmp_path: Path) -> None:
    new_session = engines.session_factory(SelfHealSettings(database_url=f"sqlite:///{tmp_path / 'shop.db'}"))

    with new_session() as first, new_session() as second:
        assert first is not second
        assert not first.expire_on_commit


@pytest.mark.parametrize("path", ["shop_database:engine", "shop_database.engine", "shop_database:db.engine"])
def test_an_engine_may_be_given_by_its_path(module: types.ModuleType, own: Engine, path: str) -> None:
    module.engine = own  # type: ignore[attr-defined]
    module.db = types.SimpleNamespace(engine=own)  # type: ignore[attr-defined]

    assert engines.engine_of(SelfHealSettings(engine=path)) is own


@pytest.mark.parametrize(
    "wrap",
    [lambda it: it, lambda it: lambda: it, lambda it: lambda: "shop_database:thing"],
    ids=["object", "callable", "callable of a path"],
)
def test_engine_and_sessionmaker_may_be_given_as_object_callable_or_callable_of_a_path(
    module: types.ModuleType, own: Engine, wrap: Callable[[Any], Any]
) -> None:
    module.thing = own  # type: ignore[attr-defined]
    assert engines.engine_of(SelfHealSettings(engine=wrap(own))) is own

    module.thing = factory = sessionmaker(own, expire_on_commit=False)  # type: ignore[attr-defined]
    database = engines.database_of(SelfHealSettings(sessionmaker=wrap(factory)))
    assert database.engine is own
    assert database.new_session is factory


def test_a_sessionmaker_without_engine_gets_that_of_the_other_setting(own: Engine) -> None:
    class OwnSession(Session):
        pass

    settings = SelfHealSettings(sessionmaker=sessionmaker(class_=OwnSession), engine=own)

    with engines.session_factory(settings)() as session:
        assert isinstance(session, OwnSession)
        assert session.get_bind() is own


def test_a_scoped_session_gives_each_start_a_session_of_its_own(own: Engine) -> None:
    scoped = scoped_session(sessionmaker(own))
    of_the_thread = scoped()

    with engines.session_factory(SelfHealSettings(sessionmaker=scoped))() as session:
        assert session is not of_the_thread
        assert session.get_bind() is own


def test_settings_that_agree_may_be_given_together(own: Engine) -> None:
    settings = SelfHealSettings(
        database_url=str(own.url), engine=own, sessionmaker=sessionmaker(own, expire_on_commit=False)
    )

    assert engines.engine_of(settings) is own


def test_a_driver_that_is_installed_is_chosen_where_none_is_named() -> None:
    assert drivers.parse("postgresql://shop@db/shop").drivername == "postgresql+psycopg2"
    assert drivers.parse("postgres://shop@db/shop").drivername == "postgresql+psycopg2"
    assert drivers.parse("postgresql+psycopg://shop@db/shop").drivername == "postgresql+psycopg"


def test_a_password_is_never_shown() -> None:
    for url in ("mysql+pymysql://shop:hunter2@db/shop", "mysql+pymysql://db/shop?user=shop&password=hunter2"):
        assert "hunter2" not in drivers.shown(drivers.parse(url))
        assert "***" in drivers.shown(drivers.parse(url))


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "oracle://shop:hunter2@db/shop",
            "'oracle://shop:***@db/shop': oracle is not supported, use postgresql, mysql, mariadb, sqlite",
        ),
        ("postgresql+nix://shop:hunter2@db/shop", "knows no driver nix, use psycopg2 or psycopg or pg8000"),
        ("postgresql+asyncpg://shop:hunter2@db/shop", "asyncpg is for asyncio, which a task is not, use psycopg2"),
        ("http//shop:hunter2://db", "selfheal_database_url is no SQLAlchemy URL: write postgresql://"),
        ("postgresql://shop:hunter2@db:port/shop", "selfheal_database_url is no SQLAlchemy URL: write postgresql://"),
        ("mysql+mysqldb://shop:hunter2@db/shop", "needs the module MySQLdb, which is not installed: pip install"),
    ],
)
def test_a_url_that_cannot_be_used_is_told(url: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "MySQLdb", None)

    said = refusal(database_url=url)

    assert sentence in said
    assert "hunter2" not in said


@pytest.mark.parametrize(("scheme", "extra"), [("postgresql", "postgres"), ("mysql", "mysql"), ("mariadb", "mysql")])
def test_a_missing_driver_is_told_with_the_extra_that_brings_it(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "_is_there", lambda module: False)

    said = refusal(database_url=f"{scheme}://shop:hunter2@db/shop")

    assert f"pip install celery_selfheal[{extra}]" in said
    assert f"{scheme}://shop:***@db/shop" in said


@pytest.mark.parametrize("name", ["engine", "sessionmaker"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("no_such_module:engine", "= 'no_such_module:engine' cannot be imported: ModuleNotFoundError"),
        ("shop_database:nothing", "= 'shop_database:nothing': shop_database has no nothing"),
        ("shop_database.nothing", "= 'shop_database.nothing': shop_database has no nothing"),
        ("shop_database:number", "got a int"),
        ("shop_database:fails", "was called for an SQLAlchemy"),
        (lambda: None, "must be an SQLAlchemy"),
        (object(), "got a object"),
    ],
)
def test_a_path_or_object_that_is_none_is_told(
    module: types.ModuleType, name: str, given: object, sentence: str
) -> None:
    def fails() -> None:
        raise RuntimeError("no application context")

    module.number = 5  # type: ignore[attr-defined]
    module.fails = fails  # type: ignore[attr-defined]

    said = refusal(**{name: given})

    assert said.startswith(f"selfheal_{name}")
    assert sentence in said


@pytest.mark.parametrize("name", ["engine", "sessionmaker"])
@pytest.mark.parametrize("given", [5, True, b"x", ["shop:engine"], {}, "engine", "shop database:engine", ""])
def test_what_can_be_neither_object_nor_path_is_refused_before_anything_is_imported(name: str, given: object) -> None:
    with pytest.raises(SettingsError, match=f"selfheal_{name} must be an SQLAlchemy {name}, its dotted path"):
        SelfHealSettings(**{name: given})  # type: ignore[arg-type]


def test_an_engine_of_a_database_that_we_do_not_speak_is_refused() -> None:
    engine = create_engine("sqlite://")
    engine.url = engine.url.set(drivername="oracle")

    assert "selfheal_engine = 'oracle://': oracle is not supported" in refusal(engine=engine)


def test_settings_that_name_two_databases_are_refused(own: Engine, tmp_path: Path) -> None:
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}")

    assert "name two databases: keep one" in refusal(engine=own, database_url="postgresql://a:hunter2@db/shop")
    assert "hunter2" not in refusal(engine=own, database_url="postgresql://a:hunter2@db/shop")
    assert "name two databases: keep one" in refusal(engine=own, sessionmaker=sessionmaker(other))
    assert "selfheal_sessionmaker is bound to no engine: bind it" in refusal(sessionmaker=sessionmaker())
    with own.connect() as connection:
        assert "must be bound to an Engine, not to a Connection" in refusal(sessionmaker=sessionmaker(connection))
    assert "no database is set" in refusal()


def in_a_child(work: Callable[[], str]) -> str:
    """Run it in a forked child that ends as those of a pool do, and return what it answers."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, work().encode())
        except BaseException as exc:  # noqa: BLE001  # whatever it is, the parent must see it
            os.write(writer, f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.parametrize("from_setting", ["database_url", "engine"])
def test_a_forked_child_has_connections_of_its_own(tmp_path: Path, from_setting: str) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    settings = SelfHealSettings(**{from_setting: url if from_setting == "database_url" else create_engine(url)})
    engine = engines.engine_of(settings)
    with engine.connect() as connection:
        mine = id(connection.connection.dbapi_connection)
    assert engine.pool.checkedin() == 1  # type: ignore[attr-defined]

    def work() -> str:
        engine = engines.engine_of(settings)
        with engine.connect() as connection:
            return "shared" if id(connection.connection.dbapi_connection) == mine else "own"

    assert in_a_child(work) == "own"
    assert engine.pool.checkedin() == 1  # type: ignore[attr-defined]


def test_a_fork_while_another_thread_opens_an_engine_does_not_hang_the_child(tmp_path: Path) -> None:
    settings = SelfHealSettings(database_url=f"sqlite:///{tmp_path / 'shop.db'}")
    engines.engine_of(settings)

    with engines._lock:
        assert in_a_child(lambda: engines.engine_of(settings).dialect.name) == "sqlite"


def test_a_database_in_memory_of_the_application_outlives_a_fork() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    settings = SelfHealSettings(engine=engine)

    def count() -> str:
        with engines.engine_of(settings).connect() as connection:
            return str(connection.execute(text("SELECT count(*) FROM orders")).scalar_one())

    assert count() == "0"
    assert in_a_child(count) == "0"
