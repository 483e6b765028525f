"""Time and chance come from one place."""

from __future__ import annotations

import os
import time
from datetime import timedelta, timezone

import pytest

from celery_selfheal import clock


def test_wall_clock_is_aware_and_utc() -> None:
    assert clock.utc_now().utcoffset() == timedelta(0)
    assert abs(clock.utc_now().timestamp() - time.time()) < 5
    assert clock.utc_now().tzinfo is timezone.utc


def test_monotonic_clock_is_the_one_of_the_threads_that_wait() -> None:
    before = time.monotonic()

    reading = clock.monotonic()

    assert before <= reading <= time.monotonic()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_do_not_share_their_jitter() -> None:
    """Else a pool whose tasks fail together retries together."""
    drawn = {_draw_in_child() for _ in range(3)}

    assert len(drawn) == 3
    assert repr(clock.jitter().random()) not in drawn


def _draw_in_child() -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, repr(clock.jitter().random()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text
