-- What the lease store keeps in PostgreSQL. One database may serve several applications: "app" names whose row it is.
-- Expiry is judged by clock_timestamp(); a row that has run out counts as absent, whether it was removed or not.

CREATE SEQUENCE IF NOT EXISTS selfheal_fence;

CREATE TABLE IF NOT EXISTS selfheal_leases (
    app text NOT NULL,
    task_id text NOT NULL,
    -- The lease; without a token, or after its expiry, nobody holds it.
    token text,
    fence bigint,
    attempt text,
    expires_at timestamptz NOT NULL DEFAULT '-infinity',
    -- The in-flight record: which start the reaper takes for stalled once expires_at has passed.
    run_token text,
    run_session text,
    run_task text,
    run_node text,
    run_pid integer,
    run_deadline_seconds double precision,
    run_acquired_at timestamptz,
    -- Unfinished starts, token -> fence. Below 0: it died before it could acquire, and is no later start than others.
    journal jsonb NOT NULL DEFAULT '{}',
    kept_until timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT pk_selfheal_leases PRIMARY KEY (app, task_id)
);
CREATE INDEX IF NOT EXISTS ix_selfheal_leases_expiry ON selfheal_leases (app, expires_at) WHERE run_token IS NOT NULL;
CREATE INDEX IF NOT EXISTS ix_selfheal_leases_session ON selfheal_leases (app, run_session) WHERE run_token IS NOT NULL;
CREATE INDEX IF NOT EXISTS ix_selfheal_leases_journal ON selfheal_leases (kept_until) WHERE run_token IS NULL;

-- Done markers: which start finished this very message, and what it left to do.
CREATE TABLE IF NOT EXISTS selfheal_done (
    app text NOT NULL,
    marker text NOT NULL,
    token text NOT NULL,
    failure text NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_selfheal_done PRIMARY KEY (app, marker)
);
CREATE INDEX IF NOT EXISTS ix_selfheal_done_expiry ON selfheal_done (expires_at);

-- Worker sessions; '-infinity' is one that said good-bye, or whose death its kernel has told.
CREATE TABLE IF NOT EXISTS selfheal_sessions (
    app text NOT NULL,
    name text NOT NULL,
    about text NOT NULL,
    host text NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_selfheal_sessions PRIMARY KEY (app, name)
);

-- One row an application: the last beat of any worker, the grace after an outage, the epoch, and who leads the sweep.
CREATE TABLE IF NOT EXISTS selfheal_fleet (
    app text NOT NULL,
    epoch text NOT NULL,
    pulse timestamptz,
    is_forgiven boolean NOT NULL DEFAULT false,
    grace_until timestamptz NOT NULL DEFAULT '-infinity',
    leader text,
    leads_until timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT pk_selfheal_fleet PRIMARY KEY (app)
);

-- Retry budgets, one bucket a task name. No index but the key: with another, each start would leave a dead entry in it.
CREATE TABLE IF NOT EXISTS selfheal_budgets (
    app text NOT NULL,
    task text NOT NULL,
    tokens double precision NOT NULL,
    at_ms bigint NOT NULL,
    firsts double precision NOT NULL,
    firsts_before double precision NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_selfheal_budgets PRIMARY KEY (app, task)
);

-- What a retry above its budget was told to wait, so that a repeat of the question takes no second place.
CREATE TABLE IF NOT EXISTS selfheal_waits (
    app text NOT NULL,
    token text NOT NULL,
    wait_ms bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_selfheal_waits PRIMARY KEY (app, token)
);
CREATE INDEX IF NOT EXISTS ix_selfheal_waits_expiry ON selfheal_waits (expires_at);

-- Counts of events, to be summed over the slots: one row each would make every start wait for the commit of another.
CREATE TABLE IF NOT EXISTS selfheal_counters (
    app text NOT NULL,
    event text NOT NULL,
    task text NOT NULL,
    slot integer NOT NULL,
    value bigint NOT NULL,
    CONSTRAINT pk_selfheal_counters PRIMARY KEY (app, event, task, slot)
);
