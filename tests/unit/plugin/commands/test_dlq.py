"""The command line of the dead letter queue, on kombu's in-memory transport."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import click
import pytest
from celery import Celery, _state
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_selfheal import DeadLetterQueue
from celery_selfheal.clock import utc_now
from celery_selfheal.dead_letter import DEATH_HEADER, Death
from celery_selfheal.plugin.commands import selfheal
from celery_selfheal.plugin.commands.options import Duration
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.publisher import Outgoing

HOSTILE = "evil\x1b[2J\nok [bold]"


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery(f"shop-{uuid.uuid4().hex[:8]}", broker="memory://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def run(app: Celery) -> Callable[..., Result]:
    def run(*args: str, **options: Any) -> Result:
        context = CLIContext(app=app, no_color=True, workdir=None)
        return CliRunner().invoke(selfheal, ["dlq", *args], obj=context, **options)

    return run


@pytest.fixture
def bury(app: Celery) -> Callable[..., None]:
    def bury(task_id: str, **changes: Any) -> None:
        known = {"task": "shop.charge", "reason": "exhausted", "exception": "ConnectionError", "queue": "orders"}
        death = Death(**{**known, "id": task_id, "died_at": utc_now().isoformat(), **changes})
        message = Outgoing(
            body=HOSTILE.encode(),
            content_type="text/plain",
            content_encoding="utf-8",
            headers={"id": task_id, "task": death.task, "note": HOSTILE, DEATH_HEADER: death.header()},
            properties={"delivery_mode": 2},
            exchange="",
            routing_key=plugin_of(app).dead_letter_queue,
        )
        plugin_of(app).publisher.send_all([message])

    return bury


def test_list_shows_a_line_for_each(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    bury("a1", text=HOSTILE)
    bury("a2", task="shop.ship", attempts=6)

    result = run("list")

    assert result.exit_code == 0
    heading, first, second = result.stdout.splitlines()
    assert heading.split()[:4] == ["id", "task", "reason", "exception"]
    assert "evil\\x1b[2J\\nok [bold]" in first
    assert second.split()[:4] == ["a2", "shop.ship", "exhausted", "ConnectionError"]


def test_list_as_json_is_one_array(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    assert json.loads(run("list", "--json").stdout) == []
    bury("a1", text=HOSTILE, stalls=3)
    bury("a2")

    first, second = json.loads(run("list", "--json").stdout)

    assert {"id", "task", "reason", "exception", "attempts", "stalls", "queue", "died_at"} <= first.keys()
    assert (first["id"], first["text"], first["stalls"], second["id"]) == ("a1", HOSTILE, 3, "a2")


def test_list_stops_at_a_hundred_unless_told_otherwise(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    for n in range(103):
        bury(f"a{n}")

    result = run("list")

    assert len(result.stdout.splitlines()) == 101
    assert "103 messages" in result.stderr
    assert len(run("list", "--limit", "102").stdout.splitlines()) == 103
    assert len(json.loads(run("list", "--json").stdout)) == 103


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--id", "a1", "--id", "a3"], ["a1", "a3"]),
        (["--task", "*.ship"], ["a3"]),
        (["--reason", "stalled"], ["a2"]),
        (["--exception", "Value*"], ["a2"]),
        (["--older-than", "30m"], ["a1"]),
        (["--newer-than", "30m"], ["a2", "a3"]),
        (["--limit", "2"], ["a1", "a2"]),
    ],
)
def test_filters(run: Callable[..., Result], bury: Callable[..., None], options: list[str], ids: list[str]) -> None:
    bury("a1", died_at=(utc_now() - timedelta(hours=1)).isoformat())
    bury("a2", reason="stalled", exception="ValueError")
    bury("a3", task="shop.ship")

    assert [one["id"] for one in json.loads(run("list", "--json", *options).stdout)] == ids


def test_show_tells_everything_and_moves_no_cursor(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    bury("a1", text=HOSTILE, trace=f"Traceback\n{HOSTILE}")

    plain, as_json = run("show", "a1"), run("show", "a1", "--json")

    assert (plain.exit_code, as_json.exit_code) == (0, 0)
    assert all(one.isprintable() or one == "\n" for one in plain.stdout)
    assert plain.stdout.count("evil\\x1b[2J") == 3
    assert "note: " in plain.stdout
    document = json.loads(as_json.stdout)
    assert (document["id"], document["trace"]) == ("a1", f"Traceback\n{HOSTILE}")
    assert document["message"]["headers"]["note"] == HOSTILE


def test_replay_reports_what_it_did(run: Callable[..., Result], bury: Callable[..., None], app: Celery) -> None:
    for n in range(3):
        bury(f"a{n}")

    assert json.loads(run("replay", "--json", "--dry-run").stdout)["replayed"] == 3
    result = run("replay", "--json", "--limit", "2", "--rate", "1000")

    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "replayed": 2,
        "refused": 0,
        "unroutable": 0,
        "gone": 0,
        "dry_run": False,
    }
    assert run("replay").stdout == "1 replayed\n"
    assert len(DeadLetterQueue(app)) == 0


def test_replay_fails_when_one_is_refused_and_says_how_to_force_it(
    run: Callable[..., Result], bury: Callable[..., None]
) -> None:
    bury("a1", replays=3)

    refused = run("replay", "--id", "a1")

    assert refused.exit_code == 1
    assert "--force" in refused.stdout
    assert run("replay", "--id", "a1", "--force").exit_code == 0


@pytest.mark.parametrize("command", [["replay"], ["drop"], ["list"], ["export"]])
def test_an_id_that_is_not_there_is_a_failure(
    run: Callable[..., Result], bury: Callable[..., None], command: list[str]
) -> None:
    bury("a1")

    assert run(*command, "--id", "nobody").exit_code == 1
    assert run(*command, "--id", "nobody", "--id", "a1").exit_code == 1
    assert run("show", "nobody").exit_code == 1


def test_drop_asks_for_more_than_a_single_word(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    for n in range(4):
        bury(f"a{n}", reason="stalled" if n == 3 else "exhausted")

    assert run("drop").exit_code == 2
    assert run("drop", "--json").exit_code == 2
    assert json.loads(run("drop", "--dry-run", "--json").stdout) == {"dropped": 4, "dry_run": True}
    assert run("drop", "--id", "a0").stdout == "1 dropped\n"
    assert run("drop", "--yes", "--reason", "stalled").stdout == "1 dropped\n"
    assert json.loads(run("drop", "--yes", "--json").stdout) == {"dropped": 2, "dry_run": False}


def test_export_writes_a_line_or_one_array(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    bury("a1")
    bury("a2")

    lines = [json.loads(line) for line in run("export").stdout.splitlines()]

    assert [line["id"] for line in lines] == ["a1", "a2"]
    assert lines == json.loads(run("export", "--json").stdout)


def test_another_queue_can_be_named(run: Callable[..., Result], bury: Callable[..., None]) -> None:
    bury("a1")

    assert json.loads(run("list", "--json", "--queue", "other").stdout) == []


@pytest.mark.parametrize(
    "args",
    [
        *(["list", "--older-than", "soon"], ["list", "--reason", "boredom"], ["list", "--limit", "0"]),
        *(["replay", "--rate", "0"], ["show"], ["drop", "--colour"], ["burn"]),
    ],
)
def test_wrong_usage_exits_with_2(run: Callable[..., Result], args: list[str]) -> None:
    assert run(*args).exit_code == 2


def test_an_application_must_be_named(app: Celery, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_state, "default_app", app)

    result = run("list")

    assert result.exit_code == 2
    assert "-A proj" in result.stderr


def test_a_broker_that_is_away_is_told_in_one_line(app: Celery, run: Callable[..., Result]) -> None:
    app.conf.broker_url = "amqp://guest:secret@127.0.0.1:1//"

    result = run("list")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no answer from amqp://guest:**@127.0.0.1:1//")
    assert "secret" not in result.output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("7d", 604_800),
        ("1w", 604_800),
        ("1d12H", 129_600),
    ],
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "h", "2x", "-1h", "1h garbage", "2 h", "9" * 30 + "w", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError):
        Duration().convert(text, None, None)
