"""Workers with and without the plugin on one queue: each dies by its own rules, and both are healed."""

from __future__ import annotations

from integration.outages.crew import SHORT_TTL, Crew

VISIBILITY_SECONDS = 15


def test_what_a_stock_worker_held_comes_back_after_its_visibility_timeout_by_our_sweep(crew: Crew) -> None:
    crew.settings = dict(SHORT_TTL, broker_transport_options={"visibility_timeout": VISIBILITY_SECONDS})
    gate = crew.gate()

    def fill(node: str, app: str) -> list[str]:
        # Of two workers on one queue the first is full when the second comes: it holds one running and three more.
        worker = crew.start(node, app=app)
        run = crew.load(f"{node}-running", gate)
        crew.wait_started([run])
        tasks = [run, *(crew.ship(f"{node}-reserved-{n}") for n in range(3))]
        crew.wait("it holds them", lambda: crew.held().keys() >= set(tasks))
        assert worker.alive
        return tasks

    stock = fill("stock", "stock")
    received_at = {task_id: crew.received_at(task_id) for task_id in stock}
    ours = fill("ours", "depot")
    for worker in crew.workers:
        worker.kill_group()
    gate.open()
    crew.start("healer")
    crew.wait_ended([*ours, *stock])
    crew.wait_nothing_left()

    for task_id in stock:
        start = crew.diary.starts(task_id)[-1]
        assert start.node == "healer"
        assert start.clock > received_at[task_id] + VISIBILITY_SECONDS - 1  # kombu rounds to whole seconds
    for tasks in (stock, ours):
        counts = crew.diary.counts("start")
        assert [counts[task_id] for task_id in tasks] == [2, 1, 1, 1]
    told = [worker.log_text().count("visibility timeout") for worker in crew.workers[1:]]
    assert sum(told) == len(stock)
