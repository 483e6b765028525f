"""The lease store, on PostgreSQL only."""

from __future__ import annotations

from importlib import resources

from alembic import op

revision = "1.2"
down_revision = "1.1"

_PACKAGE = "celery_selfheal.database.lease_store"
_FILES = ("lease_tables", "lease_rows", "take_budget", "acquire", "release", "abandon", "expire", "beat", "census")


def upgrade() -> None:
    """Create all of it in the one transaction of the upgrade, or nothing."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    for name in _FILES:
        sql = resources.files(_PACKAGE).joinpath(f"{name}.sql").read_text(encoding="utf-8")
        # A percent sign in it is no parameter.
        connection.exec_driver_sql(sql, execution_options={"no_parameters": True})
