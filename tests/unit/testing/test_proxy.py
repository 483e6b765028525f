"""The proxy does to a connection what networks do, and to no other one."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_selfheal.testing import RedisServer, TcpProxy, processes, servers


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def direct(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TcpProxy, direct: redis.Redis) -> Iterator[redis.Redis]:
    """A client that is connected through the proxy and repeats nothing."""
    with _connect(proxy) as client:
        client.set("runs", 0)
        yield client


def test_proxy_forwards_both_ways_whatever_the_size(client: redis.Redis, direct: redis.Redis) -> None:
    value = bytes(range(256)) * 20_000

    client.set("large", value)

    assert direct.get("large") == value
    assert client.get("large") == value


def test_connections_are_counted_while_they_are_open(proxy: TcpProxy, client: redis.Redis) -> None:
    assert proxy.connections == 1

    client.close()

    assert processes.wait_until(lambda: proxy.connections == 0, seconds=5)


def test_end_of_one_direction_is_passed_on_and_the_other_goes_on() -> None:
    with _listen() as target, _proxy_to(target) as proxy, _dial(proxy) as near:
        with _accept(target) as far:
            near.sendall(b"question")
            near.shutdown(socket.SHUT_WR)
            assert _read_all(far) == b"question"
            far.sendall(b"answer")
        assert _read_all(near) == b"answer"


def test_cut_resets_both_ends_of_open_connections_only() -> None:
    with _listen() as target, _proxy_to(target) as proxy:
        with _dial(proxy) as near, _accept(target) as far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"

            proxy.cut()

            assert proxy.connections == 0
            for end in (near, far):
                with pytest.raises(ConnectionResetError):
                    end.recv(1)
        with _dial(proxy) as near, _accept(target) as far:
            near.sendall(b"y")
            assert far.recv(1) == b"y"


def test_reset_by_one_end_is_passed_on_to_the_other() -> None:
    with _listen() as target, _proxy_to(target) as proxy, _dial(proxy) as near, _accept(target) as far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()

        with pytest.raises(ConnectionResetError):
            far.recv(1)
        assert processes.wait_until(lambda: proxy.connections == 0, seconds=5)


def test_refused_connections_are_reset_and_open_ones_live_on(proxy: TcpProxy, client: redis.Redis) -> None:
    proxy.refuse()

    # The reset may come before the connect has returned.
    with pytest.raises(ConnectionResetError), _dial(proxy) as refused:
        refused.recv(1)
    with pytest.raises(redis.ConnectionError):
        _connect(proxy).ping()
    assert client.ping()

    proxy.refuse(False)
    assert _connect(proxy).ping()


def test_server_that_is_down_resets_connections_until_it_is_back() -> None:
    with RedisServer() as server, TcpProxy("127.0.0.1", server.port) as proxy:
        client = _connect(proxy)
        client.ping()
        server.kill()

        with pytest.raises(redis.ConnectionError):
            client.ping()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart()

        assert client.ping()


def test_delay_holds_each_direction_back_until_it_ends(proxy: TcpProxy, client: redis.Redis) -> None:
    proxy.delay(0.5)
    begin = time.monotonic()
    client.ping()
    delayed = time.monotonic() - begin

    proxy.delay(0)
    begin = time.monotonic()
    client.ping()
    prompt = time.monotonic() - begin

    assert delayed >= 1.0
    assert prompt < 0.5


def test_lost_reply_is_one_whose_command_was_done(proxy: TcpProxy, client: redis.Redis, direct: redis.Redis) -> None:
    proxy.drop_reply()
    assert proxy.replies_dropped == 0

    with pytest.raises(redis.ConnectionError):
        client.incr("runs")

    assert direct.get("runs") == b"1"
    assert proxy.replies_dropped == 1
    assert client.incr("runs") == 2


def test_lost_reply_is_the_nth_from_now_on(proxy: TcpProxy, client: redis.Redis, direct: redis.Redis) -> None:
    client.incr("runs")
    proxy.drop_reply(3)

    assert client.incr("runs") == 2
    assert client.incr("runs") == 3
    with pytest.raises(redis.ConnectionError):
        client.incr("runs")

    assert direct.get("runs") == b"4"


def test_lost_reply_can_be_that_to_certain_requests(proxy: TcpProxy, client: redis.Redis, direct: redis.Redis) -> None:
    """The other connections of a worker ask for things, too, and at times that no test knows."""
    other = _connect(proxy)
    proxy.drop_reply(2, request=b"INCR")

    for _ in range(3):
        assert other.ping()
    assert client.incr("runs") == 1
    assert client.ping()
    with pytest.raises(redis.ConnectionError):
        client.incr("runs")
    assert other.ping()

    assert direct.get("runs") == b"2"
    assert proxy.replies_dropped == 1


def test_half_open_connection_stays_and_is_silent_until_what_was_sent_arrives(
    proxy: TcpProxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.half_open()
    with pytest.raises(redis.TimeoutError):
        client.incr("runs")
    with _dial(proxy) as silent:
        silent.settimeout(0.2)
        silent.sendall(b"PING\r\n")
        with pytest.raises(socket.timeout):
            silent.recv(100)
        assert direct.get("runs") == b"0"

        proxy.half_open(False)

        silent.settimeout(5)
        assert silent.recv(100) == b"+PONG\r\n"
    assert processes.wait_until(lambda: direct.get("runs") == b"1", seconds=5)


def test_half_open_connection_can_be_cut(proxy: TcpProxy) -> None:
    with _dial(proxy) as near:
        assert processes.wait_until(lambda: proxy.connections == 1, seconds=5)
        proxy.half_open()
        near.sendall(b"PING\r\n")
        time.sleep(0.1)

        proxy.cut()

        with pytest.raises(ConnectionResetError):
            near.recv(1)
    assert proxy.connections == 0


def test_stopped_proxy_cuts_its_connections_and_listens_no_more(server: RedisServer) -> None:
    threads = threading.active_count()
    proxy = TcpProxy("127.0.0.1", server.port).start()
    proxy.half_open()
    with _dial(proxy) as near:
        assert processes.wait_until(lambda: proxy.connections == 1, seconds=5)
        near.sendall(b"PING\r\n")

        proxy.stop()
        proxy.stop()

        with pytest.raises(ConnectionResetError):
            near.recv(1)
    with pytest.raises(ConnectionRefusedError):
        _dial(proxy)
    assert threading.active_count() == threads


def test_stopping_a_proxy_that_never_started_is_fine() -> None:
    TcpProxy("127.0.0.1", servers.free_port()).stop()


def _listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _accept(target: socket.socket) -> socket.socket:
    target.settimeout(5)
    end, _ = target.accept()
    end.settimeout(5)
    return end


def _proxy_to(target: socket.socket) -> TcpProxy:
    return TcpProxy("127.0.0.1", target.getsockname()[1])


def _dial(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def _connect(proxy: TcpProxy) -> redis.Redis:
    return redis.Redis(port=proxy.port, socket_timeout=1.5, retry=Retry(NoBackoff(), 0))


def _read_all(end: socket.socket) -> bytes:
    text = b""
    while chunk := end.recv(100):
        text += chunk
    return text
