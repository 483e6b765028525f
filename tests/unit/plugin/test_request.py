from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_selfheal.plugin.request import _is_older

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("meta", "is_older"),
    [
        ({"date_done": (NOW - timedelta(minutes=1)).isoformat()}, True),
        ({"date_done": (NOW - timedelta(minutes=1)).replace(tzinfo=None).isoformat()}, True),
        ({"date_done": NOW - timedelta(minutes=1)}, True),
        ({"date_done": (NOW + timedelta(seconds=1)).isoformat()}, False),
        ({"date_done": None}, False),
        ({}, False),
        (True, False),
    ],
)
def test_a_success_from_before_the_start_is_another_messages(meta: Any, is_older: bool) -> None:
    """A lost child whose task has run under the same id before must not be taken for done."""
    assert _is_older(meta, NOW.timestamp()) is is_older
