-- What the functions of the lease store share. Rows are locked in this order, so that none waits in a circle:
-- leases (several: by task id), budget, fence, done marker, counters ('stalls' before others), session, fleet.

-- Begin a step: wait for no row longer than the client has patience, and for one call only.
CREATE OR REPLACE FUNCTION selfheal_enter(p_patience_ms bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Each statement must see what was committed while the one before it waited for a lock.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the lease store needs the isolation level "read committed", got "%"; correct'
            ' default_transaction_isolation of this role or database', current_setting('transaction_isolation');
    END IF;
    PERFORM set_config('lock_timeout', greatest(1, p_patience_ms)::text, true);
END $$;

-- Lock the row of a task until the end of the transaction; what has run out is taken out of the copy.
-- Returns a row without task id when there is none and none shall be made.
CREATE OR REPLACE FUNCTION selfheal_lock_task(p_app text, p_id text, p_make boolean)
RETURNS selfheal_leases LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_now timestamptz;
BEGIN
    LOOP
        SELECT * INTO task FROM selfheal_leases l WHERE l.app = p_app AND l.task_id = p_id FOR UPDATE;
        EXIT WHEN FOUND OR NOT p_make;
        -- An insert that meets an uncommitted one waits; then the row is there, or is gone again.
        INSERT INTO selfheal_leases (app, task_id) VALUES (p_app, p_id) ON CONFLICT DO NOTHING;
    END LOOP;
    v_now := clock_timestamp();
    IF task.expires_at <= v_now THEN
        task.token := NULL;
    END IF;
    IF task.kept_until <= v_now THEN
        task.journal := '{}';
    END IF;
    RETURN task;
END $$;

-- Write a locked row back; a task that nothing is known of leaves none.
CREATE OR REPLACE FUNCTION selfheal_save_task(task selfheal_leases) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF task.token IS NULL AND task.run_token IS NULL AND task.journal = '{}' THEN
        DELETE FROM selfheal_leases l WHERE l.app = task.app AND l.task_id = task.task_id;
    ELSE
        UPDATE selfheal_leases l SET
            token = task.token, fence = task.fence, attempt = task.attempt, expires_at = task.expires_at,
            run_token = task.run_token, run_session = task.run_session, run_task = task.run_task,
            run_node = task.run_node, run_pid = task.run_pid, run_deadline_seconds = task.run_deadline_seconds,
            run_acquired_at = task.run_acquired_at, journal = task.journal, kept_until = task.kept_until
        WHERE l.app = task.app AND l.task_id = task.task_id;
    END IF;
END $$;

-- The last start in a journal, by fence.
CREATE OR REPLACE FUNCTION selfheal_last_start(p_journal jsonb, OUT token text, OUT fence bigint) LANGUAGE plpgsql AS $$
BEGIN
    SELECT j.key, j.value::bigint INTO token, fence FROM jsonb_each(p_journal) j ORDER BY j.value::bigint DESC LIMIT 1;
END $$;

CREATE OR REPLACE FUNCTION selfheal_unfinished(p_journal jsonb) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT count(*) FROM jsonb_object_keys(p_journal));
END $$;

CREATE OR REPLACE FUNCTION selfheal_count(p_app text, p_event text, p_task text, p_by bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO selfheal_counters AS c (app, event, task, slot, value)
    VALUES (p_app, p_event, coalesce(p_task, ''), pg_backend_pid() % 32, p_by)
    ON CONFLICT (app, event, task, slot) DO UPDATE SET value = c.value + EXCLUDED.value;
END $$;

-- A fence: larger than any before it, and no less than the microseconds of the clock, so that it grows even where
-- another store gave out fences before. A sequence, since a row would hold every start up until the commit of another.
CREATE OR REPLACE FUNCTION selfheal_next_fence() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_now_us bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    v_fence bigint := nextval('selfheal_fence');
BEGIN
    IF v_fence < v_now_us THEN
        -- About once a second somebody sets it a second ahead; alone, since setval() could set it back else.
        PERFORM pg_advisory_xact_lock(hashtextextended('selfheal_fence', 0));
        v_fence := nextval('selfheal_fence');
        IF v_fence < v_now_us THEN
            v_fence := setval('selfheal_fence', v_now_us + 1000000);
        END IF;
    END IF;
    RETURN v_fence;
END $$;
