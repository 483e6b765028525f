"""Real servers, real workers and a faulty network, for tests that kill them.

All three are started on this machine, belong to whoever started them, and are ended by their pid.
"""

from __future__ import annotations

from celery_selfheal.testing.proxy import TcpProxy
from celery_selfheal.testing.servers import RedisServer, find_redis_binary
from celery_selfheal.testing.workers import WorkerProcess

__all__ = ["RedisServer", "TcpProxy", "WorkerProcess", "find_redis_binary"]
