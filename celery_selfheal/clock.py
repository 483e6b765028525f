"""Time and chance: the only place that reads them, so that all else takes them as arguments."""

from __future__ import annotations

import os
import random
import time
from datetime import datetime, timezone

_chance = random.Random()

if hasattr(os, "register_at_fork"):
    # Else all children of a pool would draw the same jitter, which is none.
    os.register_at_fork(after_in_child=_chance.seed)


def monotonic() -> float:
    """Seconds of a clock that is never set; only differences within this process mean something."""
    return time.monotonic()


def utc_now() -> datetime:
    """Return this host's wall clock, for people and headers; leases are judged by the store's clock."""
    return datetime.now(timezone.utc)


def jitter() -> random.Random:
    """Return this process' source of chance, seeded anew in each forked child."""
    return _chance
