"""The command line as it is typed: each command once, in a process of its own."""

from __future__ import annotations

import json
import signal

from integration.dead_letters.desk import Desk


def test_every_command_as_it_is_typed(redis_desk: Desk) -> None:
    desk = redis_desk
    desk.bury(3)

    listed = desk.cli("list", "--json")
    shown = desk.cli("show", "dead-1")
    replayed = desk.cli("replay", "--id", "dead-1", "--json")
    unknown = desk.cli("drop", "--id", "nobody")
    exported = desk.cli("export")
    dropped = desk.cli("drop", "--yes")

    assert [one["id"] for one in json.loads(listed.stdout)] == ["dead-0", "dead-1", "dead-2"]
    assert "ConnectionError" in shown.stdout
    assert json.loads(replayed.stdout)["replayed"] == 1
    assert "orders.ship[dead-1]" in replayed.stderr
    assert (listed.returncode, unknown.returncode, dropped.returncode) == (0, 1, 0)
    assert [json.loads(line)["id"] for line in exported.stdout.splitlines()] == ["dead-0", "dead-2"]
    assert dropped.stdout == "2 dropped\n"
    assert [envelope["headers"]["id"] for envelope in desk.deliveries(desk.queue)] == ["dead-1"]
    assert len(desk.dlq) == 0


def test_ctrl_c_ends_a_replay_between_two_entries_and_the_next_one_does_the_rest(redis_desk: Desk) -> None:
    desk = redis_desk
    ids = desk.bury(200)
    replaying = desk.start_cli("replay", "--rate", "40", "--json")
    desk.wait("some are replayed", lambda: len(desk.deliveries(desk.queue)) > 10)

    replaying.send_signal(signal.SIGINT)
    replaying.wait(timeout=30)
    output = (desk.folder / "cli.log").read_text()
    done = len(desk.deliveries(desk.queue))

    assert replaying.returncode == 130
    assert f'"replayed": {done}' in output
    assert "run it again for the rest" in output
    assert 10 < done < len(ids)
    assert desk.dlq.replay().replayed == len(ids) - done
    assert [envelope["headers"]["id"] for envelope in desk.deliveries(desk.queue)] == ids


def test_a_hundred_thousand_entries_are_listed_page_by_page(redis_desk: Desk) -> None:
    desk = redis_desk
    desk.bury(3)
    entry = desk.redis.lindex(desk.dlq_name, 0)
    for _ in range(10):
        desk.redis.rpush(desk.dlq_name, *[entry] * 10_000)
    before = int(desk.redis.info("stats")["total_net_output_bytes"])

    assert len(desk.dlq) == 100_003
    assert len(list(desk.dlq.list(limit=10))) == 10

    assert int(desk.redis.info("stats")["total_net_output_bytes"]) - before < 10_000 * len(entry)
