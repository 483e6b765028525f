"""Every script may run twice: the client repeats a call whose reply was lost. And no key of ours stays for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import resources
from typing import Any

import pytest
import redis

from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import Acquired, OverBudget, Renewal, Start
from celery_selfheal.leases.progress import Progress, RedisProgress
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.redis_url import make_client
from celery_selfheal.sessions.port import Delivery, Peer, Session, Standing
from celery_selfheal.sessions.redis import RedisDeliveryStore, RedisSessionStore
from celery_selfheal.testing import RedisServer, TcpProxy
from celery_selfheal.witness import ProcessIdentity
from contract.benches import (
    ADDRESS,
    BUDGET,
    DONE_TTL,
    MAX_STALLS,
    TTL,
    UNACKED,
    Broker,
    RedisBench,
    a_start,
    a_tag,
    everything,
    time_passes,
)

W1, W2, W3 = (
    Session(name=name, node=f"celery@{name}", identity=ProcessIdentity(host="h1", pid=1, started="7"))
    for name in ("w1", "w2", "w3")
)


class Stage:
    """One server with two workers' sessions, and all stores on it."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client: Any = client
        self.keys = keys
        self.bench = RedisBench(client, budget=BUDGET)
        self.leases = self.bench.store
        self.sessions = RedisSessionStore(client, keys, ttl=TTL, address=ADDRESS, unacked=UNACKED)
        self.deliveries = RedisDeliveryStore(client, keys, unacked=UNACKED, address=ADDRESS)
        self.broker = Broker(client)
        for session in (W1, W2):
            self.sessions.beat(session, join=True)

    def started(self, task_id: str = "t1", **options: Any) -> Start:
        """A start that holds its lease and its delivery."""
        self.broker.publish(b"{}")
        session = options.get("session", "w1")
        start = a_start(task_id, tag=self.broker.take(session=session), **options)
        assert isinstance(self.leases.acquire(start), Acquired)
        return start

    def stalled(self, task_id: str = "t1", **options: Any) -> Start:
        start = self.started(task_id, **options)
        self.bench.run_out(task_id)
        return start

    def ended(self, start: Start, **options: Any) -> bool:
        how = {"ended": True, "marker": True, "state": "success", "acknowledge": True, **options}
        return self.leases.release(start, **how)

    def owned(self, session: str = "w1") -> Delivery:
        self.broker.publish(b"{}")
        self.broker.take(session=session)
        return self.deliveries.owned(session)[-1]


@pytest.fixture
def stage(client: redis.Redis, keys: Keys) -> Stage:
    return Stage(client, keys)


Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A call that is made twice.

    Attributes:
        script: The script under test.
        prepare: Brings the stage about, and returns the call.
    """

    script: str
    prepare: Callable[[Stage], Step]


def _acquire(start: Callable[[Stage], Start]) -> Callable[[Stage], Step]:
    def prepare(stage: Stage) -> Step:
        begun = start(stage)
        return lambda: stage.leases.acquire(begun)

    return prepare


def _received(stage: Stage, **options: Any) -> Start:
    stage.broker.publish(b"{}")
    return a_start(tag=stage.broker.take(), **options)


def _overtakes(stage: Stage) -> Start:
    stage.stalled(session="w2")
    return _received(stage)


def _stalled_too_often(stage: Stage) -> Start:
    for _ in range(MAX_STALLS + 1):
        stage.stalled(session="w2")
    return _received(stage)


def _busy(stage: Stage) -> Start:
    stage.started(session="w2")
    return _received(stage)


def _done(stage: Stage) -> Start:
    stage.ended(stage.started(session="w2"))
    return _received(stage)


def _not_mine(stage: Stage) -> Start:
    return a_start(tag=a_tag())


def _over_budget(stage: Stage) -> Start:
    for n in range(7):
        stage.leases.acquire(a_start(f"u{n}", turn="retry"))
    return _received(stage, turn="retry")


def _release(**how: Any) -> Callable[[Stage], Step]:
    def prepare(stage: Stage) -> Step:
        start = stage.started()
        return lambda: stage.ended(start, **how)

    return prepare


def _release_late(stage: Stage) -> Step:
    late = stage.stalled()
    stage.started(session="w2")
    return lambda: stage.ended(late)


def _release_run_out(stage: Stage) -> Step:
    start = stage.stalled()
    return lambda: stage.ended(start)


def _abandon(stage: Stage) -> Step:
    start = stage.started()
    return lambda: stage.leases.abandon(start)


def _abandon_unborn(stage: Stage) -> Step:
    start = _received(stage)
    return lambda: stage.leases.abandon(start)


def _abandon_ended(stage: Stage) -> Step:
    start = stage.started()
    stage.ended(start)
    return lambda: stage.leases.abandon(start)


def _expire(session: str | None) -> Callable[[Stage], Step]:
    def prepare(stage: Stage) -> Step:
        stage.started("t2", session="w2")
        stage.stalled()
        stage.sessions.leave(W1)
        seen = [("t1", stage.client.hget(stage.keys.inflight, "t1"))]
        return lambda: list(stage.leases._expire_each(session, seen, now_ms=0))

    return prepare


def _progress(*, ended: bool) -> Callable[[Stage], Step]:
    def prepare(stage: Stage) -> Step:
        start = stage.started()
        if ended:
            stage.ended(start)
        kept = RedisProgress(stage.client, stage.keys, address=ADDRESS)
        return lambda: kept.save([Progress(task_id=start.task_id, token=start.token, text=b'"half"')])

    return prepare


def _beat(session: Session = W1, *, join: bool = False, pause: timedelta = timedelta(0)) -> Callable[[Stage], Step]:
    def prepare(stage: Stage) -> Step:
        held, unborn, run_out, lost = stage.started("t1"), _received(stage), stage.stalled("t3"), stage.stalled("t4")
        stage.started("t4", session="w2")
        stage.owned()
        if pause:
            time_passes(stage.client, pause)
        starts = [held, unborn, run_out, lost]
        tags = [str(start.tag) for start in starts]
        return lambda: stage.sessions.beat(session, join=join, starts=starts, tags=tags)

    return prepare


def _renew(stage: Stage) -> Step:
    starts = [stage.started("t1"), stage.stalled("t2")]
    return lambda: stage.leases.renew(starts)


def _census(session: Session | None) -> Callable[[Stage], Step]:
    return lambda stage: lambda: stage.sessions.census(session=session, lead_ms=60_000, limit=9)


def _condemn(stage: Stage) -> Step:
    peer = Peer(name=W1.name, about=W1.about())
    return lambda: stage.sessions.condemn(peer)


def _bury(stage: Stage) -> Step:
    stage.sessions.leave(W1)
    return lambda: stage.sessions.bury(W1.name, host=W1.host)


def _bury_owner(stage: Stage) -> Step:
    stage.owned()
    stage.sessions.leave(W1)
    return lambda: stage.sessions.bury(W1.name, host=W1.host)


def _leave(stage: Stage) -> Step:
    stage.owned()
    return lambda: stage.sessions.leave(W1)


def _settle(*, dead: bool, front: bool) -> Callable[[Stage], Step]:
    def prepare(stage: Stage) -> Step:
        delivery = stage.owned()
        if dead:
            stage.sessions.leave(W1)
        return lambda: stage.deliveries.settle(delivery, session="w1", message=b"new", dead=dead, front=front)

    return prepare


def _restore_unowned(stage: Stage) -> Step:
    stage.client.hset(UNACKED.unacked, "kombu", json.dumps(["{}", "", "q"]))
    stage.client.zadd(UNACKED.index, {"kombu": 1})
    hour = timedelta(hours=1)
    return lambda: stage.deliveries.restore_unowned("kombu", b"{}", lists=["q", "p"], visibility_timeout=hour)


def _fetch(stage: Stage) -> Step:
    stage.broker.publish(b"1", b"2")
    tag = a_tag()
    return lambda: stage.broker.fetch(tag=tag)


def _fetch_without_session(stage: Stage) -> Step:
    stage.broker.publish(b"1")
    return lambda: stage.broker.fetch(session="w9")


def _locked(stage: Stage, **options: Any) -> Start:
    return _received(stage, lock_key="account:1", **options)


def _lock_is_busy(stage: Stage) -> Start:
    stage.started("t2", session="w2", lock_key="account:1")
    return _locked(stage)


def _release_locked(stage: Stage) -> Step:
    start = stage.started(lock_key="account:1")
    return lambda: stage.ended(start)


def _abandon_locked(stage: Stage) -> Step:
    start = stage.started(lock_key="account:1")
    return lambda: stage.leases.abandon(start)


def _expire_locked(stage: Stage) -> Step:
    stage.started(lock_key="account:1")
    stage.sessions.leave(W1)
    seen = [("t1", stage.client.hget(stage.keys.inflight, "t1"))]
    return lambda: list(stage.leases._expire_each("w1", seen, now_ms=0))


def _beat_locked(stage: Stage) -> Step:
    held, run_out = stage.started("t1", lock_key="account:1"), stage.stalled("t2", lock_key="account:2")
    lost = stage.started("t3", lock_key="account:3")
    stage.bench.lose_lock("account:3")
    stage.started("t4", session="w2", lock_key="account:3")
    starts = [held, run_out, lost]
    tags = [str(start.tag) for start in starts]
    return lambda: stage.sessions.beat(W1, join=False, starts=starts, tags=tags)


CASES = {
    "acquire: with a lock key": Case("acquire", _acquire(_locked)),
    "acquire: lock key is busy": Case("acquire", _acquire(_lock_is_busy)),
    "acquire: retry with a lock key": Case(
        "acquire",
        _acquire(
            lambda stage: _locked(
                stage, retries=1, after=stage.started(session="w2", lock_key="account:2"), turn="retry"
            )
        ),
    ),
    "release: with a lock key": Case("release", _release_locked),
    "abandon: with a lock key": Case("abandon", _abandon_locked),
    "expire: session, with a lock key": Case("expire", _expire_locked),
    "beat: with lock keys": Case("beat", _beat_locked),
    "acquire: free": Case("acquire", _acquire(_received)),
    "acquire: taken over": Case("acquire", _acquire(_overtakes)),
    "acquire: stalled too often": Case("acquire", _acquire(_stalled_too_often)),
    "acquire: busy": Case("acquire", _acquire(_busy)),
    "acquire: done": Case("acquire", _acquire(_done)),
    "acquire: not mine": Case("acquire", _acquire(_not_mine)),
    "acquire: over budget": Case("acquire", _acquire(_over_budget)),
    "acquire: retry of the holder": Case(
        "acquire", _acquire(lambda stage: _received(stage, retries=1, after=stage.started(session="w2"), turn="retry"))
    ),
    "acquire: retry of one that ran out": Case(
        "acquire", _acquire(lambda stage: _received(stage, retries=1, after=stage.stalled(session="w2"), turn="paid"))
    ),
    "release: ended": Case("release", _release()),
    "release: ended without a marker": Case("release", _release(marker=False, acknowledge=False)),
    "release: handed over": Case("release", _release(ended=False, marker=False, state="handed-over")),
    "release: too late": Case("release", _release_late),
    "release: after it ran out": Case("release", _release_run_out),
    "abandon: begun": Case("abandon", _abandon),
    "abandon: not begun": Case("abandon", _abandon_unborn),
    "abandon: ended": Case("abandon", _abandon_ended),
    "expire: lease": Case("expire", _expire(None)),
    "expire: session": Case("expire", _expire("w1")),
    "progress": Case("progress", _progress(ended=False)),
    "progress: ended": Case("progress", _progress(ended=True)),
    "beat: kept": Case("beat", _beat()),
    "beat: begun": Case("beat", _beat(W3, join=True)),
    "beat: again, after an outage": Case("beat", _beat(pause=TTL * 2)),
    "beat: lost": Case("beat", _beat(Session(name="w9", node="celery@w9", identity=None))),
    "beat: leases alone": Case("beat", _renew),
    "census: worker": Case("census", _census(W1)),
    "census: on request": Case("census", _census(None)),
    "condemn": Case("condemn", _condemn),
    "bury": Case("bury", _bury),
    "bury: owner": Case("bury", _bury_owner),
    "bury: leave": Case("bury", _leave),
    "settle: restore": Case("settle", _settle(dead=True, front=True)),
    "settle: replace": Case("settle", _settle(dead=False, front=False)),
    "restore_unowned": Case("restore_unowned", _restore_unowned),
    "fetch": Case("fetch", _fetch),
    "fetch: without a session": Case("fetch", _fetch_without_session),
}


def test_no_script_is_left_out() -> None:
    packages = ("celery_selfheal.leases", "celery_selfheal.sessions")
    files = [file.name for package in packages for file in resources.files(package).iterdir()]

    assert {case.script for case in CASES.values()} == {
        name.removesuffix(".lua") for name in files if name.endswith(".lua")
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_second_run_changes_nothing(stage: Stage, case: Case) -> None:
    step = case.prepare(stage)
    step()
    before = stable(stage)

    step()

    assert stable(stage) == before


READS_ONLY = {
    "acquire: lock key is busy",
    "acquire: busy",
    "acquire: done",
    "acquire: not mine",
    "abandon: ended",
    "bury: owner",
    "census: on request",
    "fetch: without a session",
    "progress: ended",
}
RENEWS_ONLY = {"census: worker", "beat: kept", "beat: leases alone"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - READS_ONLY - RENEWS_ONLY))
def test_first_run_changes_something(stage: Stage, name: str) -> None:
    """Else the test above would prove nothing."""
    step = CASES[name].prepare(stage)
    before = stable(stage)

    step()

    assert stable(stage) != before


@pytest.mark.parametrize("name", sorted(READS_ONLY))
def test_refusal_writes_nothing(stage: Stage, name: str) -> None:
    step = CASES[name].prepare(stage)
    before = stable(stage)

    step()

    assert stable(stage) == before


def stable(stage: Stage) -> dict[str, Any]:
    """All keys with their values, but for instants that each beat sets anew."""
    found = everything(stage.client)
    for key in (stage.keys.sessions, stage.keys.index, UNACKED.index):
        if key in found:
            # An hour and more tells what has run out from what lives.
            found[key] = [(member, score < 2) for member, score in sorted(found[key])]
    for key in (stage.keys.pulse, stage.keys.grace):
        if key in found:
            found[key] = "an instant"
    return found


# -- a reply that is lost on the wire


@pytest.fixture
def lossy(server: RedisServer, client: redis.Redis, keys: Keys) -> Any:
    """A stage behind a network that swallows the reply to the next script, and the network."""
    with TcpProxy("127.0.0.1", server.port) as proxy:
        far = make_client(f"redis://127.0.0.1:{proxy.port}/0", timeout=5.0)
        yield Stage(far, keys), proxy
        far.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_client_repeats_a_call_whose_reply_was_lost(lossy: tuple[Stage, TcpProxy], case: Case) -> None:
    """Through the client as it is made for the stores: the same effect as that of one call."""
    stage, proxy = lossy
    step = case.prepare(stage)
    proxy.drop_reply(1, request=b"EVALSHA")
    step()
    assert proxy.replies_dropped == 1, "nothing was lost, so nothing was proven"
    after_both = stable(stage)

    step()

    assert stable(stage) == after_both


def test_answers_survive_a_lost_reply(lossy: tuple[Stage, TcpProxy]) -> None:
    stage, proxy = lossy
    stage.broker.publish(b"{}")
    start = a_start(tag=stage.broker.take())

    def lost(step: Callable[[], Any]) -> Any:
        proxy.drop_reply(1, request=b"EVALSHA")
        return step()

    assert isinstance(lost(lambda: stage.leases.acquire(start)), Acquired)
    assert lost(lambda: stage.sessions.beat(W1, join=False, starts=[start])).renewals == [Renewal.HELD]
    assert lost(lambda: stage.ended(start))
    assert lost(lambda: stage.leases.abandon(start)) is None
    assert lost(lambda: stage.sessions.beat(W1, join=True)).standing is Standing.KEPT
    assert proxy.replies_dropped == 5
    assert stage.bench.count("starts") == 1
    assert stage.bench.count("success") == 1


# -- what is left behind


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_after_a_beat_every_key_of_ours_has_an_end(stage: Stage, case: Case) -> None:
    """Was C33: one lost worker must not block a task for ever, nor litter a server."""
    case.prepare(stage)()

    for session in (W1, W2, W3):
        stage.sessions.beat(session, join=True)

    assert endless(stage) == []


def test_leases_with_a_server_of_their_own_leave_nothing_for_ever(client: redis.Redis, keys: Keys) -> None:
    """Where the broker is another server, no session's beat comes by."""
    leases = RedisLeaseStore(client, keys, ttl=TTL, max_stalls=MAX_STALLS, done_ttl=DONE_TTL, address=ADDRESS)
    ended, running, dead = a_start("t1"), a_start("t2"), a_start("t3")
    for start in (ended, running, dead):
        leases.acquire(start)
    leases.release(ended, ended=True, marker=True, state="success")
    leases.abandon(dead)

    leases.renew([running])

    assert [key for key in client.scan_iter() if client.pttl(key) <= 0] == []  # type: ignore[operator]  # unions


def test_good_bye_to_an_emptied_store_leaves_nothing_for_ever(stage: Stage) -> None:
    """The last worker of a fleet leaves, and nobody beats any more."""
    stage.client.flushdb()

    stage.sessions.leave(W1)

    assert endless(stage) == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_key_of_ours_carries_the_hash_tag(stage: Stage, case: Case) -> None:
    """Else a cluster would refuse the scripts, and an access list could not name our keys."""
    case.prepare(stage)()

    kombus = {UNACKED.unacked, UNACKED.index, "q", "p"}
    assert [name for name in everything(stage.client).keys() - kombus if not name.startswith("{selfheal:shop}:")] == []


def endless(stage: Stage) -> list[str]:
    """Keys of ours that never expire."""
    return [key.decode() for key in stage.client.scan_iter(f"{stage.keys.root}*") if stage.client.pttl(key) <= 0]


def test_budget_of_a_quiet_task_goes_away(stage: Stage) -> None:
    outcome = [stage.leases.acquire(a_start(f"t{n}", turn="retry")) for n in range(9)][-1]
    assert isinstance(outcome, OverBudget)

    time_passes(stage.client, timedelta(hours=1))

    assert not [key for key in everything(stage.client) if "budget" in key or "wait" in key]
