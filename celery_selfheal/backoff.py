"""How long a retry waits: full jitter in continuous seconds, computed without overflow."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from celery_selfheal.errors import SettingsError

MOST_SECONDS = 10 * 365 * 86_400  # beyond it nobody waits, and in the end dates overflow


class Jitter(enum.Enum):
    """How chance spreads the retries of tasks that failed together.

    Source: Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (the three kinds and their
    names).
    """

    FULL = "full"
    """``uniform(0, ceiling)``."""
    EQUAL = "equal"
    """``uniform(ceiling / 2, ceiling)``."""
    DECORRELATED = "decorrelated"
    """``uniform(base, min(cap, 3 * the ceiling before))``: the wait before is not known, its ceiling is."""
    NONE = "none"
    """The ceiling itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waiting times of one task's retries.

    Attributes:
        base_seconds: Ceiling of the first wait.
        cap_seconds: No wait is above it.
        floor_seconds: No wait is below it (``retry_backoff_min``).
    """

    base_seconds: float
    cap_seconds: float
    floor_seconds: float = 0.0
    jitter: Jitter = Jitter.FULL

    def ceiling_seconds(self, attempt: int) -> float:
        """``min(cap, base * 2**attempt)`` of the attempt that failed, counted from 0; exact for any attempt."""
        try:
            return min(self.cap_seconds, math.ldexp(self.base_seconds, attempt))
        except OverflowError:
            return self.cap_seconds

    def delay(self, attempt: int, *, chance: random.Random) -> timedelta:
        """Wait before the retry of ``attempt``, counted from 0."""
        low, high = self._range_seconds(attempt)
        return timedelta(seconds=chance.uniform(low, high))

    def longest_seconds(self, attempt: int) -> float:
        """No wait before the retry of ``attempt``, counted from 0, is above it."""
        return self._range_seconds(attempt)[1]

    def _range_seconds(self, attempt: int) -> tuple[float, float]:
        ceiling = self.ceiling_seconds(attempt)
        if self.jitter is Jitter.NONE:
            exact = max(self.floor_seconds, ceiling)
            return exact, exact
        low, high = 0.0, ceiling
        if self.jitter is Jitter.EQUAL:
            low = ceiling / 2
        elif self.jitter is Jitter.DECORRELATED:
            before = self.ceiling_seconds(max(0, attempt - 1))
            # The range is capped, not the value drawn from it: else most waits would be the cap, all at once.
            low, high = self.base_seconds, min(self.cap_seconds, 3 * before)
        low = max(low, self.floor_seconds)
        if high <= low:
            # Nothing is left to draw from; all tasks at the floor in one instant would be the stampede.
            high = min(self.cap_seconds, 2 * low)
        return low, high


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
        options: What else ``retry_kwargs`` say about the retries that we send, in the words of ``Task.retry``.
    """

    retry_for: tuple[type[BaseException], ...]
    give_up_for: tuple[type[BaseException], ...]
    max_retries: int | None
    backoff: Backoff | None
    fixed_seconds: float
    max_age: timedelta | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def delay(self, attempt: int, *, chance: random.Random) -> timedelta:
        """Wait before the retry of ``attempt``, counted from 0."""
        if self.backoff is None:
            return timedelta(seconds=self.fixed_seconds)
        return self.backoff.delay(attempt, chance=chance)

    def allows_retry(self, attempt: int, *, age: timedelta) -> bool:
        """Whether ``attempt``, counted from 0, may be followed by another.

        Args:
            age: Since the message was first published.
        """
        is_left = self.max_retries is None or attempt < self.max_retries
        return is_left and not self.is_too_old(age)

    def is_too_old(self, age: timedelta) -> bool:
        """Whether ``max_age`` has passed."""
        return self.max_age is not None and age >= self.max_age


def check_exception_classes(where: str, name: str, value: object) -> tuple[type[BaseException], ...]:
    """``value`` as a tuple of exception classes.

    Raises:
        SettingsError: it is none; the error names ``where``, ``name`` and the value.
    """
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise SettingsError(
            f"{where}: {name} must be a tuple of exception classes, as in (OSError,): mind the comma, got {value!r}",
            name,
        )
    for one in value:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise SettingsError(f"{where}: {name} must hold exception classes, got {one!r}", name)
    return tuple(value)


def check_seconds(where: str, name: str, value: object, *, positive: bool = False) -> float:
    """``value`` as a finite number of seconds that is not negative.

    Raises:
        SettingsError: it is none.
    """
    least = "above 0" if positive else "0 or more"
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        # NaN is in no range; a whole number too large for a float compares all the same.
        or not 0 <= value <= MOST_SECONDS
        or (positive and value == 0)
    ):
        raise SettingsError(
            f"{where}: {name} must be a number of seconds, {least} and at most {MOST_SECONDS} (ten years),"
            f" got {value!r}",
            name,
        )
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
    """Waiting times from the four options; ``None`` where ``retry_backoff`` is ``False`` or 0, as in Celery.

    Raises:
        SettingsError: a number is negative or not finite, or base or floor is above the cap.
    """
    kind = check_jitter(where, jitter)
    cap_seconds = check_seconds(where, "retry_backoff_max", cap, positive=True)
    floor_seconds = check_seconds(where, "retry_backoff_min", floor)
    base_seconds = float(base) if isinstance(base, bool) else check_seconds(where, "retry_backoff", base)
    for name, seconds in (("retry_backoff", base_seconds), ("retry_backoff_min", floor_seconds)):
        if seconds > cap_seconds:
            raise SettingsError(
                f"{where}: {name} is {seconds:g} s, above retry_backoff_max of {cap_seconds:g} s:"
                f" it would never be waited for; raise retry_backoff_max",
                name,
            )
    if base_seconds == 0:
        return None
    return Backoff(base_seconds=base_seconds, cap_seconds=cap_seconds, floor_seconds=floor_seconds, jitter=kind)
