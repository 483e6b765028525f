"""The short way to Redis is as safe as redis-py's own: whatever happens, an answer is the caller's own or an error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_selfheal.errors import StoreError
from celery_selfheal.leases import scripts
from celery_selfheal.leases.scripts import Script
from celery_selfheal.redis_url import make_client
from celery_selfheal.redis_wire import command, new_connection, packed, wire_of
from celery_selfheal.testing import RedisServer, TcpProxy

ADDRESS = "redis://test"
SECONDS = 5.0
SHORT_SECONDS = 0.3


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that tell what became of them, in place of those in the package."""
    texts = {
        "echo": "return {ARGV[1], KEYS[1]}",
        "count": "return redis.call('INCR', KEYS[1])",
        "fail": "return redis.error_reply(ARGV[1])",
    }
    monkeypatch.setattr(scripts, "source", lambda _, name: texts[name])


def a_script(client: redis.Redis, name: str = "echo") -> Script:
    return Script(client, "", name, address=ADDRESS)


def a_client(port: int, *, timeout: float = SECONDS, **options: Any) -> redis.Redis:
    return make_client(f"redis://127.0.0.1:{port}/0", timeout=timeout, **options)


@pytest.fixture
def proxy(server: RedisServer, client: redis.Redis) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", server.port) as running:
        yield running


def test_every_kind_of_word_arrives_as_it_is(client: redis.Redis) -> None:
    echo = a_script(client)

    for sent, came in [
        ("naïve 任务", "naïve 任务".encode()),
        ("", b""),
        (-7, b"-7"),
        (0.5, b"0.5"),
        (b"\x00\r\n\xff$3\r\n", b"\x00\r\n\xff$3\r\n"),
        (os.urandom(8 << 20), ...),
    ]:
        assert echo(["key"], [sent]) == [sent if came is ... else came, b"key"]


def test_parts_packed_long_ago_make_the_same_command(client: redis.Redis) -> None:
    echo = a_script(client)

    assert echo.send(5, packed([1, "key"]), packed(["word"])) == echo(["key"], ["word"]) == [b"word", b"key"]


def test_all_scripts_of_a_client_share_its_connection(server: RedisServer, client: redis.Redis) -> None:
    mine = a_client(server.port, client_name="shared")
    for name in ("echo", "count", "echo"):
        a_script(mine, name)(["key"], ["word"])

    assert names_of_connections(client).count("shared") == 1


def test_call_whose_reply_was_lost_is_made_once_more(proxy: TcpProxy) -> None:
    count = a_script(a_client(proxy.port), "count")
    assert count(["n"], []) == 1

    proxy.drop_reply()

    assert count(["n"], []) == 3
    assert proxy.replies_dropped == 1


def test_no_answer_twice_is_said_and_the_next_call_is_a_new_one(proxy: TcpProxy) -> None:
    echo = a_script(a_client(proxy.port))
    echo(["key"], ["word"])

    proxy.refuse()
    proxy.cut()
    with pytest.raises(StoreError, match=r"redis://test.*echo"):
        echo(["key"], ["lost"])
    proxy.refuse(False)

    assert echo(["key"], ["found"]) == [b"found", b"key"]


def test_answer_that_comes_too_late_is_nobodys(proxy: TcpProxy) -> None:
    """Else the next call would take it for its own."""
    echo = a_script(a_client(proxy.port, timeout=SHORT_SECONDS))
    echo(["key"], ["early"])

    proxy.half_open()
    with pytest.raises(StoreError, match=r"(?i)time"):
        echo(["key"], ["late"])
    proxy.half_open(False)

    for n in range(20):
        assert echo(["key"], [n]) == [b"%d" % n, b"key"]


def test_exception_of_a_signal_leaves_no_answer_behind(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft time limit may come at any instant, also between two lines of redis-py, and the child lives on."""

    class Limit(BaseException):
        pass

    def interrupted(*args: object, **options: object) -> None:
        raise Limit

    echo = a_script(client)
    echo(["key"], ["before"])
    with monkeypatch.context() as patch:
        patch.setattr(redis.Connection, "read_response", interrupted)
        with pytest.raises(Limit):
            echo(["key"], ["unread"])

    assert echo(["key"], ["after"]) == [b"after", b"key"]


def test_script_that_the_server_has_forgotten_is_loaded_anew(client: redis.Redis) -> None:
    count = a_script(client, "count")
    count(["n"], [])
    client.script_flush()

    assert count(["n"], []) == 2


def test_server_that_was_restarted_is_found_at_the_first_call() -> None:
    with RedisServer() as own:
        count = a_script(a_client(own.port), "count")
        count(["n"], [])
        own.restart()

        assert count(["n"], []) == 1


def test_server_that_is_away_is_no_answer_however_often_it_is_asked() -> None:
    """A connection that counted against a limit would make a long outage last for ever."""
    with RedisServer() as own:
        client = a_client(own.port, max_connections=5)
        echo = a_script(client)
        own.kill()
        for _ in range(20):
            with pytest.raises(StoreError):
                echo(["key"], ["word"])
        own.restart()

        assert echo(["key"], ["word"]) == [b"word", b"key"]


def test_forked_child_has_a_connection_of_its_own(server: RedisServer) -> None:
    wire = wire_of(a_client(server.port))
    client_id = command(2, packed(["CLIENT", "ID"]))
    mine = wire.call(client_id)

    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, b"%d" % wire.call(client_id))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    assert int(os.read(reader, 100)) != mine
    assert wire.call(client_id) == mine, "the child's end must not close what is the parent's"


def test_threads_at_once_get_their_own_answers(server: RedisServer, client: redis.Redis) -> None:
    echo = a_script(a_client(server.port, client_name="threads"))
    threads = 8
    together = threading.Barrier(threads)

    def work(thread: int) -> bool:
        together.wait()
        return all(echo([f"k{thread}"], [n]) == [b"%d" % n, b"k%d" % thread] for n in range(200))

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))
    assert names_of_connections(client).count("threads") <= threads


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
from celery_selfheal.redis_url import make_client
from celery_selfheal.redis_wire import command, new_connection, packed, wire_of

client = make_client(sys.argv[1], timeout=5.0, client_name="greenlets")
wire = wire_of(client)

def work(number):
    return all(
        wire.call(command(2, packed(["ECHO", f"{number}-{n}"]))).decode() == f"{number}-{n}" for n in range(100)
    )

for _ in range(3):
    # As Celery's pool does: a new greenlet for each task.
    jobs = [gevent.spawn(work, number) for number in range(10)]
    gevent.joinall(jobs, raise_error=True)
    assert all(job.value for job in jobs)
names = [one["name"] for one in client.client_list()]
print(names.count("greenlets"))
"""


def test_greenlets_get_their_own_answers_and_leave_their_connections_to_others(server: RedisServer) -> None:
    pytest.importorskip("gevent")
    answer = subprocess.run(
        [sys.executable, "-c", GREENLETS, f"redis://127.0.0.1:{server.port}/0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) <= 11  # and the one that asks


def test_wrong_password_is_an_error_without_the_password() -> None:
    with RedisServer(config={"requirepass": "right"}) as own:
        echo = a_script(make_client(f"redis://:wrong@127.0.0.1:{own.port}/0", timeout=SECONDS))

        with pytest.raises(StoreError) as caught:
            echo(["key"], ["word"])

        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
        assert a_script(own.client())(["key"], ["word"]) == [b"word", b"key"]


def test_login_that_is_renewed_is_used_after_a_refusal(client: redis.Redis) -> None:
    """As with providers of short-lived tokens: the server forgets the old one, and the next call logs in anew."""
    admin: Any = client

    class Provider:
        token = "first"

        def get_credentials(self) -> tuple[str, str]:
            return "guest", self.token

    provider = Provider()
    admin.acl_setuser("guest", enabled=True, passwords=["+first"], keys=["*"], commands=["+@all"])
    try:
        port = admin.connection_pool.connection_kwargs["port"]
        echo = a_script(a_client(port, credential_provider=provider))
        echo(["key"], ["word"])
        admin.acl_setuser("guest", enabled=True, reset=True, passwords=["+second"], keys=["*"], commands=["+@all"])
        admin.client_kill_filter(_type="normal", user="guest")
        with pytest.raises(StoreError):
            echo(["key"], ["word"])
        provider.token = "second"

        assert echo(["key"], ["word"]) == [b"word", b"key"]
    finally:
        admin.acl_deluser("guest")


@pytest.mark.parametrize(
    "refusal",
    [
        "MOVED 3999 127.0.0.1:6381",
        "READONLY You can't write against a read only replica.",
        "LOADING Redis is loading the dataset in memory",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "NOAUTH Authentication required.",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "BUSY Redis is busy running a script.",
        "ERR max number of clients reached",
        "NOSCRIPT No matching script.",
    ],
)
def test_refusal_is_said_as_a_store_error(refusal: str) -> None:
    with refusing_server(refusal) as port:
        echo = a_script(make_client(f"redis://127.0.0.1:{port}/0?protocol=2", timeout=SECONDS))

        with pytest.raises(StoreError, match="echo"):
            echo(["key"], ["word"])


def test_script_that_fails_is_said_and_the_next_call_is_answered(client: redis.Redis) -> None:
    with pytest.raises(StoreError, match=r"fail: .*no such luck"):
        a_script(client, "fail")(["key"], ["ERR no such luck"])

    assert a_script(client)(["key"], ["word"]) == [b"word", b"key"]


def test_unix_socket_and_database_are_those_of_the_client(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with RedisServer(config={"unixsocket": str(path)}) as own:
        count = a_script(make_client(f"unix://{path}?db=3", timeout=SECONDS), "count")

        count(["n"], [])

        assert own.client(3).get("n") == b"1"


def names_of_connections(client: redis.Redis) -> list[str]:
    server: Any = client
    return [one["name"] for one in server.client_list()]


@contextmanager
def refusing_server(refusal: str) -> Iterator[int]:
    """A server that lets anybody in and refuses every script."""

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while header := stream.readline():
                words = []
                for _ in range(int(header[1:])):
                    length = int(stream.readline()[1:])
                    words.append(stream.read(length + 2)[:-2])
                answer = f"-{refusal}" if words[0] == b"EVALSHA" else "+OK"
                connection.sendall(f"{answer}\r\n".encode())

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[connection], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_connections_that_are_given_up_count_against_no_limit(server: RedisServer) -> None:
    """An idle worker's waiter connects anew after each break, for months."""
    pool: Any = a_client(server.port, max_connections=2).connection_pool

    for _ in range(5):
        connection = new_connection(pool)
        connection.send_command("PING")
        assert connection.read_response() in (b"PONG", "PONG")
        connection.disconnect()
