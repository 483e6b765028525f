"""How long a retry waits: full jitter in continuous seconds, computed without overflow."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from celery_selfheal.errors import SettingsError


class Jitter(enum.Enum):
    """How chance spreads the retries of tasks that failed together.

    Source: Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (the three kinds and their
    names).
    """

    FULL = "full"
    """``uniform(0, ceiling)``."""
    EQUAL = "equal"
    """Half of the ceiling, and a uniform part of the other half."""
    DECORRELATED = "decorrelated"
    """``uniform(base, 3 * the wait before)``, capped; the wait before is taken as the last ceiling."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waiting times of one task's retries.

    Attributes:
        base_seconds: Ceiling of the first wait.
        cap_seconds: No ceiling is above it.
        floor_seconds: No wait is below it (``retry_backoff_min``).
    """

    base_seconds: float
    cap_seconds: float
    floor_seconds: float = 0.0
    jitter: Jitter = Jitter.FULL

    def ceiling_seconds(self, attempt: int) -> float:
        """``min(cap, base * 2**attempt)`` of the attempt that failed, counted from 0; exact for any attempt."""
        if self.base_seconds <= 0:
            return 0.0
        doublings_to_cap = math.log2(self.cap_seconds / self.base_seconds) if self.cap_seconds > 0 else 0.0
        # 2**attempt overflows a float from attempt 1 024 on; by then the cap has been reached long ago.
        if attempt >= doublings_to_cap:
            return self.cap_seconds
        return min(self.cap_seconds, math.ldexp(self.base_seconds, attempt))

    def delay(self, attempt: int, *, chance: random.Random) -> timedelta:
        """Wait before the retry of ``attempt``, counted from 0."""
        ceiling = self.ceiling_seconds(attempt)
        if self.jitter is Jitter.FULL:
            seconds = chance.uniform(0, ceiling)
        elif self.jitter is Jitter.EQUAL:
            seconds = ceiling / 2 + chance.uniform(0, ceiling / 2)
        elif self.jitter is Jitter.DECORRELATED:
            before = self.ceiling_seconds(attempt - 1) if attempt > 0 else self.base_seconds
            seconds = min(self.cap_seconds, chance.uniform(self.base_seconds, max(self.base_seconds, 3 * before)))
        else:
            seconds = ceiling
        return timedelta(seconds=max(self.floor_seconds, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What a task declares about its retries, checked.

    Attributes:
        retry_for: Exception classes that are worth another attempt.
        give_up_for: Exception classes that never are, though they be in ``retry_for``.
        max_retries: Attempts after the first; ``None`` for ever.
        backoff: ``None`` where ``retry_backoff`` is off: Celery's fixed ``default_retry_delay`` then.
        fixed_seconds: That fixed delay, or the ``countdown`` of ``retry_kwargs``.
        max_age: No retry is sent for a message first published longer ago.
    """

    retry_for: tuple[type[BaseException], ...]
    give_up_for: tuple[type[BaseException], ...]
    max_retries: int | None
    backoff: Backoff | None
    fixed_seconds: float
    max_age: timedelta | None = None

    def delay(self, attempt: int, *, chance: random.Random) -> timedelta:
        """Wait before the retry of ``attempt``, counted from 0."""
        if self.backoff is None:
            return timedelta(seconds=self.fixed_seconds)
        return self.backoff.delay(attempt, chance=chance)

    def has_attempts_left(self, attempt: int) -> bool:
        """Whether ``attempt``, counted from 0, may be followed by another."""
        return self.max_retries is None or attempt < self.max_retries


def check_exception_classes(where: str, name: str, value: object) -> tuple[type[BaseException], ...]:
    """``value`` as a tuple of exception classes.

    Raises:
        SettingsError: it is none; the error names ``where``, ``name`` and the value.
    """
    classes: Sequence[object]
    if isinstance(value, type):
        classes = (value,)
    elif isinstance(value, (tuple, list, set, frozenset)):
        classes = tuple(value)
    else:
        classes = (value,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise SettingsError(f"{where}: {name} must hold exception classes, got {one!r}", name)
    return tuple(one for one in classes if isinstance(one, type))


def check_seconds(where: str, name: str, value: object, *, positive: bool = False) -> float:
    """``value`` as a finite number of seconds that is not negative.

    Raises:
        SettingsError: it is none.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise SettingsError(f"{where}: {name} must be a finite number of seconds, 0 or more, got {value!r}", name)
    if positive and value == 0:
        raise SettingsError(f"{where}: {name} must be above 0 seconds, got {value!r}", name)
    return float(value)


def check_jitter(where: str, value: object) -> Jitter:
    """``retry_jitter`` as Celery and we spell it: ``True`` is full, ``False`` is none.

    Raises:
        SettingsError: an unknown kind.
    """
    if isinstance(value, bool):
        return Jitter.FULL if value else Jitter.NONE
    if isinstance(value, str) and value in {Jitter.FULL.value, Jitter.EQUAL.value, Jitter.DECORRELATED.value}:
        return Jitter(value)
    raise SettingsError(
        f'{where}: retry_jitter must be "full", "equal", "decorrelated", True (full) or False, got {value!r}',
        "retry_jitter",
    )


def check_backoff(where: str, *, base: object, cap: object, floor: object, jitter: object) -> Backoff | None:
    """Waiting times from the four options; ``None`` where ``retry_backoff`` is ``False``, ``None`` or 0.

    Raises:
        SettingsError: a number is negative or not finite, or base or floor is above the cap.
    """
    kind = check_jitter(where, jitter)
    cap_seconds = check_seconds(where, "retry_backoff_max", cap, positive=True)
    floor_seconds = check_seconds(where, "retry_backoff_min", floor)
    if base is None or base is False:
        return None
    base_seconds = 1.0 if base is True else check_seconds(where, "retry_backoff", base)
    if base_seconds == 0:
        return None
    for name, seconds in (("retry_backoff", base_seconds), ("retry_backoff_min", floor_seconds)):
        if seconds > cap_seconds:
            raise SettingsError(
                f"{where}: {name} is {seconds:g} s, above retry_backoff_max of {cap_seconds:g} s:"
                f" it would never be waited for; raise retry_backoff_max",
                name,
            )
    return Backoff(base_seconds=base_seconds, cap_seconds=cap_seconds, floor_seconds=floor_seconds, jitter=kind)
