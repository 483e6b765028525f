"""The host witness against real processes: ``True`` only if the kernel says that a process is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_selfheal import witness
from celery_selfheal.witness import ProcessIdentity, identify, is_gone

pytestmark = pytest.mark.skipif(identify() is None, reason="no host witness here: needs Linux and its own /proc")

Spawn = Callable[[str], subprocess.Popen[str]]

NAP = "import time; print('up', flush=True); time.sleep(60)"
ODD_NAME = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) Z (b 1 ) 2', 0, 0, 0); " + NAP
# pthread_exit ends the first thread alone: the process is listed as a zombie while the other thread works on.
HEADLESS = (
    "import ctypes, threading, time\n"
    "def work():\n"
    "    print('up', flush=True)\n"
    "    time.sleep(60)\n"
    "threading.Thread(target=work).start()\n"
    "ctypes.CDLL(None).pthread_exit(None)"
)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts Python programs and waits for their first line."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def known(process: subprocess.Popen[str]) -> ProcessIdentity:
    identity = identify(process.pid)
    assert identity is not None
    return identity


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10
    while state_of(pid) != state:
        assert time.monotonic() < deadline, f"process {pid} is {state_of(pid)}, not {state}"
        time.sleep(0.01)


def test_this_process_is_alive() -> None:
    identity = identify()

    assert identity is not None
    assert identity.pid == os.getpid()
    assert is_gone(identity) is False


def test_a_living_process_is_not_gone(spawn: Spawn) -> None:
    assert is_gone(known(spawn(NAP))) is False


def test_an_identity_is_the_same_whoever_asks_and_when(spawn: Spawn) -> None:
    process = spawn(NAP)
    asked_by_itself = spawn(
        "import dataclasses, json, time\n"
        "from celery_selfheal.witness import identify\n"
        "print('up', flush=True)\n"
        "print(json.dumps(dataclasses.astuple(identify())), flush=True)\n"
        "time.sleep(60)"
    )
    assert asked_by_itself.stdout is not None

    assert known(process) == known(process)
    assert known(asked_by_itself) == ProcessIdentity(*json.loads(asked_by_itself.stdout.readline()))


def test_a_process_that_was_killed_and_reaped_is_gone(spawn: Spawn) -> None:
    process = spawn(NAP)
    identity = known(process)

    process.kill()
    process.wait()

    assert is_gone(identity) is True


def test_a_killed_process_that_nobody_reaped_is_gone(spawn: Spawn) -> None:
    process = spawn(NAP)
    identity = known(process)

    process.kill()
    wait_for_state(process.pid, "Z")

    assert is_gone(identity) is True


def test_a_stopped_process_is_alive(spawn: Spawn) -> None:
    """Its lease may expire, but that is for the TTL to say: after SIGCONT it works on."""
    process = spawn(NAP)
    identity = known(process)

    process.send_signal(signal.SIGSTOP)
    wait_for_state(process.pid, "T")

    assert is_gone(identity) is False


def test_a_process_without_its_first_thread_is_alive_while_another_works(spawn: Spawn) -> None:
    process = spawn(HEADLESS)
    wait_for_state(process.pid, "Z")

    assert is_gone(known(process)) is False


def test_another_process_under_the_same_pid_does_not_stand_for_the_one_before(spawn: Spawn) -> None:
    now_under_this_pid = known(spawn(NAP))
    before = dataclasses.replace(now_under_this_pid, started=str(int(now_under_this_pid.started) - 1))

    assert is_gone(before) is True


def test_a_command_name_made_to_mislead_does_not(spawn: Spawn) -> None:
    process = spawn(ODD_NAME)
    identity = known(process)
    assert ") Z (" in Path(f"/proc/{process.pid}/stat").read_text()

    assert identity.started.isdigit()
    assert is_gone(identity) is False

    process.kill()
    process.wait()

    assert is_gone(identity) is True


def test_start_times_grow(spawn: Spawn) -> None:
    """Guards against reading another field than the 22nd."""
    first = known(spawn(NAP))
    ticks = os.sysconf("SC_CLK_TCK")
    time.sleep(2 / ticks)

    second = known(spawn(NAP))

    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert int(first.started) < int(second.started)
    assert abs(uptime - int(second.started) / ticks) < 60


def test_a_process_of_another_machine_is_not_judged(spawn: Spawn) -> None:
    process = spawn(NAP)
    elsewhere = dataclasses.replace(known(process), host="0" * 32)

    process.kill()
    process.wait()

    assert is_gone(elsewhere) is None


@pytest.mark.parametrize("pid", [0, -1, -(2**30)])
def test_a_number_that_means_a_group_of_processes_is_not_judged(pid: int) -> None:
    here = identify()
    assert here is not None

    assert identify(pid) is None
    assert is_gone(dataclasses.replace(here, pid=pid)) is None


def test_a_process_that_is_not_there_has_no_identity(spawn: Spawn) -> None:
    process = spawn(NAP)
    process.kill()
    process.wait()

    assert identify(process.pid) is None


class TestDoubt:
    """Where /proc says less than the kernel knows, a living process must not be taken for dead."""

    @pytest.fixture
    def proc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A /proc of our own, with the true entries of the whole machine and of this process."""
        for name in ("sys", str(os.getpid())):
            (tmp_path / name).symlink_to(Path("/proc", name))
        (tmp_path / "self").symlink_to(str(os.getpid()))
        monkeypatch.setattr(witness, "PROC", tmp_path)
        return tmp_path

    def test_the_copy_alone_changes_nothing(self, proc: Path) -> None:
        identity = identify()

        assert identity is not None
        assert is_gone(identity) is False

    def test_a_process_hidden_by_the_mount_is_not_gone(self, proc: Path, spawn: Spawn) -> None:
        """As with hidepid=2, which leaves out processes of other users."""
        here = identify()
        assert here is not None
        hidden = dataclasses.replace(here, pid=spawn(NAP).pid)

        assert is_gone(hidden) is None

    @pytest.mark.parametrize("content", [b"", b"1 (python) S 1 1", b"nonsense"])
    def test_an_unreadable_entry_is_not_judged(self, proc: Path, spawn: Spawn, content: bytes) -> None:
        here = identify()
        assert here is not None
        process = spawn(NAP)
        (proc / str(process.pid)).mkdir()
        (proc / str(process.pid) / "stat").write_bytes(content)

        assert is_gone(dataclasses.replace(here, pid=process.pid)) is None
        assert identify(process.pid) is None

    @pytest.mark.parametrize("missing", ["self", "sys"])
    def test_without_proc_there_is_no_witness(self, proc: Path, missing: str) -> None:
        identity = identify()
        assert identity is not None

        (proc / missing).unlink()

        assert identify() is None
        assert is_gone(identity) is None

    def test_a_proc_that_knows_this_process_by_another_pid_is_no_witness(self, proc: Path) -> None:
        (proc / "1").symlink_to(f"/proc/{os.getpid()}")
        (proc / "self").unlink()
        (proc / "self").symlink_to("1")

        assert identify() is None

    def test_a_proc_of_a_namespace_above_is_no_witness_even_if_the_pids_agree(self, proc: Path) -> None:
        pid = os.getpid()
        (proc / str(pid)).unlink()
        (proc / str(pid) / "ns").mkdir(parents=True)
        (proc / str(pid) / "ns" / "pid").symlink_to(os.readlink("/proc/self/ns/pid"))
        (proc / str(pid) / "stat").write_bytes(Path("/proc/self/stat").read_bytes())
        (proc / str(pid) / "status").write_text(f"Name:\tpython\nNSpid:\t{pid}\n")
        assert identify() is not None

        (proc / str(pid) / "status").write_text(f"Name:\tpython\nNSpid:\t{pid}\t{pid}\n")

        assert identify() is None


class TestOtherNamespace:
    PROGRAM = (
        "import dataclasses, json, os, sys\n"
        "from celery_selfheal.witness import ProcessIdentity, identify, is_gone\n"
        "own = identify()\n"
        "outside = ProcessIdentity(*json.loads(sys.argv[1]))\n"
        "print(json.dumps([own and dataclasses.astuple(own), is_gone(outside), os.getpid()]))"
    )

    def ask(self, *options: str) -> tuple[ProcessIdentity, ProcessIdentity | None, bool | None]:
        outside = identify()
        assert outside is not None
        command = ["unshare", "--pid", "--fork", *options, sys.executable, "-c", self.PROGRAM]
        try:
            done = subprocess.run(
                [*command, json.dumps(dataclasses.astuple(outside))],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except FileNotFoundError:
            pytest.skip("needs the program unshare")
        if done.returncode != 0 and "unshare" in done.stderr:
            pytest.skip(f"may not make a pid namespace: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        own, verdict, pid = json.loads(done.stdout)
        assert pid == 1
        return outside, None if own is None else ProcessIdentity(*own), verdict

    def test_a_namespace_with_the_proc_of_the_outer_one_has_no_witness(self) -> None:
        _, own, verdict = self.ask()

        assert own is None
        assert verdict is None

    def test_namespaces_do_not_judge_each_other(self) -> None:
        """Pid 1 in there is not pid 1 out here, and the one from in there is gone while the test looks."""
        outside, own, verdict = self.ask("--mount-proc")

        assert verdict is None
        assert own is not None
        assert own.pid == 1
        assert own.host != outside.host
        assert is_gone(own) is None
