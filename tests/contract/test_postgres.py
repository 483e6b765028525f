"""What only PostgreSQL can do to its store: end a backend, hold a row, be restarted, freeze, run out of patience."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_selfheal.database import drivers, migrate
from celery_selfheal.errors import StoreError
from celery_selfheal.leases.functions import NAME_BYTES, Functions, name_of, own_engine
from celery_selfheal.leases.port import Acquired, AlreadyDone, Busy, OverBudget, Renewal, Start
from celery_selfheal.leases.postgres import CLEAN_LIMIT, CLEAN_PAGES, PostgresLeaseStore
from celery_selfheal.sessions.port import Peer, Session, Standing
from celery_selfheal.sessions.postgres import PostgresSessionStore
from celery_selfheal.testing import TcpProxy
from celery_selfheal.testing.postgres import PostgresServer
from celery_selfheal.testing.servers import free_port
from celery_selfheal.witness import ProcessIdentity
from contract.benches import BUDGET, DONE_TTL, KEYS, MAX_STALLS, TTL, a_start
from contract.postgres_bench import PostgresBench, all_rows, empty, postgres_time_passes, statements

SHORT = timedelta(seconds=1)
DRIVERS = ("psycopg2", "psycopg")

W1, W2, W3 = (
    Session(name=name, node=f"celery@{name}", identity=ProcessIdentity(host="h1", pid=1, started="7"))
    for name in ("w1", "w2", "w3")
)


class Stage:
    """Both stores on one engine, and two workers' sessions."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.bench = PostgresBench(engine, budget=BUDGET)
        self.leases = self.bench.store
        self.sessions = PostgresSessionStore(self.bench.functions, KEYS, ttl=TTL)
        for session in (W1, W2):
            self.sessions.beat(session, join=True)

    def started(self, task_id: str = "t1", **options: Any) -> Start:
        start = a_start(task_id, **options)
        assert isinstance(self.leases.acquire(start), Acquired)
        return start

    def stalled(self, task_id: str = "t1", **options: Any) -> Start:
        start = self.started(task_id, **options)
        self.bench.run_out(task_id)
        return start

    def ended(self, start: Start, **options: Any) -> bool:
        return self.leases.release(start, **{"ended": True, "marker": True, "state": "success", **options})


@pytest.fixture
def stage(engine: sa.Engine) -> Stage:
    return Stage(engine)


def short_store(engine: sa.Engine, patience: timedelta = SHORT) -> PostgresLeaseStore:
    functions = Functions(engine, patience=patience)
    return PostgresLeaseStore(functions, KEYS, ttl=TTL, max_stalls=MAX_STALLS, done_ttl=DONE_TTL)


# -- one call each


@dataclass(frozen=True)
class Case:
    """A call that is made twice.

    Attributes:
        prepare: Brings the stage about, and returns the call.
    """

    function: str
    prepare: Callable[[Stage], Callable[[], object]]


def _acquire(of: Callable[[Stage], Start]) -> Case:
    def prepare(stage: Stage) -> Callable[[], object]:
        start = of(stage)
        return lambda: stage.leases.acquire(start)

    return Case("acquire", prepare)


def _after(*, stalled: int = 0, ended: bool = False, running: bool = False, **options: Any) -> Callable[[Stage], Start]:
    def make(stage: Stage) -> Start:
        for _ in range(stalled):
            stage.stalled(session="w2")
        if ended:
            stage.ended(stage.started(session="w2"))
        before = stage.started(session="w2") if running else None
        return a_start(**{"after": before, **options} if "retries" in options else options)

    return make


def _over_budget(stage: Stage) -> Start:
    for n in range(7):
        stage.leases.acquire(a_start(f"u{n}", turn="retry"))
    return a_start(turn="retry")


def _release(**how: Any) -> Case:
    def prepare(stage: Stage) -> Callable[[], object]:
        start = stage.started()
        return lambda: stage.ended(start, **how)

    return Case("release", prepare)


def _release_late(stage: Stage) -> Callable[[], object]:
    late = stage.stalled()
    stage.started(session="w2")
    return lambda: stage.ended(late)


def _release_run_out(stage: Stage) -> Callable[[], object]:
    start = stage.stalled()
    return lambda: stage.ended(start)


def _abandon(*, begun: bool) -> Case:
    def prepare(stage: Stage) -> Callable[[], object]:
        start = stage.started() if begun else a_start()
        return lambda: stage.leases.abandon(start)

    return Case("abandon", prepare)


def _expire(session: str | None) -> Case:
    def prepare(stage: Stage) -> Callable[[], object]:
        stage.started("t2", session="w2")
        stage.stalled()
        stage.sessions.leave(W1)
        return lambda: stage.leases.expire(session=session, limit=9)

    return Case("expire", prepare)


def _beat(session: Session = W1, *, join: bool = False, pause: timedelta = timedelta(0)) -> Case:
    def prepare(stage: Stage) -> Callable[[], object]:
        starts = [stage.started("t1"), a_start("t2"), stage.stalled("t3"), stage.stalled("t4")]
        stage.started("t4", session="w2")
        postgres_time_passes(stage.engine, pause)
        return lambda: stage.sessions.beat(session, join=join, starts=starts)

    return Case("beat", prepare)


def _renew(stage: Stage) -> Callable[[], object]:
    starts = [stage.started("t1"), stage.stalled("t2")]
    return lambda: stage.leases.renew(starts)


def _bury(stage: Stage) -> Callable[[], object]:
    stage.sessions.leave(W1)
    return lambda: stage.sessions.bury(W1.name, host=W1.host)


def _forget(stage: Stage) -> Callable[[], object]:
    stage.stalled("t1")
    stage.leases.expire(session=None, limit=9)
    stage.started("t2")
    return lambda: stage.leases.forget(["t1", "t2", "t3"])


def _clean(stage: Stage) -> Callable[[], object]:
    stage.ended(stage.started())
    postgres_time_passes(stage.engine, DONE_TTL * 2)
    return stage.leases._clean


CASES = {
    "acquire: free": _acquire(_after()),
    "acquire: taken over": _acquire(_after(stalled=1)),
    "acquire: stalled too often": _acquire(_after(stalled=MAX_STALLS + 1)),
    "acquire: busy": _acquire(_after(running=True)),
    "acquire: done": _acquire(_after(ended=True)),
    "acquire: over budget": _acquire(_over_budget),
    "acquire: retry of the holder": _acquire(_after(running=True, retries=1, turn="retry")),
    "release: ended": _release(),
    "release: ended without a marker": _release(marker=False),
    "release: handed over": _release(ended=False, marker=False, state="handed-over"),
    "release: too late": Case("release", _release_late),
    "release: after it ran out": Case("release", _release_run_out),
    "abandon: begun": _abandon(begun=True),
    "abandon: not begun": _abandon(begun=False),
    "expire: lease": _expire(None),
    "expire: session": _expire("w1"),
    "beat: kept": _beat(),
    "beat: begun": _beat(W3, join=True),
    "beat: again, after an outage": _beat(pause=TTL * 2),
    "beat: lost": _beat(Session(name="w9", node="celery@w9", identity=None)),
    "beat: leases alone": Case("beat", _renew),
    "census": Case("census", lambda stage: lambda: stage.sessions.census(session=W1, lead_ms=60_000, limit=9)),
    "condemn": Case("condemn", lambda stage: lambda: stage.sessions.condemn(Peer(name="w1", about=W1.about()))),
    "bury": Case("bury", _bury),
    "leave": Case("leave", lambda stage: lambda: stage.sessions.leave(W1)),
    "forget": Case("forget", _forget),
    "clean": Case("clean", _clean),
}
READS_ONLY = {"acquire: busy", "acquire: done", "census", "beat: kept"}  # but for instants


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_second_call_changes_nothing(stage: Stage, case: Case) -> None:
    step = case.prepare(stage)
    step()
    before = stable(stage)

    step()

    assert stable(stage) == before


@pytest.mark.parametrize("name", sorted(CASES.keys() - READS_ONLY))
def test_first_call_changes_something(stage: Stage, name: str) -> None:
    """Else the test above would prove nothing."""
    step = CASES[name].prepare(stage)
    before = stable(stage)

    step()

    assert stable(stage) != before


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_step_is_one_statement(stage: Stage, case: Case) -> None:
    step = case.prepare(stage)
    with statements(stage.engine) as sent:
        step()

    sweeping = "selfheal_clean"  # each sweep cleans up, too
    called = [one for one in sent if sweeping not in one or case.function == "clean"]
    assert len(called) == 1
    assert f"selfheal_{case.function}(" in called[0]


def stable(stage: Stage) -> dict[str, Any]:
    """All rows, but for instants that each call sets anew and rows that have run out."""
    found = all_rows(stage.engine)
    instants = {"expires_at", "kept_until", "run_acquired_at", "pulse", "grace_until", "leads_until", "at_ms", "slot"}
    return {
        table: sorted(
            str({name: _told(name, value) for name, value in row.items() if name not in instants}) for row in rows
        )
        for table, rows in found.items()
    } | {"dead": sorted(row["name"] for row in found["sessions"] if row["expires_at"] == "-infinity")}


def _told(name: str, value: object) -> object:
    return round(value, 1) if name == "tokens" and isinstance(value, float) else value


# -- faults


@pytest.fixture(params=DRIVERS)
def lossy(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, engine: sa.Engine
) -> Iterator[tuple[Stage, TcpProxy]]:
    """A stage behind a network that swallows the reply to the next call, and the network; with each driver."""
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        far = own_engine(
            sa.create_engine(engine.url.set(drivername=f"postgresql+{request.param}", port=proxy.port)),
            patience=timedelta(seconds=20),
            as_it_is=False,
        )
        yield Stage(far), proxy
        far.dispose()


def test_answers_survive_a_lost_reply(lossy: tuple[Stage, TcpProxy]) -> None:
    stage, proxy = lossy
    start = a_start()

    def lost(function: str, step: Callable[[], Any]) -> Any:
        proxy.drop_reply(1, request=f"selfheal_{function}".encode())
        return step()

    assert isinstance(lost("acquire", lambda: stage.leases.acquire(start)), Acquired)
    assert lost("beat", lambda: stage.sessions.beat(W1, join=False, starts=[start])).renewals == [Renewal.HELD]
    assert lost("release", lambda: stage.ended(start))
    assert lost("abandon", lambda: stage.leases.abandon(start)) is None
    assert lost("beat", lambda: stage.sessions.beat(W1, join=True)).standing is Standing.KEPT
    assert proxy.replies_dropped == 5
    assert (stage.bench.count("starts"), stage.bench.count("success")) == (1, 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_call_whose_reply_was_lost_has_the_effect_of_one(lossy: tuple[Stage, TcpProxy], case: Case) -> None:
    stage, proxy = lossy
    step = case.prepare(stage)
    proxy.drop_reply(1, request=f"selfheal_{case.function}".encode())
    step()
    assert proxy.replies_dropped == 1, "nothing was lost, so nothing was proven"
    after_both = stable(stage)

    step()

    assert stable(stage) == after_both


def test_ended_backends_are_replaced_without_an_error(stage: Stage) -> None:
    """A fail-over, an administrator, or a pooler that was restarted."""
    start = stage.started()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: stage.started(f"u{n}"), range(20)))

    with sa.create_engine(stage.engine.url).connect() as connection:
        connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = :name"
            ),
            {"name": stage.engine.url.database},
        )

    assert stage.leases.renew([start]) == [Renewal.HELD]


def test_held_row_costs_the_others_their_patience_and_no_more(stage: Stage) -> None:
    """Some session sits on a row of ours: who wants it says so in time."""
    start = stage.started()
    store = short_store(stage.engine)
    with sa.create_engine(stage.engine.url).begin() as rude:
        rude.execute(sa.text("SELECT 1 FROM selfheal_leases FOR UPDATE"))

        with pytest.raises(StoreError, match="lock timeout"):
            store.renew([start])
        with pytest.raises(StoreError, match="lock timeout"):
            store.acquire(start)
        assert isinstance(store.acquire(a_start("t2")), Acquired)

    assert store.renew([start]) == [Renewal.HELD]


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """One to be killed and frozen."""
    with PostgresServer() as running:
        yield running


def engine_on(server: PostgresServer, *, patience: timedelta = SHORT) -> sa.Engine:
    engine = sa.create_engine(drivers.parse(server.new_database()))
    migrate.upgrade(engine)
    engine.dispose()
    return own_engine(engine, patience=patience, as_it_is=False)


def test_restart_of_the_server_loses_nothing(own_server: PostgresServer) -> None:
    engine = engine_on(own_server)
    stage = Stage(engine)
    running, ended = stage.started("t1"), stage.started("t2")
    stage.ended(ended)
    fence = stage.leases.acquire(running)

    own_server.kill()
    with pytest.raises(StoreError):
        stage.leases.renew([running])
    own_server.restart()

    assert stage.leases.renew([running]) == [Renewal.HELD]
    assert stage.leases.acquire(running) == fence
    assert stage.leases.acquire(a_start("t2")) == AlreadyDone()
    later = stage.leases.acquire(a_start("t3"))
    assert isinstance(later, Acquired)
    assert isinstance(fence, Acquired)
    assert later.lease.fence > fence.lease.fence
    engine.dispose()


def test_frozen_server_costs_a_caller_its_patience_and_no_more(own_server: PostgresServer) -> None:
    """Its kernel still acknowledges every packet, so no timeout of TCP would ever fire."""
    engine = engine_on(own_server)
    store = short_store(engine)
    start = a_start()
    store.acquire(start)

    own_server.pause()
    errors = []
    for step in (lambda: store.renew([start]), lambda: store.acquire(a_start("t2"))):
        asked_at = time.monotonic()
        with pytest.raises(StoreError):
            step()
        errors.append(time.monotonic() - asked_at)
    own_server.resume()

    assert max(errors) < 20 * SHORT.total_seconds()
    assert store.renew([start]) == [Renewal.HELD]
    engine.dispose()


def test_server_that_does_not_answer_is_one_error_without_a_password() -> None:
    nobody = sa.create_engine(f"postgresql+psycopg2://shop:se%3Acret@127.0.0.1:{free_port()}/shop")
    functions = Functions(own_engine(nobody, patience=SHORT, as_it_is=False), patience=SHORT)
    leases = PostgresLeaseStore(functions, KEYS, ttl=TTL, max_stalls=MAX_STALLS, done_ttl=DONE_TTL)
    sessions = PostgresSessionStore(functions, KEYS, ttl=TTL)
    steps: list[Callable[[], object]] = [
        lambda: leases.acquire(a_start()),
        lambda: leases.release(a_start(), ended=True, marker=True, state="success"),
        lambda: leases.renew([a_start()]),
        lambda: leases.abandon(a_start()),
        lambda: leases.expire(session=None, limit=1),
        lambda: leases.forget(["t1"]),
        lambda: sessions.beat(W1, join=True),
        lambda: sessions.census(session=None, lead_ms=1, limit=1),
        lambda: sessions.condemn(Peer(name="w1", about="{}")),
        lambda: sessions.bury("w1", host=""),
        lambda: sessions.leave(W1),
    ]

    for step in steps:
        with pytest.raises(StoreError, match=re.escape("127.0.0.1")) as raised:
            step()
        assert "cret" not in str(raised.value)


def test_error_does_not_show_what_tasks_said(stage: Stage) -> None:
    start = stage.started()
    with sa.create_engine(stage.engine.url).begin() as rude:
        rude.execute(sa.text("SELECT 1 FROM selfheal_leases FOR UPDATE"))

        with pytest.raises(StoreError) as raised:
            short_store(stage.engine).release(start, ended=True, marker=True, state="failure", failure="card 4711")

    assert "4711" not in str(raised.value)


def test_missing_functions_are_named_with_the_remedy(postgres_server: PostgresServer) -> None:
    bare = sa.create_engine(drivers.parse(postgres_server.new_database()))

    with pytest.raises(StoreError, match="selfheal db upgrade"):
        short_store(bare.execution_options(isolation_level="AUTOCOMMIT")).acquire(a_start())


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_isolation_level_that_would_hide_a_done_marker_is_refused(level: str, postgres_server: PostgresServer) -> None:
    """A snapshot taken before the wait for a lock does not show what its holder left."""
    strict = engine_on(postgres_server)
    with strict.connect() as connection:
        database = strict.url.database
        connection.execute(sa.text(f"ALTER DATABASE {database} SET default_transaction_isolation = '{level}'"))
    strict.dispose()

    with pytest.raises(StoreError, match="read committed"):
        short_store(strict).acquire(a_start())


def test_engine_of_the_application_lends_its_ways_and_none_of_its_connections(engine: sa.Engine) -> None:
    """Task bodies may hold every connection of it for hours; and its owner may have added a token, say, to each."""
    theirs = sa.create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    opened: list[str] = []
    sa.event.listen(theirs, "do_connect", lambda *about: opened.append("theirs"))
    with theirs.connect():
        store = short_store(own_engine(theirs, patience=SHORT, as_it_is=True), patience=SHORT * 20)

        assert isinstance(store.acquire(a_start("t1")), Acquired)

    assert opened == ["theirs"] * 2
    theirs.dispose()


def test_child_that_lets_go_of_its_parents_connections_ends_none_of_them(stage: Stage) -> None:
    (before,) = stage.bench.sql("SELECT pg_backend_pid()")
    child = os.fork()
    if not child:
        stage.engine.dispose(close=False)
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)

    assert stage.bench.sql("SELECT pg_backend_pid()") == [before]


# -- many at once


def test_fences_grow_and_are_never_given_twice_under_concurrency(stage: Stage) -> None:
    fences: list[list[int]] = [[] for _ in range(4)]

    def work(n: int) -> None:
        for _ in range(50):
            outcome = stage.leases.acquire(a_start(f"own{n}"))
            assert isinstance(outcome, Acquired)
            fences[n].append(outcome.lease.fence)
            stage.leases.release(a_start(f"own{n}", token=outcome.lease.token), ended=True, marker=False, state="s")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    assert all(one == sorted(one) for one in fences)
    assert len({fence for one in fences for fence in one}) == 200


def test_fence_is_no_less_than_the_clock_and_grows_where_it_was_set_back(stage: Stage) -> None:
    """It must exceed what another store gave out before."""
    ((before_us,),) = stage.bench.sql("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
    first = stage.leases.acquire(a_start("t1"))
    assert isinstance(first, Acquired)
    assert first.lease.fence >= before_us

    ahead = first.lease.fence + 10**12
    stage.bench.sql("SELECT setval('selfheal_fence', :ahead)", ahead=ahead)
    later = [stage.leases.acquire(a_start(name)) for name in ("t2", "t3")]

    assert [outcome.lease.fence for outcome in later if isinstance(outcome, Acquired)] == [ahead + 1, ahead + 2]


def test_copies_of_one_message_run_once_however_many_race(stage: Stage) -> None:
    """Acquire, run, release, over and over: one start for each message, and all others wait or end."""
    runs: list[str] = []

    def race(number: int) -> None:
        for n in range(25):
            start = a_start(f"t{n}", message="m", session=f"w{number}")
            while True:
                outcome = stage.leases.acquire(start)
                if isinstance(outcome, AlreadyDone):
                    break
                if isinstance(outcome, Acquired):
                    runs.append(start.task_id)
                    assert stage.ended(start)
                    break
                assert isinstance(outcome, Busy)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(runs) == sorted({f"t{n}" for n in range(25)})
    assert stage.bench.count("success") == 25
    assert all_rows(stage.engine)["leases"] == []


def test_beats_and_sweeps_that_cross_end_without_an_error(stage: Stage) -> None:
    """They lock many rows: in one order, or they would wait for each other."""
    starts = [stage.started(f"t{n}", session="w1") for n in range(40)]

    def beat(reverse: bool) -> None:
        for _ in range(15):
            stage.sessions.beat(W1 if reverse else W2, join=False, starts=starts[::-1] if reverse else starts)

    def sweep() -> None:
        for _ in range(15):
            stage.leases.expire(session=None, limit=10)
            stage.leases.expire(session="w9", limit=10)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(beat, True), pool.submit(beat, False), pool.submit(sweep), pool.submit(sweep)]:
            future.result(60)

    assert stage.leases.renew(starts) == [Renewal.HELD] * 40


def test_first_attempt_does_not_wait_for_the_budget_that_another_start_writes(stage: Stage) -> None:
    stage.started("t1")
    with sa.create_engine(stage.engine.url).begin() as other:
        other.execute(sa.text("SELECT 1 FROM selfheal_budgets FOR UPDATE"))

        outcome = stage.leases.acquire(a_start("t2"))

    assert isinstance(outcome, Acquired)


# -- rows


def test_ended_tasks_leave_nothing_but_their_marker(stage: Stage) -> None:
    for n in range(5):
        stage.ended(stage.started(f"t{n}"))
    stage.leases.acquire(a_start("t1"))
    stage.leases.release(a_start("t9"), ended=True, marker=False, state="success")

    rows = all_rows(stage.engine)
    assert rows["leases"] == []
    assert len(rows["done"]) == 5


def test_sweep_removes_what_has_run_out_and_a_bounded_number_of_it(stage: Stage) -> None:
    many = CLEAN_LIMIT * CLEAN_PAGES + 7
    stage.bench.sql(
        "INSERT INTO selfheal_done SELECT :app, 'm' || n, 't', '', '1970-01-01' FROM generate_series(1, :many) n",
        app=KEYS.root,
        many=many,
    )
    stage.ended(stage.started())

    stage.leases.expire(session=None, limit=10)
    assert len(all_rows(stage.engine)["done"]) == 8
    stage.leases.expire(session=None, limit=10)
    assert len(all_rows(stage.engine)["done"]) == 1


def test_sweep_removes_every_kind_of_row_that_has_run_out_and_spares_what_runs(stage: Stage) -> None:
    stage.leases.abandon(a_start("t1"))
    for n in range(9):
        stage.leases.acquire(a_start(f"u{n}", turn="retry"))
    assert isinstance(stage.leases.acquire(a_start("over", turn="retry")), OverBudget)
    stage.ended(stage.started("t2"))
    running = stage.started("t3")
    postgres_time_passes(stage.engine, timedelta(days=8))
    stage.bench.sql("UPDATE selfheal_leases SET expires_at = now() + interval '1 hour' WHERE task_id = 't3'")
    stage.leases.expire(session=None, limit=100)

    stage.leases.expire(session=None, limit=100)

    rows = all_rows(stage.engine)
    assert [row["task_id"] for row in rows["leases"]] == ["t3"]
    assert [rows[table] for table in ("done", "waits", "budgets", "sessions")] == [[], [], [], []]
    assert stage.leases.renew([running]) == [Renewal.HELD]


def test_reaper_finds_what_has_run_out_by_index(stage: Stage) -> None:
    """Its cost follows what has expired, not what lives."""
    stage.bench.sql(
        "INSERT INTO selfheal_leases (app, task_id, token, run_token, run_session, expires_at)"
        " SELECT :app, 'x' || n, 'k', 'k', 'w' || n % 50, now() + interval '1 hour' FROM generate_series(1, 20000) n",
        app=KEYS.root,
    )
    stage.bench.sql("ANALYZE selfheal_leases")
    for condition in ("expires_at <= now() ORDER BY expires_at", "run_session = 'gone'"):
        plan = stage.bench.sql(
            "EXPLAIN SELECT task_id FROM selfheal_leases l"
            f" WHERE app = :app AND run_token IS NOT NULL AND {condition} LIMIT 100",
            app=KEYS.root,
        )
        assert "Seq Scan" not in str(plan)


def test_applications_in_one_database_share_nothing(engine: sa.Engine) -> None:
    functions = Functions(engine, patience=SHORT * 20)
    stores = [
        PostgresLeaseStore(functions, keys, ttl=TTL, max_stalls=MAX_STALLS, done_ttl=DONE_TTL)
        for keys in (KEYS, type(KEYS)(prefix="selfheal", app="other"))
    ]
    fleets = [PostgresSessionStore(functions, keys, ttl=TTL) for keys in (KEYS, type(KEYS)(prefix="x", app="shop"))]

    assert all(isinstance(store.acquire(a_start("t1")), Acquired) for store in stores)
    assert [fleet.beat(W1, join=True).standing for fleet in fleets] == [Standing.BEGUN] * 2
    assert len({fleet.beat(W1, join=False).epoch for fleet in fleets}) == 2


@pytest.mark.parametrize(
    "text", ["a\0b", "\ud800", "é" * 600, "x" * 5_000, "it's \\ % :app", "", "\n"], ids=lambda text: repr(text[:8])
)
def test_whatever_an_id_is_it_has_one_lease(text: str, stage: Stage) -> None:
    start = a_start(text, session="w\0")

    assert isinstance(stage.leases.acquire(start), Acquired)
    assert isinstance(stage.leases.acquire(a_start(text)), Busy)
    assert stage.leases.renew([start]) == [Renewal.HELD]
    assert stage.ended(start, failure='{"text": "a\0b \ud800"}')
    assert isinstance(stage.leases.acquire(a_start(text)), AlreadyDone)


def test_long_names_are_shortened_and_stay_apart() -> None:
    names = [name_of("x" * 5_000), name_of("x" * 5_001), name_of("x" * NAME_BYTES), name_of("é" * 300)]

    assert len(set(names)) == 4
    assert all(len(name.encode()) <= NAME_BYTES for name in names)


def test_emptied_store_is_noticed_and_what_runs_is_held_again(stage: Stage) -> None:
    running = stage.started()
    epoch = stage.sessions.beat(W1, join=False).epoch
    stage.leases.renew([running])
    empty(stage.engine)

    assert stage.leases.renew([running]) == [Renewal.HELD]
    assert stage.sessions.beat(W1, join=False).epoch != epoch
    assert isinstance(stage.leases.acquire(a_start(session="w2")), Busy)
