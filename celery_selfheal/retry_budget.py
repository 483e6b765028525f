"""How many retries a fleet may start: a share of its first attempts plus a rate."""

from __future__ import annotations

import re
from dataclasses import dataclass

from celery_selfheal.errors import SettingsError

WINDOW_SECONDS = 60
"""What is not used within so long is gone."""

_FORM = re.compile(r"\s*(?P<percent>\d+(?:\.\d+)?)\s*%\s*\+\s*(?P<rate>\d+(?:\.\d+)?)\s*/\s*s\s*")


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """Token bucket of one task name.

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
        if budget.per_second <= 0:
            raise SettingsError(
                f"{setting} must be a share plus a rate above 0/s, or a retry could wait for ever, got {text!r}",
                setting,
            )
        return budget
