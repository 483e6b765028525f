"""``install(app)``: everything that the plugin adds to a Celery application, once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.signals import before_task_publish, task_postrun
from kombu.utils.imports import symbol_by_name

from celery_selfheal import database as _database  # noqa: F401  # it notes the process, before any fork
from celery_selfheal import headers as names
from celery_selfheal.backoff import check_exception_classes
from celery_selfheal.clock import monotonic, utc_now
from celery_selfheal.dead_letter import Death
from celery_selfheal.dedup.memory import MemoryClaims
from celery_selfheal.dedup.port import ClaimStore, Held, Job
from celery_selfheal.dedup.takeover import Decision, OnInDoubt, decide
from celery_selfheal.errors import SettingsError
from celery_selfheal.keys import Keys
from celery_selfheal.leases.memory import MemoryLeaseStore
from celery_selfheal.plugin.brokers.layout import RedisLayout, layout_of
from celery_selfheal.plugin.observer import observer
from celery_selfheal.plugin.publisher import Publisher
from celery_selfheal.plugin.slots import Slots
from celery_selfheal.plugin.stores import Stores, open_stores
from celery_selfheal.settings import SelfHealSettings
from celery_selfheal.telemetry.events import Observer

if TYPE_CHECKING:
    from celery_selfheal.database.engines import Database

REAP_TASK = "celery_selfheal.reap"
BUILT_IN_PREFIXES = ("celery.", "celery_selfheal.")


class Plugin:
    """The plugin on one application.

    Attributes:
        worker: The worker of this process, once it has started.
        slots: What a worker shares with its pool children; ``None`` outside of workers.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.worker: Any = None
        self.slots: Slots | None = None
        self.tell: Observer = observer(app)
        self._settings: SelfHealSettings | None = None
        self._stores: tuple[int, Stores] | None = None
        self._eager_leases: MemoryLeaseStore | None = None
        self._eager_claims: MemoryClaims | None = None
        self._sql_claims: tuple[Any, ClaimStore] | None = None
        self._layout: tuple[RedisLayout | None] | None = None
        self._unrecoverable: tuple[type[BaseException], ...] | None = None
        self.publisher = Publisher(app)
        self.eager_dead_letters: list[Death] = []

    @property
    def settings(self) -> SelfHealSettings:
        """Checked and frozen at first use.

        Raises:
            SettingsError: the configuration is wrong.
        """
        if self._settings is None:
            self._settings = read_settings(self.app.conf, namespace=self.app.namespace)
        return self._settings

    def reread_settings(self) -> SelfHealSettings:
        """Check again: a worker starts with what the configuration says by then."""
        self._settings = self._layout = self._unrecoverable = None
        return self.settings

    @property
    def keys(self) -> Keys:
        """Names of our keys.

        Raises:
            SettingsError: the application has no name, and no prefix to tell it from others.
        """
        name = self.app.main
        prefix = self.settings.key_prefix
        if name in (None, "", "__main__"):
            if prefix == SelfHealSettings().key_prefix:
                raise SettingsError(
                    "the Celery application has no name, so its keys could mix with another's:"
                    ' name it, Celery("proj"), or set selfheal_key_prefix',
                    "selfheal_key_prefix",
                )
            name = "app"
        return Keys(prefix=prefix, app=name)

    @property
    def layout(self) -> RedisLayout | None:
        """Key names of a Redis broker; ``None`` for another broker."""
        if self._layout is None:
            self._layout = (layout_of(self.app),)
        return self._layout[0]

    @property
    def autoretry_for(self) -> tuple[type[BaseException], ...]:
        """``selfheal_autoretry_for`` with its dotted paths resolved."""
        return _classes("selfheal_autoretry_for", self.settings.autoretry_for)

    @property
    def unrecoverable(self) -> tuple[type[BaseException], ...]:
        """``selfheal_unrecoverable`` with its dotted paths resolved."""
        if self._unrecoverable is None:
            self._unrecoverable = _classes("selfheal_unrecoverable", self.settings.unrecoverable)
        return self._unrecoverable

    @property
    def dead_letter_queue(self) -> str:
        """Name of the application's dead letter queue."""
        return self.settings.dlq or f"{self.app.main or 'celery'}.dlq"

    def open_stores(self) -> Stores:
        """Stores on new connections, for a thread of its own."""
        return open_stores(self.app, self.settings, self.keys)

    @property
    def stores(self) -> Stores:
        """Stores of this process; opened anew after a fork."""
        pid = os.getpid()
        if self._stores is None or self._stores[0] != pid:
            self._stores = (pid, self.open_stores())
        return self._stores[1]

    @property
    def database(self) -> Database:
        """Engine and sessions of this process.

        Raises:
            SettingsError: no database is set, or one of the settings cannot be used.
        """
        # Loads SQLAlchemy, which nobody else needs.
        from celery_selfheal.database.engines import database_of

        return database_of(self.settings)

    def claims(self, mode: str, *, eager: bool) -> ClaimStore:
        """Where ``dedup="claim"`` or ``"redis"`` keeps its claims, for this process.

        Args:
            eager: ``"redis"`` needs no Redis then: claims live as long as this process.

        Raises:
            SettingsError: there is nowhere to keep them.
        """
        if mode == "claim":
            # Loads SQLAlchemy, which nobody else needs.
            from celery_selfheal.dedup.claim import SqlClaims

            engine = self.database.engine
            if self._sql_claims is None or self._sql_claims[0] is not engine:
                self._sql_claims = (engine, SqlClaims(engine))
            return self._sql_claims[1]
        if not eager:
            if self.stores.claims is None:
                raise SettingsError(
                    "dedup='redis' needs a Redis, and selfheal_lease_backend = 'postgres' with this broker has none:"
                    " use dedup='claim'",
                    "selfheal_lease_backend",
                )
            return self.stores.claims
        if self._eager_claims is None:
            self._eager_claims = MemoryClaims(clock=monotonic, ttl=self.settings.idempotency_ttl)
        return self._eager_claims

    def takeover(self, job: Job, held: Held, *, on_in_doubt: OnInDoubt = "takeover") -> Decision:
        """Judge the start that holds a key, for ``job``, which has its own lease."""
        return decide(
            held,
            job,
            is_held=self.stores.leases.is_held,
            lease_ttl=self.settings.lease_ttl,
            takeover_after=self.settings.takeover_after,
            on_in_doubt=on_in_doubt,
        )

    @property
    def eager_leases(self) -> MemoryLeaseStore:
        """Leases of eager mode, in this process."""
        if self._eager_leases is None:
            settings = self.settings
            self._eager_leases = MemoryLeaseStore(
                clock=monotonic,
                ttl=settings.lease_ttl,
                max_stalls=settings.max_stalls,
                done_ttl=settings.lease_ttl,
            )
        return self._eager_leases


def install(app: Celery) -> Plugin:
    """Add self-healing to ``app``.

    Tasks with ``base=SelfHealTask`` do this by themselves when they are bound. Connects to nothing and starts
    nothing. A second call changes nothing.

    Raises:
        SettingsError: a ``selfheal_*`` setting is unknown or wrong. Settings that are loaded later are checked when the
            first task is bound, and again when a worker starts.
    """
    # Imported late: steps and tasks import this module.
    from celery_selfheal.plugin import steps

    plugin: Plugin | None = app.__dict__.get("_selfheal")
    if plugin is None:
        plugin = app.__dict__["_selfheal"] = Plugin(app)
        app.steps["worker"].add(steps.SelfHealStep)
        app.steps["consumer"].add(steps.DeliveryStep)
        # The base is Celery's own: the reaper has no lease, no retry and no late acknowledgement.
        app.task(
            name=REAP_TASK,
            base=Task,
            shared=False,
            ignore_result=True,
            acks_late=False,
            expires=60,
        )(_reap_task(plugin))
        before_task_publish.connect(_stamp, weak=False, dispatch_uid="selfheal-published-at")
        task_postrun.connect(_end_of_start, weak=False, dispatch_uid="selfheal-postrun")
    if app.configured:
        _ = plugin.settings
    elif not app._config_source:
        # Nothing more will be loaded from elsewhere: check what was set so far, without loading it.
        read_settings(app._preconf, namespace=app.namespace)
    return plugin


def plugin_of(app: Celery) -> Plugin:
    """The plugin on ``app``, installed if it was not."""
    plugin: Plugin | None = app.__dict__.get("_selfheal")
    return plugin if plugin is not None else install(app)


def is_built_in(task_name: str) -> bool:
    """Celery's and our own tasks run plain, also with ``task_cls``."""
    return task_name.startswith(BUILT_IN_PREFIXES)


def read_settings(conf: Any, *, namespace: str | None) -> SelfHealSettings:
    """Settings from Celery's configuration, whatever layer of it they come from."""
    return SelfHealSettings.from_conf({key: conf[key] for key in list(conf)}, namespace=namespace)


def selfheal_schedule(interval: float = 10.0) -> dict[str, dict[str, Any]]:
    """A ``beat_schedule`` entry that sends the reaper as a task.

    Healing does not need it, since every worker sweeps; it helps while all workers are wedged or are of an older
    release. Use it as ``app.conf.beat_schedule = {**selfheal_schedule(), ...}``.

    Args:
        interval: Seconds between two sweeps. Each message expires after that long, so that none piles up.
    """
    return {
        "selfheal-reap": {
            "task": REAP_TASK,
            "schedule": float(interval),
            "options": {"expires": float(interval), "ignore_result": True},
        }
    }


def reaper_of(plugin: Plugin, stores: Stores, session: Any, **options: Any) -> Any:
    """A reaper on ``stores``; ``session`` tells who competes for the lead."""
    from celery_selfheal.agents.reaper import Reaper

    return Reaper(
        stores.sessions,
        stores.leases,
        deliveries=stores.deliveries,
        unowned=stores.unowned,
        graveyard=_graveyard(plugin),
        session=session,
        lead=plugin.settings.reaper_interval * 2,
        tell=plugin.tell,
        **options,
    )


def _graveyard(plugin: Plugin) -> Any:
    from celery_selfheal.plugin.graveyard import DeadLetterGraveyard

    if plugin.layout is None:
        return None
    return DeadLetterGraveyard(
        plugin.app, plugin.layout, queue=plugin.dead_letter_queue, max_stalls=plugin.settings.max_stalls
    )


def _reap_task(plugin: Plugin) -> Any:
    from celery_selfheal.plugin.outbox import courier_of

    def reap() -> dict[str, int]:
        """Sweep once: restore what dead workers hold, count what stalled, send what was left in the outbox."""
        report = reaper_of(plugin, plugin.stores, lambda: None).sweep()
        found = {"sessions": report.sessions, "stalls": report.stalls, "restored": report.restored}
        courier = courier_of(plugin)
        return found if courier is None else {**found, "outbox": courier.deliver().sent}

    return reap


def _classes(setting: str, given: tuple[type[BaseException] | str, ...]) -> tuple[type[BaseException], ...]:
    found = []
    for one in given:
        try:
            found.append(symbol_by_name(one) if isinstance(one, str) else one)  # type: ignore[no-untyped-call]  # kombu is untyped
        except (ImportError, AttributeError) as exc:
            raise SettingsError(f"{setting} names {one!r}, which cannot be imported: {exc}", setting) from exc
    return check_exception_classes("settings", setting, tuple(found))


def _stamp(headers: dict[str, Any] | None = None, **_: Any) -> None:
    if headers is not None:
        headers[names.PUBLISHED] = headers.get(names.PUBLISHED) or utc_now().isoformat()


def _end_of_start(task: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    from celery_selfheal.plugin.task import SelfHealTask

    if isinstance(task, SelfHealTask):
        task.end_start(state, retval)
