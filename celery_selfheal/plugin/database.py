"""Whether the application's database can be worked with, before a task needs it."""

from __future__ import annotations

from celery_selfheal.clock import monotonic
from celery_selfheal.errors import SelfHealError, StoreError
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.retention import check_retention


def check_database(plugin: Plugin) -> None:
    """Look at settings and schema. Does nothing where no database is set; leaves no connection of ours open.

    A database that does not answer is asked again for one lease's time: it may be restarting.

    Raises:
        SelfHealError: the settings are wrong, the schema is missing or another, or nobody answers.
    """
    settings = plugin.settings
    if not settings.has_database:
        return
    # Late: only who has a database pays for SQLAlchemy.
    from celery_selfheal.database import engines, migrate

    check_retention(plugin)
    engine = engines.engine_of(settings)
    patience = settings.lease_ttl.total_seconds()
    give_up_at = monotonic() + patience
    try:
        while True:
            try:
                migrate.check(engine)
                return
            except StoreError as exc:
                if monotonic() >= give_up_at:
                    setting = engines.database_of(settings).setting
                    raise SelfHealError(
                        f"{setting}: {exc} (asked for {patience:g} s); start that server or correct the setting"
                    ) from exc
    finally:
        engines.close_all()
