"""An app of its own for each test, on any broker: its workers, its diary, its queues and its dead letters."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from celery import _state
from kombu import Queue

from celery_selfheal import DeadLetterQueue
from celery_selfheal.dead_letter import DEATH_HEADER, Death
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.publisher import Outgoing
from celery_selfheal.testing import RedisServer, TcpProxy, WorkerProcess

KINDS = ("redis", "classic", "quorum")
APPS = Path(__file__).parent / "apps"
PATIENCE_SECONDS = 60.0  # of a machine that does much else; no promise


class Desk:
    """Starts workers of ``apps/orders.py`` and looks after what they leave.

    Args:
        kind: ``redis``, ``classic`` or ``quorum``.
        broker: URL.
        name: Of the app, and so of its queues: nothing is shared with another test.
    """

    def __init__(self, kind: str, broker: str, leases: RedisServer, folder: Path, *, name: str) -> None:
        self.kind = kind
        self.folder = folder
        self.name = name
        self.queue = f"{name}-queue"
        self.dlq_name = f"{name}.dlq"
        self.diary = folder / "diary.jsonl"
        self.diary.touch()
        self.gate = folder / "gate"
        self.settings: dict[str, Any] = {
            "selfheal_redis_url": leases.url(2),
            "task_default_queue": self.queue,
            "task_default_queue_type": "quorum" if kind == "quorum" else "classic",
            # Celery's messages with an ETA need it on quorum queues.
            "task_default_exchange_type": "topic" if kind == "quorum" else "direct",
            "selfheal_reaper_interval": 0.3,
            "broker_connection_retry_on_startup": True,
        }
        self.workers: list[WorkerProcess] = []
        self.redis = leases.client(0)
        self.results = leases.client(1)
        self.leases = leases.client(2)
        self._broker = broker
        self._results_url = leases.url(1)
        self._app_before = _state._tls.current_app
        self._orders: ModuleType | None = None

    @property
    def orders(self) -> Any:
        """The app's module in this process, loaded with the settings at first use."""
        if self._orders is None:
            with mock.patch.dict(os.environ, self._env()):
                spec = importlib.util.spec_from_file_location("orders", APPS / "orders.py")
                assert spec is not None
                assert spec.loader is not None
                self._orders = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(self._orders)
        return self._orders

    @property
    def broker_port(self) -> int:
        return int(re.findall(r":(\d+)/", self._broker)[0])

    @property
    def dlq(self) -> DeadLetterQueue:
        return DeadLetterQueue(self.orders.app)

    def start(
        self, name: str = "w", *, ready: bool = True, die_at: str = "", via: TcpProxy | None = None, **options: Any
    ) -> WorkerProcess:
        """Start a worker; ``via`` is its only way to the broker."""
        worker = WorkerProcess(
            "orders",
            cwd=self.folder,
            log=self.folder / f"{name}.log",
            name=name,
            env=self._env(die_at=die_at, via=via),
            **options,
        )
        self.workers.append(worker)
        worker.start()
        if ready:
            worker.wait_ready(timeout=PATIENCE_SECONDS)
        return worker

    def cli(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``celery selfheal dlq ...``."""
        return subprocess.run(
            self.cli_command(*args),
            cwd=self.folder,
            env={**os.environ, **self._env()},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
            **options,
        )

    def start_cli(self, *args: str) -> subprocess.Popen[bytes]:
        """The same, to be stopped half-way. All that it prints goes to ``cli.log``."""
        # To a file: its thousands of lines would fill a pipe that nobody reads.
        with (self.folder / "cli.log").open("wb") as log:
            return subprocess.Popen(
                self.cli_command(*args),
                cwd=self.folder,
                env={**os.environ, **self._env()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def cli_command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "celery", "-A", "orders", "selfheal", "dlq", *args]

    def wait(self, what: str, condition: Callable[[], object], *, patience: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
            time.sleep(0.05)

    def wait_dead(self, count: int) -> None:
        self.wait(f"{count} dead letters", lambda: len(self.dlq) >= count)

    def events(self, event: str = "start") -> Counter[str]:
        """How often each task id noted it."""
        entries = [json.loads(line) for line in self.diary.read_text().splitlines()]
        return Counter(entry["id"] for entry in entries if entry["event"] == event)

    def deliveries(self, queue: str) -> list[dict[str, Any]]:
        """What waits in a queue, oldest first, as kombu's envelopes; it stays there."""
        if self.kind == "redis":
            lists = [key for key in self.redis.scan_iter(f"{queue}*") if self.redis.type(key) == b"list"]
            return [json.loads(raw) for key in sorted(lists) for raw in reversed(self.redis.lrange(key, 0, -1))]
        found = []
        with self.orders.app.connection_for_read() as connection, connection.channel() as channel:
            while (message := Queue(queue, channel=channel).get()) is not None:
                found.append({"body": message.body, "headers": message.headers, "properties": message.properties})
        return found

    def publish(self, body: bytes, *, headers: Mapping[str, Any], content_type: str, content_encoding: str) -> None:
        """Send whatever anybody could send."""
        with self.orders.app.producer_or_acquire() as producer:
            producer.publish(
                body,
                routing_key=self.queue,
                exchange=self.queue if self.kind == "quorum" else "",
                declare=[self.orders.app.amqp.queues[self.queue]],
                headers=dict(headers),
                content_type=content_type,
                content_encoding=content_encoding,
            )

    def bury(self, count: int, *, task: str = "orders.ship", replays: int = 0) -> list[str]:
        """Fill the dead letter queue as workers would, without having them run; returns the ids."""
        ids = [f"dead-{n}" for n in range(count)]
        for first in range(0, count, 500):
            deaths = [self._death(task_id, task, replays) for task_id in ids[first : first + 500]]
            if self.kind == "redis":
                self.redis.lpush(self.dlq_name, *map(self._entry, deaths))
            else:
                publisher = plugin_of(self.orders.app).publisher
                with publisher.producer() as producer:
                    publisher._declare(producer, self.dlq_name)
                assert all(publisher.send_all(list(map(self._copy, deaths))))
        return ids

    def _death(self, task_id: str, task: str, replays: int) -> Death:
        return Death(
            id=task_id,
            task=task,
            reason="exhausted",
            exception="ConnectionError",
            died_at="2026-01-01T00:00:00+00:00",
            queue=self.queue,
            exchange=self.queue if self.kind == "quorum" else "",
            routing_key=self.queue,
            replays=replays,
        )

    def _headers(self, death: Death) -> dict[str, Any]:
        return {"id": death.id, "task": death.task, "lang": "py", "retries": 5, DEATH_HEADER: death.header()}

    def _body(self, death: Death) -> bytes:
        return json.dumps([[death.id], {}, {}]).encode()

    def _entry(self, death: Death) -> str:
        properties = {
            "correlation_id": death.id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": self.queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": death.id,
        }
        return json.dumps(
            {
                "body": base64.b64encode(self._body(death)).decode(),
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "headers": self._headers(death),
                "properties": properties,
            }
        )

    def _copy(self, death: Death) -> Outgoing:
        return Outgoing(
            body=self._body(death),
            content_type="application/json",
            content_encoding="utf-8",
            headers=self._headers(death),
            properties={"correlation_id": death.id, "delivery_mode": 2},
            exchange="",
            routing_key=self.dlq_name,
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(grace=0)
        if self._orders is not None:
            if self.kind != "redis":
                with self.orders.app.connection_for_write() as connection, connection.channel() as channel:
                    for queue in (self.queue, self.dlq_name):
                        channel.queue_delete(queue)
            self.orders.app.close()
        _state._set_current_app(self._app_before)
        for client in (self.redis, self.results, self.leases):
            client.flushdb()
            client.close()

    def _env(self, *, die_at: str = "", via: TcpProxy | None = None) -> Mapping[str, str]:
        return {
            "ORDERS_NAME": self.name,
            "ORDERS_BROKER": re.sub(r":\d+/", f":{via.port}/", self._broker) if via else self._broker,
            "ORDERS_RESULTS": self._results_url,
            "ORDERS_SETTINGS": json.dumps(self.settings),
            "ORDERS_DIARY": str(self.diary),
            "ORDERS_DIE_AT": die_at,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APPS), os.environ.get("PYTHONPATH")])),
        }
