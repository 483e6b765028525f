"""Redis URLs: every spelling of Celery, kombu and redis-py, turned into a client of our own."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from celery_selfheal.errors import SettingsError

if TYPE_CHECKING:
    import redis
    from redis.retry import Retry

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 6379
CLIENT_NAME = "selfheal"
MASK = "***"
MAX_CONNECTIONS = 1000  # above any pool of greenlets; a leak shows before a server's default limit of 10 000

_TCP = frozenset({"redis", "valkey"})
_TLS = frozenset({"rediss", "valkeys"})
_SOCKET = frozenset({"unix", "socket", "redis+socket"})
_SENTINEL = frozenset({"sentinel", "sentinels", "redis+sentinel", "rediss+sentinel", "redis-sentinel"})

_CERT_REQS: dict[object, str] = {
    "none": "none",
    "optional": "optional",
    "required": "required",
    "cert_none": "none",
    "cert_optional": "optional",
    "cert_required": "required",
    None: "none",
    0: "none",  # the three constants of ``ssl`` are integers
    1: "optional",
    2: "required",
}
_TLS_OPTIONS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    }
)
_ARGUMENTS = frozenset({"credential_provider", "db", "password", "protocol", "username", "virtual_host"})
# Tuning that redis-py or kombu reads from a URL that we may share with them: ours is our own.
_IGNORED = frozenset(
    {
        "client_name",
        "connect_timeout",
        "decode_responses",
        "encoding",
        "encoding_errors",
        "failover_strategy",
        "health_check_interval",
        "heartbeat",
        "insist",
        "legacy_responses",
        "lib_name",
        "lib_version",
        "login_method",
        "max_connections",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_read_size",
        "socket_timeout",
        "timeout",
        "visibility_timeout",
    }
)


def connection_kwargs(
    url: str, *, ssl: Mapping[str, object] | bool | None = None, setting: str = "selfheal_redis_url"
) -> dict[str, Any]:
    """Turn a URL into keyword arguments of ``redis.Redis``: where the server is and who we are.

    A server certificate is checked unless ``ssl_cert_reqs`` says otherwise, as redis-py does; kombu's broker
    connection leaves the check out for a bare ``rediss://``.

    Args:
        ssl: TLS options beside the URL, as in ``broker_use_ssl``; those in the URL win.
        setting: Where the URL comes from, for the error.

    Raises:
        SettingsError: the URL is none that we can use.
    """
    target = _parse(url, setting)
    tls = {**_tls_beside_url(ssl, setting), **target.tls}
    if target.socket_path and tls:
        raise SettingsError(f"{setting} asks for TLS on a Unix socket: {without_password(url)}", setting)
    kwargs: dict[str, Any] = {"db": target.db}
    if target.socket_path:
        kwargs["unix_socket_path"] = target.socket_path
    else:
        kwargs.update(host=target.host, port=target.port)
    if target.credential_provider:
        kwargs["credential_provider"] = _load_credential_provider(target.credential_provider, setting)
    else:
        kwargs.update({name: value for name, value in target.login.items() if value})
    if target.protocol is not None:
        kwargs["protocol"] = target.protocol
    if tls:
        # Said aloud, since older releases of redis-py check no host name by default.
        tls["ssl_check_hostname"] = tls.get("ssl_cert_reqs") != "none" and tls.get("ssl_check_hostname", True)
    return {**kwargs, **tls}


def make_client(
    url: str,
    *,
    ssl: Mapping[str, object] | bool | None = None,
    timeout: float,
    retry: Retry | None = None,
    setting: str = "selfheal_redis_url",
    **extra: Any,
) -> redis.Redis:
    """Make a client with connections of its own; it connects on first use.

    Args:
        timeout: Seconds to wait for a connection, and again for each answer.
        retry: What to do when a connection breaks. By default one repetition at once, which covers a connection
            that the server closed while it was idle. Whatever is sent may thus run twice: it must be idempotent.
        extra: More arguments of ``redis.Redis``, stronger than ours.

    Raises:
        SettingsError: as ``connection_kwargs``.
    """
    # Imported here since it takes longer than all of this package, and a worker without Redis needs none of it.
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    kwargs: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "health_check_interval": 0,
        "decode_responses": False,
        "retry": retry if retry is not None else Retry(NoBackoff(), 1),
        # Older releases of redis-py repeat nothing that is not named here.
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        "client_name": CLIENT_NAME,
        "max_connections": MAX_CONNECTIONS,
    }
    return redis.Redis(**{**kwargs, **connection_kwargs(url, ssl=ssl, setting=setting), **extra})


def is_redis(url: str) -> bool:
    """Tell by its scheme whether a URL is one that we can connect to; a malformed rest is not looked at."""
    return url.partition("://")[0].lower() in _TCP | _TLS | _SOCKET


def without_password(url: str) -> str:
    """Return the URL for logs and errors: any password is ``***``, also in a malformed URL or a list of URLs."""
    return ";".join(_mask(one) for one in re.split(r";(?=[\w.+-]+://)", url))


def same_server(url_a: str, url_b: str) -> bool:
    """Tell whether two URLs name the same database of the same server, so that one script can use both.

    ``False`` is the safe answer, and the one for URLs that are not Redis or that we cannot use.
    """
    try:
        return _parse(url_a, "").address == _parse(url_b, "").address
    except SettingsError:
        return False


@dataclass(frozen=True, slots=True)
class _Target:
    host: str
    port: int
    socket_path: str
    db: int
    login: Mapping[str, str] = field(repr=False)
    credential_provider: str
    protocol: int | None
    tls: Mapping[str, object] = field(repr=False)

    @property
    def address(self) -> tuple[str, int, str, int]:
        host = DEFAULT_HOST if self.host == "localhost" else self.host
        return (host, self.port, self.socket_path, self.db)


def _parse(url: str, setting: str) -> _Target:
    def refuse(rule: str) -> SettingsError:
        return SettingsError(f"{setting} {rule}, got {without_password(url)!r}", setting)

    if ";" in url:
        raise refuse("must be one URL, several are not supported (a ';' in a password is written %3B)")
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if scheme in _SENTINEL:
        raise refuse("cannot be a Sentinel URL yet: set selfheal_redis_url to the URL of a Redis server")
    if scheme not in _TCP | _TLS | _SOCKET:
        raise refuse(f"must start with one of {', '.join(f'{one}://' for one in sorted(_TCP | _TLS | _SOCKET))}")
    split = _split(url)
    if split is None:
        raise refuse(
            "must have a port from 1 to 65535 and arguments like ?db=0"
            " (in a password, each of / ? # @ : is written percent-encoded, as in %2F)"
        )
    parts, arguments = split
    for name in arguments:
        if name not in _ARGUMENTS | _TLS_OPTIONS | _IGNORED:
            raise refuse(f"has an unknown argument {name!r}{_did_you_mean(name, _ARGUMENTS | _TLS_OPTIONS)}")

    host = socket_path = ""
    port = 0
    path = unquote(parts.path)
    if scheme in _SOCKET:
        if parts.hostname or not path.strip("/"):
            raise refuse(f"must name a socket by its full path, as in {scheme}:///run/redis.sock")
        socket_path, path = path, ""
    else:
        host = unquote(parts.hostname or "") or DEFAULT_HOST
        port = parts.port or DEFAULT_PORT

    databases = [path, *(arguments[name] for name in ("db", "virtual_host") if name in arguments)]
    numbers = {one.strip("/") for one in databases} - {""} or {"0"}
    if len(numbers) > 1:
        raise refuse("must name one database")
    database = numbers.pop()
    if not _is_number(database):
        raise refuse("must name its database by number, as in /0")

    protocol = arguments.get("protocol")
    if protocol is not None and not _is_number(protocol):
        raise refuse("must have a number as its argument 'protocol'")
    tls: dict[str, object] = {"ssl": True} if scheme in _TLS else {}
    for name in _TLS_OPTIONS & arguments.keys():
        try:
            tls[name] = _tls_option(name, arguments[name])
        except ValueError as exc:
            raise refuse(f"has a wrong argument {name!r} ({exc})") from None
        tls["ssl"] = True
    return _Target(
        host=host,
        port=port,
        socket_path=socket_path,
        db=int(database),
        login={
            "username": unquote(parts.username or "") or arguments.get("username", ""),
            "password": unquote(parts.password or "") or arguments.get("password", ""),
        },
        credential_provider=arguments.get("credential_provider", ""),
        protocol=None if protocol is None else int(protocol),
        tls=tls,
    )


def _split(url: str) -> tuple[SplitResult, dict[str, str]] | None:
    """Parts and arguments; ``None`` if malformed, since urllib's own errors may show a part of the password."""
    try:
        parts = urlsplit(url)
        # Strict, since a lone word there is the rest of a password with a "?" in it.
        arguments = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        return None if parts.port == 0 or parts.fragment else (parts, arguments)
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _tls_beside_url(ssl: Mapping[str, object] | bool | None, setting: str) -> dict[str, object]:
    if not ssl:
        return {}
    tls: dict[str, object] = {"ssl": True}
    for name, value in ssl.items() if isinstance(ssl, Mapping) else ():
        if name not in _TLS_OPTIONS:
            raise SettingsError(
                f"unknown TLS option {name!r} for {setting}{_did_you_mean(name, _TLS_OPTIONS)}", setting
            )
        try:
            tls[name] = _tls_option(name, value)
        except ValueError as exc:
            raise SettingsError(f"wrong TLS option {name!r} for {setting}: {exc}", setting) from None
    return tls


def _tls_option(name: str, value: object) -> object:
    """Value of a TLS option as redis-py takes it; ``ValueError`` says what it may be."""
    if name == "ssl_cert_reqs":
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, bool) or not isinstance(key, (str, int, type(None))) or key not in _CERT_REQS:
            raise ValueError(f"one of none, optional, required, CERT_NONE, CERT_OPTIONAL, CERT_REQUIRED, got {value!r}")
        return _CERT_REQS[key]
    if name == "ssl_check_hostname" and isinstance(value, str):
        if value.lower() not in {"true", "yes", "1", "false", "no", "0"}:
            raise ValueError(f"true or false, got {value!r}")
        return value.lower() in {"true", "yes", "1"}
    if name == "ssl_min_version" and isinstance(value, str):
        return int(value)
    return value


def _load_credential_provider(dotted: str, setting: str) -> object:
    """Make the provider from the path of its class, as Celery and kombu do."""
    module, _, name = dotted.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as exc:
        raise SettingsError(
            f"{setting} names a credential_provider {dotted!r} that is not there: {exc}", setting
        ) from exc


def _did_you_mean(name: str, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(name, [*known, *(one.removeprefix("ssl_") for one in known)], n=1)
    if not close:
        return ""
    return f", did you mean {close[0] if close[0] in known else 'ssl_' + close[0]}?"


def _mask(url: str) -> str:
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    rest = re.sub(r"([?&][^=&?]*password=)[^&#]*", rf"\g<1>{MASK}", rest, flags=re.IGNORECASE)
    # The last @ of all, not of the host's part: a password may hold a / or # that should have been encoded.
    login, at, address = rest.rpartition("@")
    if at and ":" in login:
        rest = f"{login.partition(':')[0]}:{MASK}@{address}"
    return f"{scheme}{mark}{rest}"
