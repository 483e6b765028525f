"""Every spelling of a Redis URL that Celery, kombu or redis-py take is one that we take."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection
from kombu.transport.redis import Channel
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_selfheal.errors import SettingsError
from celery_selfheal.redis_url import connection_kwargs, make_client, same_server, without_password
from celery_selfheal.testing.servers import find_redis_binary


def tcp(host: str = "127.0.0.1", port: int = 6379, db: int = 0, **more: object) -> dict[str, object]:
    return {"host": host, "port": port, "db": db, **more}


def unix(path: str = "/run/redis.sock", db: int = 0, **more: object) -> dict[str, object]:
    return {"unix_socket_path": path, "db": db, **more}


def tls(host: str = "cache", port: int = 6379, db: int = 0, **more: object) -> dict[str, object]:
    more.setdefault("ssl_check_hostname", more.get("ssl_cert_reqs") != "none")
    return tcp(host, port, db, ssl=True, **more)


# The letters: who else takes this URL for the same server, which a test below asks them:
# b = kombu for a broker, r = Celery for a result backend, p = redis-py. Without a host, each has a default of its own.
URLS: dict[str, tuple[str, dict[str, object]]] = {
    "redis://": ("b", tcp()),
    "redis:///": ("b", tcp()),
    "redis:///3": ("b", tcp(db=3)),
    "redis://localhost": ("brp", tcp("localhost")),
    "redis://localhost/": ("brp", tcp("localhost")),
    "redis://cache/2": ("brp", tcp("cache", db=2)),
    "redis://cache//2": ("brp", tcp("cache", db=2)),
    "redis://cache/%2F2": ("brp", tcp("cache", db=2)),
    "redis://cache:/2": ("brp", tcp("cache", db=2)),
    "redis://cache:6380": ("brp", tcp("cache", 6380)),
    "redis://cache:6380/15": ("brp", tcp("cache", 6380, 15)),
    "redis://my_cache.example.org:6380/15": ("brp", tcp("my_cache.example.org", 6380, 15)),
    "redis://cache:6380?db=4": ("rp", tcp("cache", 6380, 4)),
    "redis://cache:6380/4?db=4": ("rp", tcp("cache", 6380, 4)),
    "redis://cache:6380?virtual_host=4": ("", tcp("cache", 6380, 4)),
    "redis://cache:6380?virtual_host=/4": ("", tcp("cache", 6380, 4)),
    "redis://:secret@cache/1": ("brp", tcp("cache", db=1, password="secret")),
    "redis://me:secret@cache/1": ("brp", tcp("cache", db=1, username="me", password="secret")),
    "redis://:secret@/1": ("b", tcp(db=1, password="secret")),
    "redis://me%40corp:p%40ss%2Fw%3Ard%23%3F@cache": ("brp", tcp("cache", username="me@corp", password="p@ss/w:rd#?")),
    "redis://cache?username=me&password=p%40ss": ("p", tcp("cache", username="me", password="p@ss")),
    "redis://[::1]:6380/1": ("brp", tcp("::1", 6380, 1)),
    "redis://[fe80::1%25eth0]/1": ("brp", tcp("fe80::1%eth0", db=1)),
    "redis://%3A%3A1:6380/1": ("brp", tcp("::1", 6380, 1)),
    "redis://cache/1?socket_timeout=3&health_check_interval=25": ("rp", tcp("cache", db=1)),
    "redis://cache/1?connect_timeout=3&heartbeat=10": ("b", tcp("cache", db=1)),
    "redis://cache/1?protocol=2": ("rp", tcp("cache", db=1, protocol=2)),
    "REDIS://Cache/1": ("", tcp("cache", db=1)),
    "valkey://cache:6380/1": ("", tcp("cache", 6380, 1)),
    "rediss://cache:6380/1": ("p", tls(port=6380, db=1)),
    "rediss://cache?ssl_cert_reqs=CERT_REQUIRED": ("br", tls(ssl_cert_reqs="required")),
    "rediss://cache?ssl_cert_reqs=CERT_OPTIONAL": ("br", tls(ssl_cert_reqs="optional")),
    "rediss://cache?ssl_cert_reqs=CERT_NONE": ("br", tls(ssl_cert_reqs="none")),
    "rediss://cache?ssl_cert_reqs=required": ("brp", tls(ssl_cert_reqs="required")),
    "rediss://cache?ssl_cert_reqs=optional": ("brp", tls(ssl_cert_reqs="optional")),
    "rediss://cache?ssl_cert_reqs=none": ("brp", tls(ssl_cert_reqs="none")),
    "rediss://me:secret@cache/1?ssl_cert_reqs=none&ssl_ca_certs=%2Fa&ssl_certfile=/c&ssl_keyfile=/k": (
        "brp",
        tls(
            db=1,
            username="me",
            password="secret",
            ssl_cert_reqs="none",
            ssl_ca_certs="/a",
            ssl_certfile="/c",
            ssl_keyfile="/k",
        ),
    ),
    "rediss://cache?ssl_cert_reqs=required&ssl_check_hostname=false": (
        "brp",
        tls(ssl_cert_reqs="required", ssl_check_hostname=False),
    ),
    "redis://cache?ssl_cert_reqs=required": ("b", tls(ssl_cert_reqs="required")),
    "valkeys://cache:6380/1": ("", tls(port=6380, db=1)),
    "redis+socket:///run/redis.sock": ("br", unix()),
    "redis+socket:///run/redis.sock?virtual_host=3": ("br", unix(db=3)),
    "redis+socket://me:p%40ss@/run/redis.sock?virtual_host=/3": ("br", unix(db=3, username="me", password="p@ss")),
    "socket:///run/redis.sock?virtual_host=3": ("r", unix(db=3)),
    "socket:///run/redis.sock?db=3": ("r", unix(db=3)),
    "unix:///run/redis.sock": ("p", unix()),
    "unix:///run/redis.sock?db=3": ("p", unix(db=3)),
    "unix://:secret@/run/my%20redis.sock?db=3": ("p", unix("/run/my redis.sock", 3, password="secret")),
    "unix:///run/a@b.sock": ("p", unix("/run/a@b.sock")),
}


@pytest.mark.parametrize("url", URLS)
def test_url_becomes_arguments_of_a_client(url: str) -> None:
    assert connection_kwargs(url) == URLS[url][1]


@pytest.mark.parametrize("url", URLS)
def test_redis_py_takes_these_arguments(url: str) -> None:
    client = make_client(url, timeout=1)

    client.connection_pool.make_connection()  # does not connect


def test_the_table_is_long_enough() -> None:
    assert len(URLS) >= 25


def _kombu(url: str) -> dict[str, Any]:
    channel = object.__new__(Channel)  # its constructor would connect
    channel.connection = SimpleNamespace(client=Connection(url), default_port=6379)
    return dict(channel._connparams())


def _celery(url: str) -> dict[str, Any]:
    app = Celery(set_as_current=False)
    return dict(RedisBackend(url=url.removeprefix("redis+"), app=app).connparams)


def _redis_py(url: str) -> dict[str, Any]:
    return dict(redis.ConnectionPool.from_url(url).connection_kwargs)


WORLDS: dict[str, Callable[[str], dict[str, Any]]] = {"b": _kombu, "r": _celery, "p": _redis_py}
CERT_REQS = {ssl.CERT_NONE: "none", ssl.CERT_OPTIONAL: "optional", ssl.CERT_REQUIRED: "required"}


@pytest.mark.parametrize(
    ("url", "world"), [(url, world) for url, (worlds, _) in URLS.items() for world in worlds], ids=str
)
def test_the_others_mean_the_same_server_by_it(url: str, world: str) -> None:
    """The table is not our opinion: where it names another library, that library is asked."""
    theirs = WORLDS[world](url)
    if "path" in theirs:
        theirs["unix_socket_path"] = theirs.pop("path")
        theirs.pop("host", None)
        theirs.pop("port", None)
    else:
        theirs.setdefault("port", 6379)
    theirs["db"] = int(theirs.get("db") or 0)
    theirs["ssl_cert_reqs"] = CERT_REQS.get(theirs.get("ssl_cert_reqs", ""), theirs.get("ssl_cert_reqs"))

    ours = connection_kwargs(url)

    asked = ("host", "port", "db", "unix_socket_path", "username", "password")
    asked += ("ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    assert {name: theirs.get(name) for name in asked} == {name: ours.get(name) for name in asked}


REFUSED = {
    "": "must start with one of redis://, redis+socket://, rediss://, socket://, unix://, valkey://, valkeys://",
    "cache:6379": "must start with one of",
    "redis": "must start with one of",
    "amqp://guest:secret@rabbit//": "must start with one of",
    "http://:secret@cache": "must start with one of",
    "redis+srv://:secret@cache": "must start with one of",
    "redis://:secret@a/0;redis://:secret@b/0": "must be one URL, several are not supported",
    "sentinel://:secret@a:26379": "cannot be a Sentinel URL yet: set selfheal_redis_url",
    "sentinel://a:26379;sentinel://:secret@b:26379": "must be one URL, several are not supported",
    "redis+sentinel://:secret@a:26379": "cannot be a Sentinel URL yet",
    "redis://:secret@cache:port/0": "must have a port from 1 to 65535",
    "redis://:secret@cache:65536/0": "must have a port from 1 to 65535",
    "redis://:secret@cache:0/0": "must have a port from 1 to 65535",
    "redis://:secret@cache:-1/0": "must have a port from 1 to 65535",
    "redis://:secret@[::1/0": "must have a port from 1 to 65535",
    "redis://:sec#secret@cache/0": "in a password, each of / ? # @ : is written percent-encoded",
    "redis://:sec?secret@cache/0": "in a password, each of / ? # @ : is written percent-encoded",
    "redis://:7?secret@cache/0": "in a password, each of / ? # @ : is written percent-encoded",
    "redis://:7/secret@cache/0": "must name its database by number",
    "redis://:secret@cache/zero": "must name its database by number",
    "redis://:secret@cache/-1": "must name its database by number",
    "redis://:secret@cache/1/2": "must name its database by number",
    "redis://:secret@cache/\u0661": "must name its database by number",
    "redis://:secret@cache?db=one": "must name its database by number",
    "redis://:secret@cache/1?db=2": "must name one database",
    "redis://:secret@cache?db=2&virtual_host=3": "must name one database",
    "redis://:secret@cache?bd=2": "has an unknown argument 'bd'",
    "redis://:secret@cache?virtual_hosts=2": "did you mean virtual_host?",
    "redis://:secret@cache?protocol=three": "must have a number as its argument 'protocol'",
    "rediss://:secret@cache?cert_reqs=none": "did you mean ssl_cert_reqs?",
    "rediss://:secret@cache?ssl_cert_reqs=maybe": "one of none, optional, required",
    "rediss://:secret@cache?ssl_check_hostname=maybe": "true or false",
    "rediss://:secret@cache?ssl_min_version=new": "has a wrong argument 'ssl_min_version'",
    "unix://:secret@": "must name a socket by its full path, as in unix:///run/redis.sock",
    "unix:///": "must name a socket by its full path",
    "unix://run/redis.sock?password=secret": "must name a socket by its full path",
    "redis+socket://:secret@run/redis.sock": "must name a socket by its full path",
    "unix:///run/redis.sock?ssl_cert_reqs=none&password=secret": "asks for TLS on a Unix socket",
    "redis://:secret@cache?credential_provider=nowhere.Provider": "names a credential_provider 'nowhere.Provider'",
    "redis://:secret@cache?credential_provider=json.Nobody": "names a credential_provider 'json.Nobody'",
}


@pytest.mark.parametrize("url", REFUSED)
def test_what_we_cannot_use_is_refused_by_name_and_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        connection_kwargs(url, setting="CELERY_SELFHEAL_REDIS_URL")

    text = str(caught.value)
    assert REFUSED[url] in text
    assert text.startswith("CELERY_SELFHEAL_REDIS_URL ")
    assert caught.value.setting == "CELERY_SELFHEAL_REDIS_URL"
    shown = [text, repr(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    assert "secret" not in "".join(shown[:3])
    assert caught.value.__suppress_context__ or "secret" not in shown[3]


class TestTlsBesideTheUrl:
    def test_true_is_redis_pys_default(self) -> None:
        assert connection_kwargs("redis://cache", ssl=True) == tls()

    @pytest.mark.parametrize("nothing", [None, False, {}])
    def test_nothing_leaves_the_choice_to_the_url(self, nothing: Any) -> None:
        assert connection_kwargs("redis://cache", ssl=nothing) == tcp("cache")
        assert connection_kwargs("rediss://cache", ssl=nothing) == tls()

    @pytest.mark.parametrize(
        ("given_as", "meant"),
        [
            (ssl.CERT_NONE, "none"),
            (ssl.CERT_OPTIONAL, "optional"),
            (ssl.CERT_REQUIRED, "required"),
            (None, "none"),
            ("CERT_REQUIRED", "required"),
            ("required", "required"),
        ],
    )
    def test_options_as_in_broker_use_ssl(self, given_as: object, meant: str) -> None:
        options = {"ssl_cert_reqs": given_as, "ssl_ca_certs": "/ca.pem"}

        assert connection_kwargs("rediss://cache", ssl=options) == tls(ssl_cert_reqs=meant, ssl_ca_certs="/ca.pem")

    def test_options_in_the_url_win(self) -> None:
        kwargs = connection_kwargs("rediss://cache?ssl_cert_reqs=none", ssl={"ssl_cert_reqs": "required"})

        assert kwargs["ssl_cert_reqs"] == "none"

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"keyfile": "/k.pem"}, "unknown TLS option 'keyfile' for selfheal_redis_url, did you mean ssl_keyfile?"),
            ({"ssl_cert_reqs": True}, "wrong TLS option 'ssl_cert_reqs' for selfheal_redis_url: one of none,"),
            ({"ssl_cert_reqs": []}, "wrong TLS option 'ssl_cert_reqs'"),
        ],
    )
    def test_what_redis_does_not_know_is_refused(self, options: dict[str, object], text: str) -> None:
        with pytest.raises(SettingsError) as caught:
            connection_kwargs("rediss://cache", ssl=options)

        assert text in str(caught.value)


class Provider(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return ("me", "secret")


def test_a_credential_provider_takes_the_place_of_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "ProviderOfThisTest", Provider, raising=False)

    kwargs = connection_kwargs("redis://me:secret@cache?credential_provider=redis.ProviderOfThisTest")

    assert isinstance(kwargs.pop("credential_provider"), Provider)
    assert kwargs == tcp("cache")


class TestClient:
    def test_it_has_its_own_tuning_whatever_the_url_says(self) -> None:
        client = make_client("redis://cache/3?socket_timeout=60&client_name=x&decode_responses=yes", timeout=1.5)

        kwargs = client.connection_pool.connection_kwargs
        assert kwargs["socket_timeout"] == 1.5
        assert kwargs["socket_connect_timeout"] == 1.5
        assert kwargs["health_check_interval"] == 0
        assert kwargs["client_name"] == "selfheal"
        assert client.connection_pool.max_connections == 1000
        assert client.get_encoder().decode_responses is False

    def test_the_caller_has_the_last_word(self) -> None:
        client = make_client("redis://cache/3", timeout=1.5, client_name="probe", max_connections=2)

        assert client.connection_pool.connection_kwargs["client_name"] == "probe"
        assert client.connection_pool.max_connections == 2

    @pytest.mark.parametrize(("retry", "attempts"), [(None, 2), (Retry(NoBackoff(), 0), 1), (Retry(NoBackoff(), 3), 4)])
    def test_a_broken_connection_is_repeated_as_often_as_asked(self, retry: Retry | None, attempts: int) -> None:
        """By default once: that covers a connection which the server closed while it was idle."""
        with HangingUp() as server:
            client = make_client(server.url, timeout=5, retry=retry, protocol=2)

            with pytest.raises(redis.ConnectionError):
                client.ping()

            assert server.pings == attempts

    def test_a_server_that_does_not_answer_costs_the_timeout_for_each_attempt(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = make_client(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
            started = time.monotonic()

            with pytest.raises(redis.TimeoutError):
                client.ping()

        assert 0.2 <= time.monotonic() - started < 5


class HangingUp:
    """A server that lets a client in and closes the connection instead of answering PING."""

    def __init__(self) -> None:
        self.pings = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> HangingUp:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                while (text := connection.recv(4096)) and b"PING" not in text:
                    connection.sendall(b"+OK\r\n" * text.count(b"*"))
                self.pings += b"PING" in text


class TestMask:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://localhost:6379/0", "redis://localhost:6379/0"),
            ("redis://:secret@cache:6379/0", "redis://:***@cache:6379/0"),
            ("redis://me:secret@cache:6379/0", "redis://me:***@cache:6379/0"),
            ("redis://me@cache", "redis://me@cache"),
            ("redis://:secret@[::1]:6379/0", "redis://:***@[::1]:6379/0"),
            ("redis://:sec/ret#?@cache/0", "redis://:***@cache/0"),
            ("redis://:sec@ret@cache/0", "redis://:***@cache/0"),
            ("redis://:sec://ret@cache/0", "redis://:***@cache/0"),
            ("redis://:sec;ret@cache/0", "redis://:***@cache/0"),
            ("redis://:secret@a;redis://me:secret@b", "redis://:***@a;redis://me:***@b"),
            ("redis://cache?password=secret&db=1", "redis://cache?password=***&db=1"),
            ("rediss://cache?db=1&ssl_password=sec@ret", "rediss://cache?db=1&ssl_password=***"),
            ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
            ("unix:///run/redis.sock?Password=secret", "unix:///run/redis.sock?Password=***"),
            ("me:secret@cache", "me:***@cache"),
            ("postgresql+psycopg2://me:secret@db/shop", "postgresql+psycopg2://me:***@db/shop"),
            ("", ""),
        ],
    )
    def test_password_is_masked_and_the_rest_is_kept(self, url: str, shown: str) -> None:
        assert without_password(url) == shown

    @given(st.text(min_size=1), st.sampled_from(["redis://{}:{}@cache:1/0", "{}:{}@cache", "unix://{}:{}@/run/x"]))
    def test_no_password_gets_through_however_it_is_spelt(self, noise: str, form: str) -> None:
        password = f"hunter2{noise}hunter2"

        assert "hunter2" not in without_password(form.format("me", password))

    @given(st.text(alphabet=":/?#@;&=%[]a1", max_size=12))
    def test_no_url_makes_the_reader_fail_in_another_way_or_show_a_password(self, noise: str) -> None:
        url = f"redis://me:hunter2{noise}hunter2@cache/0"
        try:
            host, shown = connection_kwargs(url)["host"], ""
        except SettingsError as error:
            host, shown = "cache", str(error)

        assert host == "cache"
        assert "hunter2" not in shown


class TestSameServer:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("redis://localhost:6379/0", "redis://127.0.0.1"),
            ("redis://LOCALHOST", "redis://"),
            ("redis://cache/2", "redis://me:secret@cache:6379?db=2"),
            ("rediss://cache/2?ssl_cert_reqs=none", "valkeys://cache/2"),
            ("redis://[::1]:1/0", "redis://%3A%3A1:1"),
            ("unix:///run/redis.sock?db=3", "redis+socket:///run/redis.sock?virtual_host=3"),
        ],
    )
    def test_two_spellings_of_one_database_are_the_same(self, one: str, other: str) -> None:
        assert same_server(one, other) is True
        assert same_server(other, one) is True

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("redis://localhost/0", "redis://localhost/1"),
            ("redis://localhost:6379", "redis://localhost:6380"),
            ("redis://cache", "redis://localhost"),
            ("redis://[::1]", "redis://127.0.0.1"),
            ("unix:///run/redis.sock", "redis://"),
            ("unix:///run/redis.sock", "unix:///run/other.sock"),
            ("amqp://localhost", "redis://localhost"),
            ("amqp://localhost", "amqp://localhost"),
            ("sentinel://localhost", "sentinel://localhost"),
            ("redis://a;redis://b", "redis://a;redis://b"),
            ("redis://cache/x", "redis://cache/x"),
        ],
    )
    def test_what_differs_or_cannot_be_used_is_not(self, one: str, other: str) -> None:
        assert same_server(one, other) is False
        assert same_server(other, one) is False


class TestLive:
    """A private server that listens on a socket and, if it can, with TLS."""

    @pytest.fixture
    def serve(self, tmp_path: Path) -> Iterator[Callable[..., None]]:
        try:
            binary = find_redis_binary()
        except SettingsError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        servers: list[subprocess.Popen[bytes]] = []

        def start(*options: str) -> None:
            command = [binary, "--port", "0", "--dir", str(tmp_path), "--save", "", *options]
            servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT))

        yield start
        for server in servers:
            server.send_signal(signal.SIGKILL)
            server.wait()

    @staticmethod
    def wait_until_up(client: redis.Redis) -> None:
        deadline = time.monotonic() + 15
        while True:
            try:
                assert client.ping() is True
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)
            else:
                return

    @pytest.fixture
    def short_folder(self) -> Iterator[Path]:
        """A socket's path may have about 100 characters, and pytest's folders take most of them on some systems."""
        with tempfile.TemporaryDirectory(prefix="sh", dir="/tmp") as folder:
            yield Path(folder)

    def test_all_spellings_of_a_socket_reach_its_database(self, serve: Callable[..., None], short_folder: Path) -> None:
        path = short_folder / "my redis@home.sock"
        quoted = str(path).replace(" ", "%20").replace("@", "%40")
        serve("--unixsocket", str(path), "--requirepass", "p@ss:word")
        login = "p%40ss%3Aword"
        urls = [
            f"unix://:{login}@{quoted}?db=3",
            f"unix://default:{login}@{quoted}?db=3",
            f"unix://{quoted}?db=3&password={login}",
            f"redis+socket://:{login}@{quoted}?virtual_host=3",
            f"socket://:{login}@{quoted}?virtual_host=/3",
        ]
        self.wait_until_up(make_client(urls[0], timeout=5))

        for number, url in enumerate(urls, start=1):
            with make_client(url, timeout=5) as client:
                assert client.incr("visits") == number
                assert client.client_getname() in {"selfheal", b"selfheal"}

        with make_client(f"unix://:{login}@{quoted}?db=2", timeout=5) as other:
            assert other.get("visits") is None
        with make_client(f"unix://{quoted}?db=3", timeout=5) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("visits")

    def test_a_certificate_is_checked_unless_the_url_says_otherwise(
        self, serve: Callable[..., None], tmp_path: Path
    ) -> None:
        for needed in ("ldd", "openssl"):
            if shutil.which(needed) is None:
                pytest.skip(f"needs {needed}")
        libraries = subprocess.run(["ldd", find_redis_binary()], capture_output=True, text=True, check=False).stdout
        if "libssl" not in libraries:
            pytest.skip("needs a server built with TLS")
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        request += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        subprocess.run([*request, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve(
            "--tls-port",
            str(port),
            "--tls-cert-file",
            str(cert),
            "--tls-key-file",
            str(key),
            "--tls-auth-clients",
            "no",
        )
        trusting = f"rediss://localhost:{port}/1?ssl_cert_reqs=required&ssl_ca_certs={cert}"
        self.wait_until_up(make_client(trusting, timeout=5))

        for url in (
            trusting,
            f"rediss://localhost:{port}/1?ssl_cert_reqs=CERT_NONE",
            f"{trusting}&ssl_check_hostname=yes",
        ):
            assert make_client(url, timeout=5).ping() is True
        beside = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(cert)}
        assert make_client(f"redis://localhost:{port}/1", ssl=beside, timeout=5).ping() is True

        for url in (f"rediss://localhost:{port}/1", f"rediss://127.0.0.1:{port}/1?ssl_ca_certs={cert}"):
            with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                make_client(url, timeout=5).ping()
