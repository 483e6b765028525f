"""The command line of the database, on SQLite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from sqlalchemy import Engine, insert, select, text

from celery_selfheal.clock import utc_now
from celery_selfheal.database import engines, migrate, retention
from celery_selfheal.database.tables import ProcessedJob
from celery_selfheal.plugin.commands import selfheal
from celery_selfheal.plugin.install import plugin_of

HOSTILE = "evil\x1b[2J\nok [bold]"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    app = Celery(f"shop-{uuid.uuid4().hex[:8]}", broker="memory://", set_as_current=False)
    app.conf.selfheal_database_url = f"sqlite:///{tmp_path / 'shop.db'}"
    yield app
    engines.close_all()
    app.close()


@pytest.fixture
def run(app: Celery) -> Callable[..., Result]:
    def run(*args: str, **options: Any) -> Result:
        context = CLIContext(app=app, no_color=True, workdir=None)
        return CliRunner().invoke(selfheal, ["db", *args], obj=context, **options)

    return run


@pytest.fixture
def engine(app: Celery) -> Engine:
    engine = engines.engine_of(plugin_of(app).settings)
    migrate.upgrade(engine)
    return engine


def add(engine: Engine, *keys: str, status: str = "COMPLETED", age: timedelta = timedelta(0), **values: Any) -> None:
    job = {"job_name": "shop.charge", "status": status, "updated_at": utc_now() - age, **values}
    with engine.begin() as connection:
        connection.execute(insert(ProcessedJob), [{"idempotency_key": key, **job} for key in keys])


def keys_of(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.execute(select(ProcessedJob.idempotency_key)).scalars())


def test_upgrade_creates_the_tables_and_says_so(run: Callable[..., Result]) -> None:
    first, second, third = run("upgrade"), run("upgrade"), run("upgrade", "--json")

    assert (first.exit_code, first.stdout) == (0, f"schema {migrate.HEAD}, before: none\n")
    assert (second.exit_code, second.stdout) == (0, f"schema {migrate.HEAD}, as before\n")
    assert json.loads(third.stdout) == {"before": migrate.HEAD, "now": migrate.HEAD}


def test_current_tells_what_is_there_and_fails_where_workers_would(run: Callable[..., Result]) -> None:
    before, before_json = run("current"), run("current", "--json")
    run("upgrade")
    after, after_json = run("current"), run("current", "--json")

    assert (before.exit_code, before_json.exit_code, after.exit_code, after_json.exit_code) == (1, 1, 0, 0)
    assert before.stdout == f"schema none, this release needs {migrate.HEAD}\n"
    assert "has no table processed_jobs: run: celery -A proj selfheal db upgrade" in before.stderr
    told = json.loads(before_json.stdout)
    assert (told["current"], told["needed"], told["ok"]) == (None, migrate.HEAD, False)
    assert json.loads(after_json.stdout) == {
        "current": migrate.HEAD,
        "needed": migrate.HEAD,
        "ok": True,
        "problem": "",
    }


@pytest.mark.parametrize("command", [["list"], ["purge"], ["resolve", "a", "--forget", "--yes"]])
def test_nothing_is_created_by_any_other_command(run: Callable[..., Result], command: list[str]) -> None:
    result = run(*command)

    assert result.exit_code == 1
    assert "run: celery -A proj selfheal db upgrade" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["upgrade", "current", "list", "purge"])
def test_an_app_without_database_is_told_what_to_set(app: Celery, run: Callable[..., Result], command: str) -> None:
    app.conf.selfheal_database_url = None

    result = run(command)

    assert result.exit_code == 1
    assert "set selfheal_database_url, selfheal_engine or selfheal_sessionmaker" in result.stderr


def test_list_shows_a_line_for_each_and_does_not_trust_what_it_shows(
    run: Callable[..., Result], engine: Engine
) -> None:
    add(engine, "charge:1", response_payload=5, dispatched=True)
    add(engine, "charge:2", status="IN_DOUBT", job_name=HOSTILE)

    result = run("list")

    assert result.exit_code == 0
    heading, first, second = result.stdout.splitlines()
    assert heading.split()[:3] == ["key", "task", "status"]
    assert first.startswith("charge:2")
    assert "evil\\x1b[2J\\nok [bold]" in first
    assert second.split()[:5] == ["charge:1", "shop.charge", "COMPLETED", "stored", "yes"]


def test_list_as_json_is_one_array(run: Callable[..., Result], engine: Engine) -> None:
    assert json.loads(run("list", "--json").stdout) == []
    add(engine, "charge:1", response_payload=5, fence=7, owner="id token 3")

    (row,) = json.loads(run("list", "--json").stdout)

    assert (row["key"], row["task"], row["status"], row["fence"]) == ("charge:1", "shop.charge", "COMPLETED", 7)
    assert (row["has_result"], row["dispatched"], row["owner"]) == (True, False, "id token 3")
    assert row["updated_at"].endswith("+00:00")


def test_list_filters_and_stops_at_a_hundred_unless_told_otherwise(run: Callable[..., Result], engine: Engine) -> None:
    add(engine, *(f"charge:{n:03}" for n in range(103)))
    add(engine, "ship:1", status="IN_DOUBT", job_name="shop.ship", age=timedelta(hours=2))

    result = run("list")

    assert len(result.stdout.splitlines()) == 101
    assert "there are more, say --limit" in result.stderr
    assert len(run("list", "--limit", "102").stdout.splitlines()) == 103
    assert len(json.loads(run("list", "--json").stdout)) == 104
    for options in (["--status", "IN_DOUBT"], ["--task", "*.ship"], ["--older-than", "1h"], ["--key", "ship:1"]):
        assert [row["key"] for row in json.loads(run("list", "--json", *options).stdout)] == ["ship:1"]


def test_a_key_without_row_is_exit_status_1(run: Callable[..., Result], engine: Engine) -> None:
    add(engine, "charge:1")

    result = run("list", "--json", "--key", "charge:1", "--key", "nobody")

    assert result.exit_code == 1
    assert [row["key"] for row in json.loads(result.stdout)] == ["charge:1"]
    assert "1 of these keys have no such row" in result.stderr


def test_purge_deletes_what_is_older_than_the_retention(run: Callable[..., Result], engine: Engine) -> None:
    add(engine, "old", age=timedelta(days=8))
    add(engine, "doubt", status="IN_DOUBT", age=timedelta(days=80))
    add(engine, "new", age=timedelta(days=2))

    dry = run("purge", "--dry-run")
    assert (dry.exit_code, dry.stdout, keys_of(engine)) == (0, "1 rows would be deleted\n", ["doubt", "new", "old"])

    real = run("purge")
    assert (real.exit_code, real.stdout, keys_of(engine)) == (0, "1 rows deleted\n", ["doubt", "new"])

    older = run("purge", "--older-than", "1d", "--json")
    assert (older.exit_code, json.loads(older.stdout)) == (0, {"purged": 1, "dry_run": False})
    assert keys_of(engine) == ["doubt"]


def test_purge_refuses_to_forget_what_may_still_come(app: Celery, run: Callable[..., Result], engine: Engine) -> None:
    add(engine, "old", age=timedelta(days=8))

    by_option = run("purge", "--older-than", "10m")
    app.conf.selfheal_retention = 60
    plugin_of(app).reread_settings()
    by_setting = run("purge")

    assert (by_option.exit_code, by_setting.exit_code) == (1, 1)
    assert "--older-than is 600 s, and a duplicate within selfheal_done_ttl can bring" in by_option.stderr
    assert "raise it to at least 3600 s" in by_option.stderr
    assert keys_of(engine) == ["old"]


def test_ctrl_c_ends_a_purge_between_two_batches_and_says_how_far_it_came(
    run: Callable[..., Result], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(engine, *(f"old-{n}" for n in range(2_500)), age=timedelta(days=8))
    purge = retention.purge

    def stopped(engine: Engine, *, keep: timedelta) -> Iterator[int]:
        yield next(purge(engine, keep=keep))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention, "purge", stopped)
        result = run("purge", "--json")

    assert result.exit_code == 130
    assert json.loads(result.stdout)["purged"] == 1_000
    assert "run it again for the rest" in result.stderr
    assert json.loads(run("purge", "--json").stdout)["purged"] == 1_500


def test_resolve_settles_what_is_in_doubt(run: Callable[..., Result], engine: Engine) -> None:
    add(engine, "a", "b", status="IN_DOUBT")
    add(engine, "c")

    done = run("resolve", "a", "--completed", "--yes")
    forgotten = run("resolve", "b", "--forget", "--yes", "--json")
    again = run("resolve", "a", "--completed", "--yes")
    finished = run("resolve", "c", "--forget", "--yes")

    assert (done.exit_code, done.stdout) == (0, "a: COMPLETED\n")
    assert json.loads(forgotten.stdout) == {"key": "b", "resolved": "forgotten"}
    assert (again.exit_code, finished.exit_code) == (1, 1)
    assert "no row in doubt has the key a" in again.stderr
    assert keys_of(engine) == ["a", "c"]


def test_resolve_asks_first_and_needs_an_answer(run: Callable[..., Result], engine: Engine) -> None:
    add(engine, "a", status="IN_DOUBT")

    unsaid, unasked = run("resolve", "a", "--yes"), run("resolve", "a", "--forget", "--json")
    both = run("resolve", "a", "--forget", "--completed", "--yes")

    assert (unsaid.exit_code, unasked.exit_code, both.exit_code) == (2, 2, 2)
    assert "--completed or --forget" in unsaid.stderr
    assert "say --yes" in unasked.stderr
    assert keys_of(engine) == ["a"]


def test_each_command_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\n"
        "from celery_selfheal import install\n"
        "app = Celery('shop', broker='memory://')\n"
        f"app.conf.selfheal_database_url = 'sqlite:///{tmp_path / 'shop.db'}'\n"
        "install(app)\n"
    )

    def celery(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", "shop", "selfheal", "db", *args],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )

    missing, upgraded, listed, wrong = celery("list"), celery("upgrade"), celery("list", "--json"), celery("nothing")

    assert [missing.returncode, upgraded.returncode, listed.returncode, wrong.returncode] == [1, 0, 0, 2]
    assert json.loads(listed.stdout) == []
    assert "Traceback" not in missing.stderr


def test_the_redis_only_path_loads_no_sqlalchemy() -> None:
    script = (
        "import sys; from celery import Celery; from celery_selfheal import install, SelfHealTask\n"
        "import celery_selfheal.plugin.commands, celery_selfheal.plugin.steps, celery_selfheal.plugin.database\n"
        "app = Celery('shop', broker='redis://', task_cls=SelfHealTask); install(app)\n"
        "app.task(name='shop.charge')(install); app.finalize()\n"
        "print([name for name in ('sqlalchemy', 'alembic') if name in sys.modules])"
    )

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)

    assert found.stdout == "[]\n"


def test_a_worker_is_refused_before_it_takes_a_message(app: Celery, engine: Engine) -> None:
    from celery_selfheal.errors import SelfHealError
    from celery_selfheal.plugin.database import check_database

    check_database(plugin_of(app))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE selfheal_fences"))

    with pytest.raises(SelfHealError, match="has no table selfheal_fences"):
        check_database(plugin_of(app))
