"""The database that ledgers are in, and what it was asked."""

from __future__ import annotations

import re
from collections import Counter

from sqlalchemy import create_engine, text

from benchmarks.ledger import TABLES
from celery_selfheal.database.drivers import parse
from celery_selfheal.database.migrate import upgrade
from celery_selfheal.testing.postgres import PostgresServer

# Each statement with the database that it came to; its collector keeps what is said where SQL can read it.
LOG = {"logging_collector": "on", "log_line_prefix": "%d ", "log_rotation_size": "0", "log_filename": "server.log"}
_MARK = "SELECT 'mark'"


class Books:
    """A database with our tables and the benchmark's.

    Args:
        server: Started with ``LOG``.
    """

    def __init__(self, server: PostgresServer) -> None:
        self.url = server.new_database()
        self.engine = create_engine(parse(self.url), isolation_level="AUTOCOMMIT")
        upgrade(self.engine)
        with self.engine.connect() as connection:
            connection.exec_driver_sql(TABLES)

    def clear(self) -> None:
        """Empty all tables, so that each run finds the same."""
        with self.engine.connect() as connection:
            connection.execute(text("TRUNCATE entries, by_hand, processed_jobs"))
            connection.execute(text("CHECKPOINT"))

    def fill(self, rows: int) -> None:
        """Add jobs that were finished a month ago."""
        with self.engine.connect() as connection:
            connection.execute(
                text("""
                INSERT INTO processed_jobs (idempotency_key, job_name, status, response_payload, created_at, updated_at,
                                            fence, payload_hash, owner, dispatched)
                SELECT 'ours:' || md5(n::text), 'ours', 'COMPLETED', '1', instant, instant, n, repeat(md5(n::text), 2),
                       md5(n::text) || ' ' || md5(n::text), false
                FROM (SELECT n, now() - interval '30 days' + n * interval '1 ms' AS instant
                      FROM generate_series(1, :rows) AS n) AS numbered
                """),
                {"rows": rows},
            )
            connection.execute(text("ANALYZE processed_jobs"))

    def count_rows(self, table: str) -> int:
        """Rows of one of the tables."""
        with self.engine.connect() as connection:
            return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())  # ours

    def record(self) -> None:
        """From now on, new connections have all that they are asked written down."""
        name = self.engine.url.database
        with self.engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET log_statement = 'all'")
        self.engine.dispose()

    def mark(self) -> None:
        """Put a mark into what is written down."""
        with self.engine.connect() as connection:
            connection.execute(text(_MARK))

    def asked_between_marks(self) -> Counter[str]:
        """Statements between the first mark and the last, by their first word."""
        with self.engine.connect() as connection:
            log = connection.execute(text("SELECT pg_read_file('log/server.log')")).scalar_one()
        said = re.findall(rf"^{self.engine.url.database} LOG:  statement:\s+(.*)", log, flags=re.MULTILINE)
        marks = [number for number, statement in enumerate(said) if statement == _MARK]
        between = said[marks[0] + 1 : marks[-1]]
        return Counter(statement.split()[0].rstrip(";").upper() for statement in between if statement != _MARK)
