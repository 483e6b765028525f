"""Celery workers that heal: lost tasks come back in seconds, poison ones stop, effects happen once."""

from celery_selfheal.errors import (
    DeadlineExceeded,
    InDoubt,
    LeaseBusy,
    LeaseLost,
    PayloadMismatch,
    SelfHealError,
    SettingsError,
    StalledTooOften,
    StoreError,
    UnrecoverableError,
)
from celery_selfheal.plugin.dead_letters import DeadLetterQueue
from celery_selfheal.plugin.install import install, selfheal_schedule
from celery_selfheal.plugin.lock_key import SKIPPED
from celery_selfheal.plugin.on_commit import apply_on_commit
from celery_selfheal.plugin.task import SelfHealTask

__version__ = "0.1.0"

__all__ = (
    "SKIPPED",
    "DeadLetterQueue",
    "DeadlineExceeded",
    "InDoubt",
    "LeaseBusy",
    "LeaseLost",
    "PayloadMismatch",
    "SelfHealError",
    "SelfHealTask",
    "SettingsError",
    "StalledTooOften",
    "StoreError",
    "UnrecoverableError",
    "apply_on_commit",
    "install",
    "selfheal_schedule",
)
