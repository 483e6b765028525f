-- Remove the in-flight records of starts that stalled, each once. Their tokens stay in the journal: that is the stall.
--
-- p_session  dead session whose leases end now, or NULL for leases that have run out by themselves
CREATE OR REPLACE FUNCTION selfheal_expire(p_app text, p_patience_ms bigint, p_session text, p_limit integer)
RETURNS TABLE (
    stalled_id text, stalled_task text, stalled_token text, stalled_owner text, stalled_seconds double precision,
    unfinished integer
) LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_now timestamptz := clock_timestamp();
    v_ids text[];
    v_tasks text[];
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    IF p_session IS NULL THEN
        v_ids := ARRAY(
            SELECT l.task_id FROM selfheal_leases l
            WHERE l.app = p_app AND l.run_token IS NOT NULL AND l.expires_at <= v_now
            ORDER BY l.expires_at LIMIT p_limit
        );
    ELSE
        v_ids := ARRAY(
            SELECT l.task_id FROM selfheal_leases l
            WHERE l.app = p_app AND l.run_token IS NOT NULL AND l.run_session = p_session LIMIT p_limit
        );
    END IF;
    IF v_ids = '{}' THEN
        RETURN;
    END IF;
    PERFORM FROM selfheal_leases l WHERE l.app = p_app AND l.task_id = ANY (v_ids) ORDER BY l.task_id FOR UPDATE;
    -- It has beaten again since it was found dead. Where sessions live in another store, it never exists here.
    IF p_session IS NOT NULL AND EXISTS (
        SELECT FROM selfheal_sessions s WHERE s.app = p_app AND s.name = p_session AND s.expires_at > clock_timestamp()
    ) THEN
        RETURN;
    END IF;
    FOR task IN
        SELECT * FROM selfheal_leases l WHERE l.app = p_app AND l.task_id = ANY (v_ids) AND l.run_token IS NOT NULL
            AND CASE WHEN p_session IS NULL THEN l.expires_at <= v_now ELSE l.run_session = p_session END
        ORDER BY l.task_id
    LOOP
        stalled_id := task.task_id;
        stalled_task := task.run_task;
        stalled_token := task.run_token;
        stalled_owner := coalesce(nullif(task.run_node, ''), task.run_session);
        stalled_seconds := extract(epoch FROM clock_timestamp() - task.run_acquired_at);
        IF task.kept_until <= v_now THEN
            task.journal := '{}';
        END IF;
        unfinished := selfheal_unfinished(task.journal);
        IF task.token = task.run_token OR task.expires_at <= v_now THEN
            task.token := NULL;
        END IF;
        task.run_token := NULL;
        PERFORM selfheal_save_task(task);
        v_tasks := v_tasks || stalled_task;
        RETURN NEXT;
    END LOOP;
    PERFORM selfheal_count(p_app, 'stalls', t.name, t.times)
    FROM (SELECT name, count(*) AS times FROM unnest(v_tasks) AS u (name) GROUP BY name ORDER BY name) t;
END $$;

-- Remove up to p_limit rows of each kind that have run out, of every application.
--
-- Returns  how many of the kind that had most
CREATE OR REPLACE FUNCTION selfheal_clean(p_patience_ms bigint, p_limit integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_most bigint := 0;
    v_count bigint;
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    DELETE FROM selfheal_done WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM selfheal_done WHERE expires_at <= v_now
        ORDER BY expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    DELETE FROM selfheal_waits WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM selfheal_waits WHERE expires_at <= v_now
        ORDER BY expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    DELETE FROM selfheal_budgets WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM selfheal_budgets WHERE expires_at <= v_now
        ORDER BY expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    DELETE FROM selfheal_leases WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM selfheal_leases
        WHERE run_token IS NULL AND kept_until <= v_now AND (token IS NULL OR expires_at <= v_now)
        ORDER BY kept_until LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_most := greatest(v_most, v_count);
    -- A sweep buries its own application's dead long before: this is for applications that are gone.
    DELETE FROM selfheal_sessions WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM selfheal_sessions WHERE expires_at BETWEEN '1970-01-01' AND v_now - interval '7 days'
        LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN greatest(v_most, v_count);
END $$;
