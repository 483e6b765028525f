"""Opens the stores of an application: each caller gets connections of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from celery import Celery

from celery_selfheal.dedup.redis import RedisClaims
from celery_selfheal.errors import SettingsError
from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import Journals, LeaseInquiry, LeaseStore
from celery_selfheal.leases.progress import RedisProgress
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.plugin.brokers.layout import RedisLayout, layout_of
from celery_selfheal.plugin.brokers.unowned import UnownedDeliveries
from celery_selfheal.redis_url import is_redis, make_client, same_server, without_password
from celery_selfheal.retry_budget import RetryBudget
from celery_selfheal.sessions.port import SessionStore
from celery_selfheal.sessions.redis import RedisDeliveryStore, RedisSessionStore
from celery_selfheal.settings import SelfHealSettings

logger = logging.getLogger("celery_selfheal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One Redis server.

    Attributes:
        setting: Where the URL comes from, for error messages.
    """

    url: str
    ssl: Any
    setting: str


class Leases(LeaseStore, Journals, LeaseInquiry, Protocol):
    """One store that is all three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of one application on connections of their own.

    Attributes:
        together: Leases and sessions live in one server and database.
        claims: For ``dedup="redis"``; ``None`` where nothing is kept in Redis.
        deliveries: ``None`` where the broker is not Redis: it redelivers by itself.
        progress: ``None`` where the leases live in PostgreSQL: progress is not kept there.
    """

    leases: Leases
    claims: RedisClaims | None
    sessions: SessionStore
    deliveries: RedisDeliveryStore | None
    unowned: UnownedDeliveries | None
    together: bool
    progress: RedisProgress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseServer:
    """The server that keeps the leases, to be asked whether it can.

    Attributes:
        setting: Where its address comes from, for error messages.
        address: Without a password.
        is_named: The user named it for this, and for nothing that Celery itself would wait for.
        check: Raises unless it answers and is fit for it. Connects anew.
    """

    setting: str
    address: str
    is_named: bool
    check: Callable[[], object]


def lease_server(app: Celery, settings: SelfHealSettings) -> LeaseServer:
    """Where the leases live.

    Raises:
        SettingsError: there is none, or it is of the wrong kind.
    """
    if settings.lease_backend == "postgres":
        from celery_selfheal.plugin import postgres

        setting, shown = postgres.address(settings)
        return LeaseServer(setting=setting, address=shown, is_named=True, check=lambda: postgres.check(settings))
    address = lease_address(app, settings)
    return LeaseServer(
        setting=address.setting,
        address=without_password(address.url),
        is_named=bool(settings.redis_url),
        check=open_client(address, ttl=settings.lease_ttl).ping,
    )


def lease_address(app: Celery, settings: SelfHealSettings) -> Address:
    """Where the leases live: ``selfheal_redis_url``, else the broker if it is Redis, else the result backend.

    Raises:
        SettingsError: none of the three is Redis.
    """
    if settings.redis_url:
        return Address(url=settings.redis_url, ssl=None, setting="selfheal_redis_url")
    broker = broker_address(app)
    if broker:
        return broker
    backend = app.conf.result_backend
    if isinstance(backend, str) and is_redis(backend):
        return Address(url=backend, ssl=app.conf.redis_backend_use_ssl, setting="result_backend")
    raise SettingsError(
        "selfheal_redis_url is not set, and neither broker_url nor result_backend is Redis:"
        " set it to the Redis server that shall keep the leases, or keep them in PostgreSQL"
        " (selfheal_lease_backend = 'postgres')",
        "selfheal_redis_url",
    )


def broker_address(app: Celery) -> Address | None:
    """The broker, if it is Redis."""
    setting = "broker_read_url" if app.conf.broker_read_url else "broker_url"
    url = app.conf.broker_read_url or app.conf.broker_url
    if isinstance(url, (list, tuple)):
        url = ";".join(url)
    if not isinstance(url, str) or not is_redis(url):
        return None
    return Address(url=url, ssl=app.conf.broker_use_ssl, setting=setting)


def open_client(address: Address, *, ttl: timedelta) -> Any:
    """A client that gives up before a lease runs out. Connects on first use."""
    timeout = ttl.total_seconds() / 3
    return make_client(address.url, ssl=address.ssl, timeout=timeout, setting=address.setting)


def open_broker_client(app: Celery, *, ttl: timedelta) -> Any:
    """A client of the Redis broker, for one user alone.

    Raises:
        SettingsError: the broker is not a Redis that we can connect to.
    """
    address = broker_address(app)
    if address is None:
        raise SettingsError("the broker is not a Redis server that the plugin can connect to", "broker_url")
    return open_client(address, ttl=ttl)


def open_stores(app: Celery, settings: SelfHealSettings, keys: Keys) -> Stores:
    """Open all stores; nothing is connected before the first call.

    Raises:
        SettingsError: a URL is wrong, or there is no server that could keep the leases.
    """
    layout = layout_of(app)
    broker = broker_address(app) if layout else None
    done_ttl = settings.done_ttl_for(layout.visibility_timeout if layout else timedelta(0))
    if settings.lease_backend == "postgres":
        from celery_selfheal.plugin import postgres

        in_postgres, beside = postgres.open_leases(settings, keys, done_ttl=done_ttl)
        if layout is None or broker is None:
            return Stores(
                leases=in_postgres,
                claims=None,
                sessions=beside,
                deliveries=None,
                unowned=None,
                together=True,
            )
        client = open_client(broker, ttl=settings.lease_ttl)
        return _on_the_broker(
            app,
            settings,
            keys,
            layout,
            broker,
            client,
            leases=in_postgres,
            claims=_claims(client, keys, settings, broker),
            together=False,
        )
    lease = lease_address(app, settings)
    together = broker is None or same_server(lease.url, broker.url)
    client = open_client(lease, ttl=settings.lease_ttl)
    leases = RedisLeaseStore(
        client,
        keys,
        ttl=settings.lease_ttl,
        max_stalls=settings.max_stalls,
        done_ttl=done_ttl,
        address=without_password(lease.url),
        unacked=layout.unacked if layout and together else None,
        budget=RetryBudget.parse(settings.retry_budget) if settings.retry_budget else None,
    )
    claims = _claims(client, keys, settings, lease)
    progress = RedisProgress(client, keys, address=without_password(lease.url))
    if layout is None or broker is None:
        sessions = RedisSessionStore(client, keys, ttl=settings.lease_ttl, address=without_password(lease.url))
        return Stores(
            leases=leases,
            claims=claims,
            progress=progress,
            sessions=sessions,
            deliveries=None,
            unowned=None,
            together=True,
        )
    if not together:
        client = open_client(broker, ttl=settings.lease_ttl)
    return _on_the_broker(
        app,
        settings,
        keys,
        layout,
        broker,
        client,
        leases=leases,
        claims=claims,
        together=together,
        progress=progress,
    )


def _claims(client: Any, keys: Keys, settings: SelfHealSettings, address: Address) -> RedisClaims:
    return RedisClaims(client, keys, ttl=settings.idempotency_ttl, address=without_password(address.url))


def _on_the_broker(
    app: Celery,
    settings: SelfHealSettings,
    keys: Keys,
    layout: RedisLayout,
    broker: Address,
    client: Any,
    *,
    leases: Leases,
    claims: RedisClaims | None,
    together: bool,
    progress: RedisProgress | None = None,
) -> Stores:
    address = without_password(broker.url)
    sessions = RedisSessionStore(client, keys, ttl=settings.lease_ttl, address=address, unacked=layout.unacked)
    deliveries = RedisDeliveryStore(client, keys, unacked=layout.unacked, address=address)
    return Stores(
        leases=leases,
        claims=claims,
        progress=progress,
        sessions=sessions,
        deliveries=deliveries,
        unowned=UnownedDeliveries(app, deliveries, layout),
        together=together,
    )
