"""What an upgrade makes of a database, however often, by however many, and whatever is in it already."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import alembic.operations
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import JSON, Engine, create_engine, insert, inspect, select, text

from celery_selfheal.database import engines, lease_store, migrate
from celery_selfheal.database.tables import VERSION_TABLE, Base, Fence, OutboxMessage, ProcessedJob
from celery_selfheal.errors import SettingsError, StoreError
from celery_selfheal.settings import SelfHealSettings

MANY = 20


def structure(engine: Engine) -> dict[str, Any]:
    """Tables as the database tells them."""
    found: dict[str, Any] = {}
    for table in sorted(Base.metadata.tables):
        look = inspect(engine)
        columns = {
            # Not every SQLAlchemy puts parentheses around an expression of SQLite that has some.
            one["name"]: (str(one["type"]), one["nullable"], str(one["default"]).strip("()"))
            for one in look.get_columns(table)
        }
        indexes = {one["name"]: one["column_names"] for one in look.get_indexes(table)}
        found[table] = columns, indexes, look.get_pk_constraint(table)["constrained_columns"]
    return found


def tables(engine: Engine) -> set[str]:
    return set(inspect(engine).get_table_names())


def upgrade_elsewhere(url: str, results: Any, barrier: Any) -> None:
    engine = engines.engine_of(SelfHealSettings(database_url=url))
    barrier.wait()
    try:
        results.put(migrate.upgrade(engine)[1])
    except Exception as exc:  # noqa: BLE001  # whatever it is, the parent must see it
        results.put(f"{type(exc).__name__}: {exc}")
    engine.dispose()


def test_migrations_make_the_tables_of_the_models(empty: Engine) -> None:
    assert migrate.upgrade(empty) == (None, migrate.HEAD)
    with empty.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": VERSION_TABLE,
                "compare_type": True,
                "include_name": lambda name, kind, parents: kind != "table" or name in Base.metadata.tables,
            },
        )
        differences = compare_metadata(context, Base.metadata)
    migrated = structure(empty)
    with empty.begin() as connection:
        Base.metadata.drop_all(connection)
        Base.metadata.create_all(connection)

    assert differences == []
    assert structure(empty) == migrated


def test_a_second_upgrade_changes_nothing(engine: Engine) -> None:
    before = structure(engine)

    assert migrate.upgrade(engine) == (migrate.HEAD, migrate.HEAD)

    assert structure(engine) == before
    assert migrate.current(engine) == migrate.HEAD
    migrate.check(engine)


@pytest.mark.timeout(240)
def test_twenty_processes_upgrade_at_once(empty: Engine, database_url: str) -> None:
    spawn = multiprocessing.get_context("fork")
    results, barrier = spawn.Queue(), spawn.Barrier(MANY)
    processes = [spawn.Process(target=upgrade_elsewhere, args=(database_url, results, barrier)) for _ in range(MANY)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)

    assert answers == [migrate.HEAD] * MANY
    migrate.check(empty)
    with empty.connect() as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all() == [migrate.HEAD]


def test_twenty_threads_upgrade_at_once_on_one_engine(empty: Engine) -> None:
    with ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(lambda _: migrate.upgrade(empty)[1], range(MANY)))

    assert answers == [migrate.HEAD] * MANY
    migrate.check(empty)


def test_tables_of_the_application_and_its_own_alembic_are_left_alone(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('ae1027a6acf')"))
        connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, note VARCHAR(20))"))
        connection.execute(text("INSERT INTO orders VALUES (1, 'first')"))

    migrate.upgrade(empty)

    ours = {VERSION_TABLE, *Base.metadata.tables, *(lease_store.TABLES if empty.dialect.name == "postgresql" else ())}
    assert tables(empty) == {"alembic_version", "orders", *ours}
    with empty.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["ae1027a6acf"]
        assert connection.execute(text("SELECT id, note FROM orders")).all() == [(1, "first")]


def test_a_table_of_the_application_with_our_name_is_refused(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE processed_jobs (id INTEGER PRIMARY KEY)"))

    with pytest.raises(SettingsError, match=r"already has a table processed_jobs that is not ours .* rename it"):
        migrate.upgrade(empty)

    assert tables(empty) - {VERSION_TABLE} == {"processed_jobs"}


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_upgrade_that_died_half_way_is_finished_by_the_next(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    create_table = alembic.operations.Operations.create_table
    calls = 0

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise KeyboardInterrupt
        return create_table(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(alembic.operations.Operations, "create_table", failing)
        with pytest.raises(KeyboardInterrupt):
            migrate.upgrade(empty)
    if empty.dialect.name != "mysql":  # there each table commits by itself
        assert tables(empty) == set()
    with pytest.raises(SettingsError, match="db upgrade"):
        migrate.check(empty)

    migrate.upgrade(empty)

    migrate.check(empty)
    assert inspect(empty).get_indexes("processed_jobs")[0]["name"] == "ix_processed_jobs_status_updated_at"


def test_a_missing_table_is_told_with_its_remedy(empty: Engine) -> None:
    with pytest.raises(SettingsError) as caught:
        migrate.check(empty)

    assert "has no table processed_jobs: run: celery -A proj selfheal db upgrade" in str(caught.value)
    assert migrate.current(empty) is None


def test_a_table_that_was_dropped_is_told(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE selfheal_outbox"))

    with pytest.raises(SettingsError, match=r"has no table selfheal_outbox: it was dropped; .* drop selfheal_version"):
        migrate.check(engine)

    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {VERSION_TABLE}"))
    migrate.upgrade(engine)
    migrate.check(engine)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("0.9", f"has schema 0.9 and this celery_selfheal needs {migrate.HEAD}: {migrate.REMEDY}"),
        ("2.1", f"has schema 2.1 of a newer celery_selfheal, this one knows {migrate.HEAD}: update it on this machine"),
        ("main", "holds 'main', which is no version of ours"),
    ],
)
def test_another_version_is_told(engine: Engine, version: str, sentence: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{version}'"))

    with pytest.raises(SettingsError) as caught:
        migrate.check(engine)

    assert sentence in str(caught.value)
    if version == "2.1":
        with pytest.raises(SettingsError, match="newer"):
            migrate.upgrade(engine)


def test_older_workers_go_on_beside_a_database_some_steps_ahead(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '1.9'"))

    migrate.check(engine)

    assert migrate.upgrade(engine) == ("1.9", "1.9")


def test_a_database_that_is_away_is_a_store_error_without_its_password() -> None:
    engine = create_engine("postgresql+psycopg2://shop:hunter2@127.0.0.1:1/shop")

    with pytest.raises(StoreError) as caught:
        migrate.check(engine)

    assert "shop:***@127.0.0.1:1/shop" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_user_who_may_create_nothing_is_told(empty: Engine, database_url: str) -> None:
    with empty.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS clerk"))
        connection.execute(text("CREATE ROLE clerk LOGIN"))
        connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
    clerk = engines.engine_of(SelfHealSettings(database_url=database_url.replace("postgres@", "clerk@")))

    with pytest.raises(SettingsError, match=r"clerk@.* refuses: permission denied for schema public"):
        migrate.upgrade(clerk)

    clerk.dispose()
    assert tables(empty) == set()


def test_no_result_and_the_result_none_are_told_apart(engine: Engine) -> None:
    with engine.begin() as connection:
        for key, payload in (("nothing", None), ("none", JSON.NULL), ("some", {"a": [1, None]})):
            connection.execute(
                insert(ProcessedJob).values(
                    idempotency_key=key, job_name="shop.charge", status="COMPLETED", response_payload=payload
                )
            )

        columns = (ProcessedJob.idempotency_key, ProcessedJob.response_payload, ProcessedJob.response_payload.is_(None))
        rows = {key: (value, bool(is_null)) for key, value, is_null in connection.execute(select(*columns))}

    assert rows == {"nothing": (None, True), "none": (None, False), "some": ({"a": [1, None]}, False)}


def test_keys_differ_by_case_and_accent(engine: Engine) -> None:
    keys = ["Straße", "strasse", "STRASSE", "café", "cafe", "\N{CAT FACE}", "\N{DOG FACE}"]

    with engine.begin() as connection:
        for key in keys:
            connection.execute(insert(ProcessedJob).values(idempotency_key=key, job_name="a", status="COMPLETED"))
            connection.execute(insert(Fence).values(lock_key=key, fence=2**60))

        assert set(connection.execute(select(ProcessedJob.idempotency_key)).scalars()) == set(keys)
        assert set(connection.execute(select(Fence.lock_key)).scalars()) == set(keys)
        assert set(connection.execute(select(Fence.fence)).scalars()) == {2**60}


def test_instants_are_utc_to_the_microsecond_whatever_the_zone_of_the_session(engine: Engine) -> None:
    exact = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=timezone.utc)  # an hour that Berlin skips
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL TIME ZONE 'Europe/Berlin'"))
        if engine.dialect.name == "mysql":
            connection.execute(text("SET time_zone = '+05:30'"))
        around = datetime.now(timezone.utc)
        job = {"job_name": "a", "status": "COMPLETED"}
        connection.execute(insert(ProcessedJob).values(idempotency_key="now", **job))
        connection.execute(insert(ProcessedJob).values(idempotency_key="exact", updated_at=exact, **job))
        created = connection.execute(select(ProcessedJob.created_at).filter_by(idempotency_key="now")).scalar_one()
        updated = connection.execute(select(ProcessedJob.updated_at).filter_by(idempotency_key="exact")).scalar_one()
        found = connection.execute(
            select(ProcessedJob.idempotency_key).where(ProcessedJob.updated_at > exact - timedelta(microseconds=1))
        ).scalars()
        assert set(found) == {"now", "exact"}

    assert updated == exact
    assert updated.utcoffset() == timedelta(0)
    assert abs(created - around) < timedelta(minutes=1)


def test_ids_of_the_outbox_are_never_given_again(engine: Engine) -> None:
    def add() -> int:
        with engine.begin() as connection:
            found = connection.execute(insert(OutboxMessage).values(task_id="a", message="x" * 100_000))
            return int(found.inserted_primary_key[0])

    first, second = add(), add()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM selfheal_outbox"))

    assert first < second < add()
