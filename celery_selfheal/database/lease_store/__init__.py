"""Tables and functions of the lease store in PostgreSQL, as revision 1.2 creates them.

A file that was released is never edited: a later revision brings its own.
"""

TABLES = tuple(f"selfheal_{name}" for name in ("leases", "done", "sessions", "fleet", "budgets", "waits", "counters"))
