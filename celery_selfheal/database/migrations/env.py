"""What Alembic runs: our revisions, on the connection that ``celery_selfheal.database.migrate`` hands over."""

from __future__ import annotations

from alembic import context

from celery_selfheal.database.tables import VERSION_TABLE, Base


def _is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Whether Alembic may look at it: never at a table of the application."""
    return kind != "table" or name in Base.metadata.tables


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    include_name=_is_ours,
    compare_type=True,
)
# The transaction, and the lock in it, are our caller's.
context.run_migrations()
