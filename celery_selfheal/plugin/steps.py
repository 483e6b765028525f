"""Bootsteps: start and stop the worker's agents, and take over each new channel."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps, signals
from celery.exceptions import WorkerShutdown

from celery_selfheal.clock import monotonic
from celery_selfheal.dead_letter import Reason
from celery_selfheal.errors import SelfHealError, SettingsError
from celery_selfheal.plugin import native
from celery_selfheal.plugin.brokers.layout import layout_of
from celery_selfheal.plugin.brokers.redis import ReliableFetch, missing_shape
from celery_selfheal.plugin.brokers.wait import Idle, Waiter
from celery_selfheal.plugin.database import check_database
from celery_selfheal.plugin.death import death_of_message
from celery_selfheal.plugin.install import Plugin, plugin_of
from celery_selfheal.plugin.pool_limits import warn_of_pool
from celery_selfheal.plugin.reserved import hand_over_reserved
from celery_selfheal.plugin.slots import Slots
from celery_selfheal.plugin.stores import LeaseServer, lease_server, open_broker_client
from celery_selfheal.plugin.worker import Worker
from celery_selfheal.settings import SelfHealSettings

logger = logging.getLogger("celery_selfheal")


class SelfHealStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery is untyped
    """Starts the agents when the pool has forked. They end with the consumer, when the pool has drained."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        # Before the pool forks.
        plugin_of(parent.app).slots = Slots()
        _store_results_again_and_again(parent.app.conf)

    def start(self, parent: Any) -> None:
        """Check the settings once more, and begin to beat.

        Raises:
            WorkerShutdown: a setting is wrong or names a server that does not answer; said in one line.
        """
        plugin = plugin_of(parent.app)
        try:
            plugin.reread_settings()
            # Resolved now: a class that cannot be imported must not show only when the first task fails.
            _ = plugin.autoretry_for, plugin.unrecoverable
            stores = plugin.open_stores()
            _check_not_consumed(parent.app, plugin)
            server = lease_server(parent.app, plugin.settings)
            _check_reachable(server, plugin.settings)
            check_database(plugin)
        except SelfHealError as exc:
            logger.critical("celery_selfheal refuses to start: %s", exc)
            raise WorkerShutdown(1) from None
        native.import_early(server.check)
        plugin.worker = Worker(plugin, node=parent.hostname, stores=stores)
        plugin.worker.start()
        warn_of_pool(parent)
        _drain_before_soft_shutdown(parent, plugin.worker)
        signals.worker_shutting_down.connect(plugin.worker.shutting_down, weak=False, dispatch_uid="selfheal-shutdown")

    def close(self, parent: Any) -> None:
        """The worker stops: by ``control shutdown``, say, no signal has told so."""
        worker = plugin_of(parent.app).worker
        if worker is not None:
            worker.drain.begin()
            if parent.consumer is not None and parent.consumer.task_consumer is not None:
                worker.handed_over(hand_over_reserved(parent.consumer))

    def stop(self, parent: Any) -> None:
        """Nothing: tasks still run, and their leases must be renewed."""

    terminate = stop


class DeliveryStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery is untyped
    """Takes over the consumer's channel after each connection, and ends the agents last of all."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    _fetch: ReliableFetch | None = None
    _worker: Worker | None = None

    def start(self, c: Any) -> None:
        """Install reliable fetch on the new channel, if broker and settings allow."""
        plugin = plugin_of(c.app)
        if plugin.worker is None:
            return
        self._worker = plugin.worker
        plugin.worker.timer = c.timer
        plugin.worker.consumer = c.task_consumer
        plugin.worker.pool = c.pool
        plugin.worker.loop.connected(c.timer)
        plugin.worker.hub = c.hub if c.loop.__name__ == "asynloop" else None
        _dead_letter_unreadable(c, plugin.worker)
        layout = layout_of(c.app)
        if layout is None:
            return
        if not plugin.settings.redis_reliable_fetch:
            logger.warning(
                "selfheal_redis_reliable_fetch is off: a killed worker's messages come back after the"
                " visibility timeout only, and some are lost"
            )
            return
        channel = c.task_consumer.channel
        # Connections of its own: the loop must not share a socket with the agents' thread.
        stores = plugin.stores
        missing = missing_shape(channel)
        if missing or stores.deliveries is None or not layout.ack_emulation:
            logger.error(
                "reliable fetch is off, kombu is left as it is: %s",
                f"this kombu has no {', '.join(missing)}" if missing else "its Redis transport is not the usual one",
            )
            return
        hub = c.hub if c.hub and c.loop.__name__ == "asynloop" else None
        self._fetch = ReliableFetch(
            channel,
            worker=plugin.worker,
            deliveries=stores.deliveries,
            keys=plugin.keys,
            layout=layout,
            idle=Idle(Waiter(open_broker_client(c.app, ttl=plugin.settings.lease_ttl)), hub=hub),
        )
        self._fetch.install()

    def stop(self, c: Any) -> None:
        """The connection is gone: what is held stays held over a reconnect."""
        if self._fetch is not None:
            self._fetch.close()
            self._fetch = None
        if self._worker is not None:
            self._worker.loop.disconnected()

    def shutdown(self, c: Any) -> None:
        """The pool has drained: hand over what is left and say good-bye."""
        plugin = plugin_of(c.app)
        if plugin.worker is not None:
            plugin.worker.stop()


def _drain_before_soft_shutdown(parent: Any, worker: Worker) -> None:
    """Begin to drain before Celery waits: it does so in its signal handler, and tells nobody until it is over."""
    wait = getattr(parent, "wait_for_soft_shutdown", None)
    if wait is None:
        return

    def wait_for_soft_shutdown() -> Any:
        worker.drain.begin(has_grace=False)
        return wait()

    parent.wait_for_soft_shutdown = wait_for_soft_shutdown


def _store_results_again_and_again(conf: Any) -> None:
    """Let no backend that is away make a failure of a body that succeeded, unless the user has set it otherwise.

    With threads or greenlets Celery would even take such a start for one that still runs, for ever.
    """
    if not conf.value_set_for("result_backend_always_retry"):
        conf.result_backend_always_retry = True


def _dead_letter_unreadable(c: Any, worker: Worker) -> None:
    """Keep what Celery drops: unknown task names, and messages that it cannot decode."""
    if getattr(c, "selfheal_dead_letters", None) is worker:
        return
    c.selfheal_dead_letters = worker
    unknown_message, unknown_task = c.on_unknown_message, c.on_unknown_task
    invalid_task, decode_error = c.on_invalid_task, c.on_decode_error

    def dead_letter(message: Any, exc: BaseException | None, reason: Reason) -> None:
        worker.dead_letter_message(message, death_of_message(message, exc, reason, worker=worker.node))

    def on_unknown_message(body: Any, message: Any) -> Any:
        dead_letter(message, None, Reason.UNDECODABLE)
        return unknown_message(body, message)

    def on_unknown_task(body: Any, message: Any, exc: BaseException) -> Any:
        dead_letter(message, exc, Reason.UNKNOWN_TASK)
        return unknown_task(body, message, exc)

    def on_invalid_task(body: Any, message: Any, exc: BaseException) -> Any:
        dead_letter(message, exc, Reason.UNDECODABLE)
        return invalid_task(body, message, exc)

    def on_decode_error(message: Any, exc: BaseException) -> Any:
        dead_letter(message, exc, Reason.UNDECODABLE)
        return decode_error(message, exc)

    c.on_unknown_message, c.on_unknown_task = on_unknown_message, on_unknown_task
    c.on_invalid_task, c.on_decode_error = on_invalid_task, on_decode_error


def _check_not_consumed(app: Any, plugin: Plugin) -> None:
    """Nobody consumes a dead letter queue: a worker would run its messages again, for ever."""
    consumed = app.amqp.queues.consume_from
    queues = {plugin.dead_letter_queue} | {
        task.dead_letter_queue for task in app.tasks.values() if getattr(task, "dead_letter_queue", None)
    }
    for queue in sorted(queues & set(consumed)):
        raise SettingsError(
            f"this worker is told to consume the dead letter queue {queue!r}: take it out of task_queues and -Q"
            " (replay its messages with `celery selfheal dlq replay`)",
            "selfheal_dlq",
        )


def _check_reachable(server: LeaseServer, settings: SelfHealSettings) -> None:
    """A server that the user named must answer now; a broker that is away is left to Celery's own patience."""
    if not server.is_named:
        return
    give_up_at = monotonic() + settings.lease_ttl.total_seconds()
    while True:
        try:
            server.check()
            return
        except SettingsError:
            raise
        except Exception as exc:  # whatever keeps it from answering
            if monotonic() >= give_up_at:
                raise SelfHealError(
                    f"{server.setting} = {server.address!r}: no answer for"
                    f" {settings.lease_ttl.total_seconds():g} s ({exc}); start that server or correct the setting"
                ) from exc
