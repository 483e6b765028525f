"""Workers are real processes: what a test does to them happens, and nothing of them is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_selfheal.testing import RedisServer, WorkerProcess, processes
from celery_selfheal.testing.workers import _unshare

APP = """
import os, subprocess, time
from celery import Celery

app = Celery("tiny", broker=os.environ["TINY_URL"], backend=os.environ["TINY_URL"])
app.conf.broker_connection_retry_on_startup = True

@app.task(name="nap")
def nap(seconds):
    time.sleep(seconds)
    return os.getpid()

@app.task(name="spawn")
def spawn():
    return subprocess.Popen(["sleep", "60"]).pid
"""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a promise of the Linux kernel")

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def broker() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def app(broker: RedisServer) -> Iterator[Celery]:
    broker.client().flushdb()
    with Celery("producer", broker=broker.url(), backend=broker.url(), set_as_current=False) as app:
        yield app


@pytest.fixture
def make(broker: RedisServer, app: Celery, tmp_path: Path) -> Iterator[StartWorker]:
    (tmp_path / "tiny.py").write_text(APP)
    made: list[WorkerProcess] = []

    def make(**options: Any) -> WorkerProcess:
        options.setdefault("name", f"w{len(made)}")
        options.setdefault("app", "tiny")
        options["env"] = {"TINY_URL": broker.url(), **options.get("env", {})}
        made.append(WorkerProcess(cwd=tmp_path, log=tmp_path / f"{options['name']}.log", **options))
        return made[-1]

    yield make
    for worker in made:
        worker.stop(grace=0)


@pytest.fixture
def start(make: StartWorker) -> StartWorker:
    def start(**options: Any) -> WorkerProcess:
        worker = make(**options).start()
        worker.wait_ready()
        return worker

    return start


def test_worker_runs_tasks_and_leaves_nothing_when_stopped(start: StartWorker, app: Celery, tmp_path: Path) -> None:
    worker = start()
    pid, children = worker.pid, worker.child_pids()
    assert worker.alive
    assert app.send_task("nap", [0]).get(timeout=10) == children[0]
    assert (tmp_path / "w0.log.tmp").is_dir()

    worker.stop(grace=20)
    worker.stop()

    assert not _exist(pid, *children)
    assert not (tmp_path / "w0.log.tmp").exists()
    assert "Task nap" in worker.log.read_text()


def test_command_is_what_was_asked_for(start: StartWorker, app: Celery) -> None:
    worker = start(name="mine", concurrency=2, prefetch=3, queues="q1,q2", args=("--max-tasks-per-child", "7"))

    node = f"mine@{socket.gethostname()}"
    inspect = app.control.inspect([node], timeout=10)
    stats = inspect.stats()[node]

    assert stats["pid"] == worker.pid
    assert sorted(stats["pool"]["processes"]) == worker.child_pids()
    assert stats["prefetch_count"] == 6
    assert stats["pool"]["max-tasks-per-child"] == 7
    assert {queue["name"] for queue in inspect.active_queues()[node]} == {"q1", "q2"}


@linux_only
def test_environment_is_ours_with_additions(start: StartWorker, tmp_path: Path) -> None:
    worker = start(env={"EXTRA": "yes"}, pool="solo")

    environment = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")

    assert {b"EXTRA=yes", b"PYTHONUNBUFFERED=1", f"TMPDIR={tmp_path}/w0.log.tmp".encode()} <= set(environment)
    assert f"PATH={os.environ['PATH']}".encode() in environment


def test_relative_log_is_beside_its_starter_and_not_in_the_folder_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    program = "import tempfile; print(tempfile.gettempdir(), 'ready.'); raise SystemExit"
    (tmp_path / "elsewhere" / "tiny.py").write_text(program)

    worker = WorkerProcess("tiny", cwd=Path("elsewhere"), log=Path("w.log")).start()

    assert worker.wait_log("ready.").startswith(str(tmp_path / "w.log.tmp"))
    assert (tmp_path / "w.log").exists()
    worker.stop()


def test_killed_child_is_replaced_by_the_worker(start: StartWorker, app: Celery) -> None:
    worker = start(concurrency=2)
    before = worker.child_pids()

    killed = worker.kill_child(before[1])

    assert killed == before[1]
    assert processes.wait_until(lambda: len(set(worker.child_pids()) - {killed}) == 2, seconds=15)
    assert before[0] in worker.child_pids()
    assert worker.alive
    assert app.send_task("nap", [0]).get(timeout=10) in worker.child_pids()


def test_first_child_is_killed_by_default_and_no_stranger_ever(start: StartWorker) -> None:
    worker = start()
    children = worker.child_pids()

    with subprocess.Popen(["sleep", "60"]) as stranger:
        with pytest.raises(ChildProcessError, match=str(stranger.pid)):
            worker.kill_child(stranger.pid)
        assert stranger.poll() is None
        stranger.kill()
    assert worker.child_pids() == children

    assert [worker.kill_child()] == children


def test_pool_of_threads_has_no_child_to_kill(start: StartWorker, app: Celery) -> None:
    worker = start(pool="threads", concurrency=2)
    assert app.send_task("nap", [0]).get(timeout=10) == worker.pid
    assert worker.child_pids() == []

    with pytest.raises(ChildProcessError, match="no pool child"):
        worker.kill_child()


@linux_only
def test_children_follow_a_killed_main_process(start: StartWorker, app: Celery) -> None:
    worker = start(concurrency=2)
    pid, children = worker.pid, worker.child_pids()
    app.send_task("nap", [60])
    worker.wait_log("Task nap")

    worker.kill_main()

    assert not _exist(pid)
    assert not worker.alive
    assert worker.pid == pid
    assert worker.wait(1) == -signal.SIGKILL
    assert processes.wait_until(lambda: not _run(*children), seconds=10)


def test_killed_group_takes_all_that_the_worker_started_along(start: StartWorker, app: Celery) -> None:
    worker = start(concurrency=2)
    everyone = [*worker.child_pids(), app.send_task("spawn").get(timeout=10)]
    pid = worker.pid
    assert _run(pid, *everyone) == {pid, *everyone}

    worker.kill_group()
    worker.kill_group()

    assert not _exist(pid)
    assert worker.wait(1) == -signal.SIGKILL
    assert processes.wait_until(lambda: not _run(*everyone), seconds=10)


def test_stop_after_a_killed_main_process_ends_what_is_left(start: StartWorker, app: Celery) -> None:
    worker = start()
    orphan = app.send_task("spawn").get(timeout=10)
    worker.kill_main()
    assert _run(orphan)

    worker.stop()

    assert processes.wait_until(lambda: not _run(orphan), seconds=10)


def test_paused_worker_does_nothing_until_it_is_resumed(start: StartWorker, app: Celery) -> None:
    worker = start()
    assert app.send_task("nap", [0]).get(timeout=10)

    worker.pause()
    states = {row.state for row in processes.process_table() if row.pid in {worker.pid, *worker.child_pids()}}
    result = app.send_task("nap", [0])
    time.sleep(0.5)
    assert not result.ready()
    assert states == {"T"}
    assert worker.alive
    worker.resume()

    assert result.get(timeout=10)


def test_paused_worker_can_be_stopped_and_killed(start: StartWorker) -> None:
    stopped, killed = start(), start()
    pids = [one.pid for one in (stopped, killed)] + stopped.child_pids() + killed.child_pids()
    stopped.pause()
    killed.pause()

    stopped.stop(grace=20)
    killed.kill_main()

    assert processes.wait_until(lambda: not _run(*pids), seconds=10)
    assert "Warm shutdown" in stopped.log.read_text()


def test_terminated_worker_shuts_down_warm(start: StartWorker) -> None:
    worker = start(pool="solo")

    worker.terminate()

    assert worker.wait(30) == 0
    assert "Warm shutdown" in worker.log_text()


def test_quitting_worker_shuts_down_cold(start: StartWorker) -> None:
    worker = start(pool="solo")

    worker.quit()
    worker.wait(30)

    assert "Cold shutdown" in worker.log_text()


def test_stop_does_not_wait_for_a_task_beyond_its_grace(start: StartWorker, app: Celery) -> None:
    worker = start()
    pid, children = worker.pid, worker.child_pids()
    app.send_task("nap", [60])
    worker.wait_log("Task nap")

    worker.stop(grace=0.5)

    assert not _exist(pid)
    assert processes.wait_until(lambda: not _run(*children), seconds=10)


def test_waiting_for_the_end_of_a_living_worker_gives_up(start: StartWorker) -> None:
    worker = start(pool="solo")

    with pytest.raises(TimeoutError, match="still runs"):
        worker.wait(0.1)

    assert worker.alive


def test_log_is_waited_for_from_a_position(start: StartWorker, app: Celery) -> None:
    worker = start(pool="solo")
    app.send_task("nap", [0]).get(timeout=10)
    line = worker.wait_log("succeeded")
    assert line.startswith("[")
    assert "Task nap" in line
    assert line in worker.log_text().splitlines()
    position = len(worker.log_text())

    with pytest.raises(TimeoutError, match="succeeded"):
        worker.wait_log("succeeded", timeout=0.3, after=position)
    app.send_task("nap", [0])

    assert worker.wait_log("succeeded", after=position) != line


def test_line_that_is_being_written_is_waited_for(make: StartWorker) -> None:
    worker = make().start()
    worker.log.write_text("first\nhalf a")
    with pytest.raises(TimeoutError):
        worker.wait_log("half", timeout=0.2)

    with worker.log.open("a") as log:
        log.write(" line\n")

    assert worker.wait_log("half") == "half a line"


def test_dead_worker_is_not_waited_for_but_its_last_words_count(start: StartWorker) -> None:
    worker = start(pool="solo")
    worker.terminate()
    worker.wait(30)

    assert "Warm shutdown" in worker.wait_log("Warm shutdown")
    begin = time.monotonic()
    with pytest.raises(ChildProcessError, match=r"(?s)it ended with 0:.*Warm shutdown") as caught:
        worker.wait_log("never", timeout=30)
    assert time.monotonic() - begin < 10
    assert "\n    " in str(caught.value)


def test_worker_that_cannot_start_says_why_and_leaves_nothing(make: StartWorker) -> None:
    worker = make(app="no_such_app")

    with pytest.raises(ChildProcessError, match="no_such_app"), worker:
        pytest.fail("it never gets ready")

    assert not worker.alive


def test_worker_that_does_not_get_ready_in_its_context_is_ended(
    make: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = []

    def give_up(worker: WorkerProcess) -> None:
        pids.append(worker.pid)
        raise TimeoutError

    monkeypatch.setattr(WorkerProcess, "wait_ready", give_up)
    with pytest.raises(TimeoutError), make():
        pytest.fail("it never gets ready")

    assert pids
    assert not _exist(*pids)


def test_worker_is_ready_inside_its_context_and_gone_after(make: StartWorker, app: Celery) -> None:
    with make(pool="solo") as worker:
        pid = worker.pid
        assert "ready." in worker.log_text()
        assert app.send_task("nap", [0]).get(timeout=10)

    assert not _exist(pid)


def test_worker_may_be_started_again_and_its_old_log_does_not_count(start: StartWorker) -> None:
    worker = start(pool="solo")
    first = worker.pid
    with pytest.raises(RuntimeError, match="runs already"):
        worker.start()
    worker.kill_group()

    worker.start()
    assert "ready." not in worker.log_text()
    worker.wait_ready()

    assert worker.pid != first
    assert worker.log.read_text().count(" ready.") == 2
    assert worker.log_text().count(" ready.") == 1


def test_worker_that_was_not_started_cannot_be_asked(make: StartWorker) -> None:
    worker = make()

    assert not worker.alive
    assert worker.log_text() == ""
    for ask in (lambda: worker.pid, worker.kill_group, worker.kill_main, worker.pause, worker.terminate):
        with pytest.raises(RuntimeError, match="not started"):
            ask()
    worker.stop()


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("setpriv") is None, reason="only Linux with setpriv ends orphans"
)
def test_worker_dies_with_the_interpreter_that_started_it(broker: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(APP)
    program = """if True:
        from pathlib import Path
        from celery_selfheal.testing import WorkerProcess
        with WorkerProcess("tiny", cwd=Path.cwd(), log=Path("w.log")) as worker:
            print(worker.pid, *worker.child_pids(), flush=True)
            input()
    """
    env = {**os.environ, "TINY_URL": broker.url()}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2
        assert _run(*pids) == set(pids)

        starter.kill()

    assert processes.wait_until(lambda: not _run(*pids), seconds=10)


def _can_make_namespaces() -> bool:
    try:
        return subprocess.run([*_unshare(), "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _can_make_namespaces(), reason="needs unshare and the right to make pid namespaces")
class TestPidNamespace:
    def test_worker_has_pids_of_its_own_and_ours_are_seen_from_outside(self, start: StartWorker, app: Celery) -> None:
        worker = start(pid_namespace=True, concurrency=2)

        inside = app.send_task("nap", [0]).get(timeout=10)

        assert os.readlink(f"/proc/{worker.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
        assert b"celery" in Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        assert len(worker.child_pids()) == 2
        assert inside in {_pid_inside(pid) for pid in worker.child_pids()}
        assert _pid_inside(worker.pid) == 1

    @pytest.mark.parametrize("kill", [WorkerProcess.kill_group, WorkerProcess.kill_main])
    @pytest.mark.parametrize("is_paused", [False, True])
    def test_kill_ends_the_whole_namespace(
        self, kill: Callable[[WorkerProcess], None], is_paused: bool, start: StartWorker, app: Celery
    ) -> None:
        worker = start(pid_namespace=True)
        namespace = os.readlink(f"/proc/{worker.pid}/ns/pid")
        app.send_task("spawn").get(timeout=10)
        assert len(_members(namespace)) == 3
        if is_paused:
            worker.pause()

        kill(worker)

        assert not _exist(worker.pid)
        assert not worker.alive
        assert worker.wait(1) != 0
        assert processes.wait_until(lambda: not _members(namespace), seconds=10)

    def test_child_can_be_killed_and_is_replaced(self, start: StartWorker, app: Celery) -> None:
        worker = start(pid_namespace=True)

        killed = worker.kill_child()

        assert processes.wait_until(lambda: len(set(worker.child_pids()) - {killed}) == 1, seconds=15)
        assert app.send_task("nap", [0]).get(timeout=10)

    def test_worker_is_paused_and_resumed_and_stops_warm(self, start: StartWorker, app: Celery) -> None:
        worker = start(pid_namespace=True, pool="solo")
        worker.pause()
        result = app.send_task("nap", [0])
        time.sleep(0.5)
        assert not result.ready()
        worker.resume()
        assert result.get(timeout=10)
        namespace = os.readlink(f"/proc/{worker.pid}/ns/pid")

        worker.terminate()

        assert worker.wait(30) == 0
        assert not _members(namespace)

    def test_worker_that_gets_none_says_so(self, make: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "celery_selfheal.testing.workers._unshare", lambda: ["sh", "-c", "echo not permitted; exit 1"]
        )

        with pytest.raises(ChildProcessError, match="not permitted"):
            make(pid_namespace=True).start()


def _run(*pids: int) -> set[int]:
    return {row.pid for row in processes.process_table() if row.pid in pids and row.state != "Z"}


def _exist(*pids: int) -> set[int]:
    """Those that the system knows, be it only as ones that were not reaped."""
    return {row.pid for row in processes.process_table() if row.pid in pids}


def _members(namespace: str) -> set[int]:
    found = set()
    for row in processes.process_table():
        try:
            if os.readlink(f"/proc/{row.pid}/ns/pid") == namespace:
                found.add(row.pid)
        except OSError:
            continue
    return found


def _pid_inside(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise AssertionError("this kernel does not tell pids of namespaces")
