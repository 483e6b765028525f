"""How many retries a fleet may start: a share of its first attempts plus a rate."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from celery_selfheal.errors import SettingsError

WINDOW_SECONDS = 60
"""What is not used within so long is gone."""

Turn: TypeAlias = Literal["first", "retry", "paid"]
"""A first attempt, a retry, or a retry that has waited for its place."""

_FORM = re.compile(r"\s*(?P<percent>\d+(?:\.\d+)?)\s*%\s*\+\s*(?P<rate>\d+(?:\.\d+)?)\s*/\s*s\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is left of a budget, at one instant of the store's clock.

    Attributes:
        tokens: Retries that may start at once; below 0, so many wait for their place.
        at: Instant in seconds.
        firsts: First attempts since the last full ``WINDOW_SECONDS`` of the clock.
        firsts_before: First attempts in the window before.
    """

    tokens: float
    at: float
    firsts: float = 0
    firsts_before: float = 0


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """Token bucket of one task name.

    The Redis store computes the same inside its ``acquire``.

    Attributes:
        share: Tokens that one first attempt earns.
        per_second: Tokens that time earns, ``WINDOW_SECONDS`` of it at most.

    Source: "Retry budget" of Finagle and Linkerd (a share of requests plus a floor, over a window).
    """

    share: float
    per_second: float

    @classmethod
    def parse(cls, text: str, *, setting: str = "selfheal_retry_budget") -> RetryBudget:
        """Read ``"20% + 10/s"``.

        Raises:
            SettingsError: another form, or a budget that would never let a retry through.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise SettingsError(
                f"{setting} must be a text like '20% + 10/s', or None (no limit), got {text!r}", setting
            )
        budget = cls(share=float(match["percent"]) / 100, per_second=float(match["rate"]))
        if not (0 < budget.per_second < math.inf and budget.share < math.inf):
            raise SettingsError(
                f"{setting} must be a share plus a rate above 0/s, or a retry could wait for ever, got {text!r}",
                setting,
            )
        return budget

    @property
    def burst(self) -> float:
        """Tokens that time alone can earn."""
        return self.per_second * WINDOW_SECONDS

    def take(self, bucket: Bucket | None, turn: Turn, *, now: float) -> tuple[Bucket, float]:
        """Account for one start.

        Args:
            bucket: As it was left; ``None`` for a task name that nothing is known of.
            now: Seconds, by the store's clock.

        Returns:
            The bucket as it is left, and the seconds that a retry must wait for its place; 0 if it may start.
        """
        bucket = self._refilled(bucket, now) if bucket else Bucket(tokens=self.burst, at=now)
        if turn == "first":
            return replace(bucket, tokens=bucket.tokens + self.share, firsts=bucket.firsts + 1), 0.0
        if turn == "retry":
            bucket = replace(bucket, tokens=bucket.tokens - 1)
            return bucket, max(0.0, -bucket.tokens / self.per_second)
        return bucket, 0.0

    def _refilled(self, bucket: Bucket, now: float) -> Bucket:
        firsts, before = bucket.firsts, bucket.firsts_before
        windows = now // WINDOW_SECONDS - bucket.at // WINDOW_SECONDS
        if windows > 0:
            firsts, before = 0.0, firsts if windows == 1 else 0.0
        tokens = bucket.tokens
        if tokens < self.burst:
            tokens = min(self.burst, tokens + max(0.0, now - bucket.at) * self.per_second)
        # Shares go with the first attempts that earned them: a quiet week must not pay for a stampede.
        recent = firsts + before * (1 - now % WINDOW_SECONDS / WINDOW_SECONDS)
        tokens = min(tokens, self.burst + self.share * recent)
        return Bucket(tokens=tokens, at=now, firsts=firsts, firsts_before=before)
