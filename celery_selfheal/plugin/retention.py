"""How late a message can come, and whether rows are kept for so long."""

from __future__ import annotations

from datetime import timedelta

from celery_selfheal.backoff import RetryPolicy
from celery_selfheal.errors import SettingsError
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.retry import policy_now


def check_retention(plugin: Plugin, retention: timedelta | None = None, setting: str = "selfheal_retention") -> None:
    """Refuse to forget a key while a copy of its message may still come and would run again.

    What cannot be known here is not counted: a far ETA, a task that retries for ever, a dead letter that is replayed
    after weeks.

    Args:
        retention: Instead of the setting.
        setting: Where that comes from, for the error.

    Raises:
        SettingsError: it is shorter than the latest that we know of; it says which that is.
    """
    if retention is None:
        retention = plugin.settings.retention
    what, horizon = redelivery_horizon(plugin)
    if retention < horizon:
        raise SettingsError(
            f"{setting} is {retention.total_seconds():g} s, and {what} can bring a message back after"
            f" {horizon.total_seconds():g} s, when its row would be gone and it would run again:"
            f" raise it to at least {horizon.total_seconds():g} s",
            setting,
        )


def redelivery_horizon(plugin: Plugin) -> tuple[str, timedelta]:
    """The latest that a copy of a message can come, as far as settings tell, and what brings it."""
    visibility = plugin.layout.visibility_timeout if plugin.layout else timedelta(0)
    horizons = [
        ("the broker's visibility timeout", visibility),
        ("a duplicate within selfheal_done_ttl", plugin.settings.done_ttl_for(visibility)),
        ("a claim within selfheal_takeover_after", plugin.settings.takeover_after),
    ]
    horizons += [
        (f"a retry of task {task.name}", longest_life(policy_now(task)))
        for task in plugin.app.tasks.values()
        if getattr(task, "dedup", None) in ("transaction", "claim")
    ]
    return max(horizons, key=lambda one: one[1])


def longest_life(policy: RetryPolicy) -> timedelta:
    """How long after its first publication a message is retried at most; zero where it is for ever."""
    cap = timedelta(seconds=policy.fixed_seconds if policy.backoff is None else policy.backoff.cap_seconds)
    if policy.max_retries is None:
        # The last retry may be sent just before max_age, and then waits.
        return timedelta(0) if policy.max_age is None else policy.max_age + cap
    waits = _all_waits(policy, policy.max_retries)
    return waits if policy.max_age is None else min(waits, policy.max_age + cap)


def _all_waits(policy: RetryPolicy, retries: int) -> timedelta:
    if policy.backoff is None:
        return _capped(policy.fixed_seconds * retries)
    seconds = 0.0
    for attempt in range(retries):
        wait = policy.backoff.longest_seconds(attempt)
        if wait >= policy.backoff.cap_seconds:
            return _capped(seconds + policy.backoff.cap_seconds * (retries - attempt))
        seconds += wait
    return _capped(seconds)


def _capped(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, timedelta.max.total_seconds() / 2))
