"""What a pool cannot do, said at start and by name."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("celery_selfheal")


def warn_of_pool(parent: Any) -> None:
    """Say which settings have no effect in this worker's pool, and what helps."""
    pool = type(parent.pool).__module__.rpartition(".")[2]
    if pool == "prefork":
        return
    tasks = [task for name, task in sorted(parent.app.tasks.items()) if not name.startswith("celery.")]
    limited = [task.name for task in tasks if task.soft_time_limit]
    if parent.app.conf.task_soft_time_limit:
        limited.insert(0, "task_soft_time_limit")
    if limited:
        logger.warning(
            "soft time limits do nothing in the %s pool (%s): set max_runtime, which ends a body in every pool, or use"
            " prefork",
            pool,
            ", ".join(limited),
        )
    if pool == "eventlet":
        logger.warning(
            "the eventlet pool is supported as far as it goes: a body that must end learns it from self.check() only"
        )
