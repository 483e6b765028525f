"""The user's database: our tables, their migrations, and one engine for each process."""

from __future__ import annotations

import os

#: The process that loaded the plugin. In any other, what the pool of the application's engine holds when we first use
#: it was opened before a fork, and belongs to the parent.
LOADED_IN = os.getpid()
