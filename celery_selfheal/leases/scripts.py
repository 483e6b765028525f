"""Lua scripts as they lie in the package, and the one border at which Redis' errors become ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError, RedisError

from celery_selfheal.errors import StoreError
from celery_selfheal.redis_wire import Word, command, packed, wire_of

__all__ = ("NoScriptError", "RedisError", "Script", "ScriptArgument", "answering", "source", "text")

ScriptArgument = Word


def source(package: str, name: str) -> str:
    """Text of ``<name>.lua`` in ``package``."""
    return resources.files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")


@contextmanager
def answering(address: str, step: str) -> Iterator[None]:
    """Turn "Redis did not answer" into ``StoreError``.

    Args:
        address: Which server, without a password.
        step: What was asked of it.
    """
    try:
        yield
    except RedisError as exc:
        raise StoreError(address, f"{step}: {exc}") from exc


class Script:
    """One Lua script on one client: ``EVALSHA``, and ``SCRIPT LOAD`` where the server has forgotten it."""

    def __init__(self, client: redis.Redis, package: str, name: str, *, address: str) -> None:
        self._client = client
        self._wire = wire_of(client)
        self._source = source(package, name)
        self._for_pipelines = client.register_script(self._source)
        self._begin = packed(["EVALSHA", self.sha])
        self._name = name
        self._address = address

    def __call__(self, keys: Sequence[str], arguments: Sequence[ScriptArgument]) -> Any:
        """Run it. May run twice where an answer is lost.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        words = packed([len(keys), *keys, *arguments])
        return self.send(3 + len(keys) + len(arguments), words)

    def send(self, count: int, *words: bytes) -> Any:
        """Run it with keys and arguments that are packed.

        Args:
            count: Words of the command: ``EVALSHA``, its digest, the number of keys, and what ``words`` hold.
            words: From the number of keys on.

        Raises:
            StoreError: as a call.
        """
        data = command(count, self._begin, *words)
        try:
            try:
                return self._wire.call(data)
            except NoScriptError:
                self._wire.call(command(3, packed(["SCRIPT", "LOAD", self._source])))
                return self._wire.call(data)
        except RedisError as exc:
            raise StoreError(self._address, f"{self._name}: {exc}") from exc

    def each(
        self, calls: Sequence[tuple[Sequence[str], Sequence[ScriptArgument]]], *, unseen: bool = False
    ) -> list[Any]:
        """Run it once for each pair of keys and arguments, each by itself, in one round trip.

        Args:
            unseen: Nobody sees a part of them done.

        Raises:
            StoreError: Redis did not answer, or refused one of them; each of the others has run or not.
        """
        with answering(self._address, self._name), self._client.pipeline(transaction=unseen) as pipe:
            for keys, arguments in calls:
                self._for_pipelines(keys=list(keys), args=list(arguments), client=pipe)
            return list(pipe.execute())

    @property
    def sha(self) -> str:
        """Digest under which the server knows it."""
        return str(self._for_pipelines.sha)


def text(value: bytes | str) -> str:
    """Redis' bytes as text; never fails, since it is for names and states only."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
