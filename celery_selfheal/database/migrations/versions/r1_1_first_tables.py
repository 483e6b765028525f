"""The first three tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql, postgresql

revision = "1.1"
down_revision = None

_MYSQL = ("mysql", "mariadb")
_OPTIONS: Any = {
    f"{dialect}_{name}": value for dialect in _MYSQL for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}
_NOW = {
    "postgresql": "statement_timestamp()",
    "mysql": "(UTC_TIMESTAMP(6))",
    "mariadb": "(UTC_TIMESTAMP(6))",
    "sqlite": "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))",
}


def upgrade() -> None:
    """Create what is not there yet: where DDL commits by itself, an upgrade may have been killed half-way."""
    there = sa.inspect(op.get_bind())
    if not there.has_table("processed_jobs"):
        op.create_table(
            "processed_jobs",
            sa.Column("idempotency_key", _key(128), nullable=False),
            sa.Column("job_name", sa.String(255), nullable=False),
            sa.Column("status", sa.String(32), nullable=False),
            sa.Column("response_payload", sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=True),
            _instant("created_at"),
            _instant("updated_at"),
            sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
            sa.Column("payload_hash", sa.String(64), nullable=True),
            sa.Column("owner", sa.String(512), nullable=True),
            sa.Column("dispatched", sa.Boolean(), server_default=sa.false(), nullable=False),
            sa.PrimaryKeyConstraint("idempotency_key", name="pk_processed_jobs"),
            **_OPTIONS,
        )
    there.clear_cache()
    index = "ix_processed_jobs_status_updated_at"
    if index not in {one["name"] for one in there.get_indexes("processed_jobs")}:
        op.create_index(index, "processed_jobs", ["status", "updated_at"])
    if not there.has_table("selfheal_fences"):
        op.create_table(
            "selfheal_fences",
            sa.Column("lock_key", _key(255), nullable=False),
            sa.Column("fence", sa.BigInteger(), nullable=False),
            _instant("updated_at"),
            sa.PrimaryKeyConstraint("lock_key", name="pk_selfheal_fences"),
            **_OPTIONS,
        )
    if not there.has_table("selfheal_outbox"):
        op.create_table(
            "selfheal_outbox",
            sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
            sa.Column("task_id", sa.String(255), nullable=False),
            sa.Column("message", sa.Text().with_variant(mysql.LONGTEXT(), *_MYSQL), nullable=False),
            _instant("created_at"),
            sa.PrimaryKeyConstraint("id", name="pk_selfheal_outbox"),
            sqlite_autoincrement=True,
            **_OPTIONS,
        )


def _key(characters: int) -> sa.types.TypeEngine[str]:
    binary = mysql.VARCHAR(characters, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(characters).with_variant(binary, *_MYSQL)


def _instant(name: str) -> sa.Column[object]:
    return sa.Column(
        name,
        sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL),
        server_default=sa.text(_NOW[op.get_bind().dialect.name]),
        nullable=False,
    )
