"""What the plugin costs and how fast it heals, measured on this machine.

``python -m benchmarks.NAME`` prints a table, with ``--json`` one JSON document; progress goes to standard error. Each
starts servers and workers of its own. Compare figures of one run only: a laptop is not a server.

* ``dedup``: effects once in one transaction, beside the same transaction written by hand; a purge beside tasks
* ``latency``: how soon an idle worker picks a task up, beside plain Celery
* ``recovery``: how long after SIGKILL the tasks go on
* ``roundtrips``: calls to Redis for each task and each beat
* ``stampede``: how many retries start at once when all tasks of a crowd fail together (a simulation)
* ``sweep``: one sweep beside up to a million live leases
* ``throughput``: tasks a second, beside plain Celery
"""
