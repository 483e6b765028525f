"""A worker that cannot heal does not start: it says in one line which setting is to blame, and ends."""

from __future__ import annotations

from typing import Any

import pytest

from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.servers import free_port
from integration.outages.crew import PATIENCE_SECONDS, SHORT_TTL, Crew

NOBODY = f"redis://127.0.0.1:{free_port()}/0"


def check_refused(crew: Crew, setting: str, *words: str, app: str = "depot") -> None:
    worker = crew.start("w0", app=app, ready=False)

    status = worker.wait(PATIENCE_SECONDS / 2)

    assert status not in (0, -9)
    log = worker.log_text()
    about = [line for line in log.splitlines() if setting in line]
    assert len(about) == 1, log
    assert about[0] == log.splitlines()[-1]
    for word in words:
        assert word in about[0]
    assert " ready." not in log


def check_no_traceback(crew: Crew) -> None:
    assert "Traceback" not in crew.workers[0].log_text()


@pytest.mark.parametrize(
    ("url", "word"),
    [
        (NOBODY, "no answer"),
        ("http://127.0.0.1:6379/0", "redis://"),
        ("redis://127.0.0.1:6379/leases", "by number"),
    ],
    ids=["nobody there", "bad scheme", "bad database"],
)
def test_a_wrong_lease_server_is_named_by_its_setting(url: str, word: str, crew: Crew) -> None:
    crew.settings = dict(SHORT_TTL, selfheal_redis_url=url)  # for a TTL, it waits for the server

    check_refused(crew, "selfheal_redis_url", word)
    check_no_traceback(crew)


def test_a_database_that_the_server_has_not_is_named_by_its_setting(crew: Crew) -> None:
    crew.settings = dict(SHORT_TTL, selfheal_redis_url=crew.server.url(99))

    check_refused(crew, "selfheal_redis_url", "/99")
    check_no_traceback(crew)


def test_a_lease_server_that_asks_for_a_password_is_named_and_the_password_is_not_shown(crew: Crew) -> None:
    with RedisServer(config={"requirepass": "let-me-in"}) as locked:
        crew.settings = dict(SHORT_TTL, selfheal_redis_url=locked.url().replace("let-me-in", "wrong-one"))

        check_refused(crew, "selfheal_redis_url")

    check_no_traceback(crew)
    assert "wrong-one" not in crew.workers[0].log_text()


@pytest.mark.parametrize(
    ("app", "settings", "setting", "word"),
    [
        ("depot", {"selfheal_leese_ttl": 10}, "selfheal_leese_ttl", "did you mean selfheal_lease_ttl?"),
        ("depot", {"selfheal_unrecoverable": ["no.such.Error"]}, "selfheal_unrecoverable", "no.such.Error"),
        ("late", {"selfheal_heartbeat_interval": 5}, "selfheal_heartbeat_interval", "a third"),
    ],
    ids=["unknown", "no such class", "loaded late"],
)
def test_a_wrong_setting_is_the_last_word(
    app: str, settings: dict[str, Any], setting: str, word: str, crew: Crew
) -> None:
    """Where Celery loads the application in vain, it shows the way there once, as for any error of an import."""
    crew.settings = settings

    check_refused(crew, setting, word, app=app)
    assert crew.workers[0].log_text().count("Traceback") <= 1
