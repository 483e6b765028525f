"""Watches a run: what has started and ended, what the logs tell, what is left; and has it shown."""

from __future__ import annotations

import time
from collections import Counter

import redis
from celery import states

from example_project.app import app
from example_project.display import Display
from example_project.evidence import Started, starts
from example_project.fleet import Fleet
from example_project.ledger import Ledger
from example_project.strikes import Recovery, Strike, recovery

STUCK_SECONDS = 40  # without a start or an end of any task


class Watch:
    """What is seen of a run so far.

    Attributes:
        starts: All starts of tasks, as of the last look.
        poison_id: Id of the poison task, once it is sent.
    """

    def __init__(self, ledger: Ledger, fleet: Fleet, client: redis.Redis, display: Display) -> None:
        self.starts: list[Started] = []
        self.poison_id = ""
        self._engine = ledger.engine
        self._fleet = fleet
        self._client = client
        self._display = display
        self._healed_told = 0
        self._poison_told = 0
        self._moved_at = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing has moved for too long."""
        return time.monotonic() - self._moved_at > STUCK_SECONDS

    def look(self) -> None:
        """Look at everything once, and show what is new."""
        for news in self._fleet.look():
            self._display.tell(news, "cyan")
        before, self.starts = self._work(), starts(self._engine)
        if before != self._work():
            self._moved_at = time.monotonic()
        self._tell_healing()
        self._tell_poison()
        self._display.update(
            self.count_ended("charge"),
            self.count_ended("receipt"),
            self._fleet.states,
            Counter(start.worker for start in self.starts),
        )

    def count_ended(self, task: str) -> int:
        """How many orders a task is done with."""
        return len({start.subject for start in self.starts if start.task == task and start.ended_ms})

    def running(self, name: str) -> list[Started]:
        """Charges that are under way in a worker, by the books of this moment."""
        pids = self._fleet.workers[name].child_pids()
        return [
            start
            for start in starts(self._engine)
            if start.task == "charge" and start.ended_ms is None and start.worker == name and start.pid in pids
        ]

    def recovery(self, strike: Strike) -> Recovery:
        """How far a strike is healed."""
        return recovery(strike, self._work(), self.ids(strike, "recovered"))

    def ids(self, strike: Strike, what: str) -> set[str]:
        """Tasks of a struck worker, ``recovered`` or ``stalled``, by the logs; without the poison task."""
        ids = {one.task_id for one in self._fleet.healed if one.what == what and one.worker == strike.worker}
        return ids - {self.poison_id}

    def left_over(self) -> int:
        """Messages that wait in a queue, or were taken and not acknowledged; the keys are kombu's."""
        waiting = sum(self._client.llen(queue.name) for queue in app.conf.task_queues)
        return waiting + self._client.hlen("unacked")

    def are_ready(self, *task_ids: str) -> bool:
        """Whether all have a result, good or bad."""
        return all(app.backend.get_state(task_id) in states.READY_STATES for task_id in task_ids)

    def _work(self) -> list[Started]:
        """All starts but those of the poison task: a task that is started for ever is no progress."""
        return [start for start in self.starts if start.task_id != self.poison_id]

    def _tell_healing(self) -> None:
        fresh = self._fleet.healed[self._healed_told :]
        self._healed_told += len(fresh)
        back = Counter((one.worker, one.task) for one in fresh if one.what == "recovered")
        for (worker, task), count in back.items():
            self._display.tell(f"back in the queue: {count} x {task}, held by {worker}", "green")

    def _tell_poison(self) -> None:
        fresh = [start for start in self.starts if start.task_id == self.poison_id][self._poison_told :]
        for start in fresh:
            self._poison_told += 1
            self._display.tell(
                f"poison task, start {self._poison_told}: a process of {start.worker} is dead", "magenta"
            )
