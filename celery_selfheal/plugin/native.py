"""Native threads, also where gevent or eventlet has replaced Python's."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any


def original(module: str, name: str) -> Any:
    """The object as it was before any monkey patch."""
    if "gevent" in sys.modules:
        from gevent.monkey import get_original

        return get_original(module, name)
    if "eventlet" in sys.modules:
        from eventlet.patcher import original as unpatched

        return getattr(unpatched(module), name)
    return getattr(sys.modules.get(module) or __import__(module), name)


def is_gevent() -> bool:
    """Whether it is gevent that has patched the interpreter, if anything has."""
    return "gevent" in sys.modules


def is_patched() -> bool:
    """Whether ``threading`` makes greenlets instead of threads."""
    if "gevent" in sys.modules:
        from gevent.monkey import is_module_patched

        return bool(is_module_patched("threading") or is_module_patched("thread"))
    if "eventlet" in sys.modules:
        from eventlet.patcher import is_monkey_patched

        return bool(is_monkey_patched("thread"))
    return False


def start_thread(run: Callable[[], None]) -> None:
    """Run ``run`` in a daemon thread of the operating system."""
    if is_patched():
        if "gevent" in sys.modules:
            log_from_greenlets()
        original("_thread", "start_new_thread")(run, ())
    else:
        threading.Thread(target=run, name="selfheal", daemon=True).start()


def import_early(connect: Callable[[], object]) -> None:
    """Let this thread import what a first connection imports, before another one connects.

    Under a monkey patch the import lock is a green one: two threads of the operating system that import the same
    module at once deadlock there ("This operation would block forever").

    Args:
        connect: Opens a connection; its failure is for those to tell who need it.
    """
    if not is_patched():
        return
    importlib.import_module("encodings.idna")
    if "gevent" in sys.modules:
        from gevent import get_hub

        _ = get_hub().resolver, get_hub().threadpool
    with contextlib.suppress(Exception):
        connect()


def log_from_greenlets() -> None:
    """Let the calling thread's greenlets write what other threads log through our loggers.

    A lock of gevent's that is contended between two threads of the operating system may never wake its waiter, and
    each logging handler has one.
    """
    from gevent import get_hub

    over = _HandOver(get_hub())
    for name in ("celery_selfheal", *list(logging.root.manager.loggerDict)):
        if name.partition(".")[0] == "celery_selfheal":
            logging.getLogger(name).addFilter(over)


class _HandOver(logging.Filter):
    """Takes each record of another thread to the hub's."""

    def __init__(self, hub: Any) -> None:
        super().__init__()
        self._loop = hub.loop
        self._get_ident = original("_thread", "get_ident")
        self._thread = self._get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if self._get_ident() == self._thread:
            return True
        from gevent import spawn

        self._loop.run_callback_threadsafe(spawn, logging.getLogger(record.name).handle, record)
        return False
