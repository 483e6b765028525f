-- One beat of a worker: renew its session and the leases of its running starts.
-- Expiry is set, never added to; a repeat changes nothing.
--
-- p_mode  'join' begins the session, 'stay' renews it, 'none' leaves it alone
-- p_tokens, p_ids, p_tasks   token, task id and task name of each lease
-- epoch     changes when the store was emptied
-- standing  'kept' | 'again' | 'begun' | 'lost', or NULL without a session
-- answers   of each lease: 'held'; 'lost', another start has it; 'idle', this start has not begun or has ended
CREATE OR REPLACE FUNCTION selfheal_beat(
    p_app text, p_patience_ms bigint, p_session text, p_ttl_ms bigint, p_mode text, p_about text, p_host text,
    p_node text, p_tokens text[], p_ids text[], p_tasks text[],
    OUT epoch text, OUT standing text, OUT answers text[]
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    answers := selfheal_renew(p_app, p_session, p_ttl_ms * interval '1 ms', p_node, p_tokens, p_ids, p_tasks);
    IF p_mode <> 'none' THEN
        standing := selfheal_renew_session(p_app, p_session, p_ttl_ms * interval '1 ms', p_mode, p_about, p_host);
    END IF;
    epoch := selfheal_epoch(p_app);
END $$;

CREATE OR REPLACE FUNCTION selfheal_epoch(p_app text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_epoch text;
BEGIN
    LOOP
        SELECT f.epoch INTO v_epoch FROM selfheal_fleet f WHERE f.app = p_app;
        IF FOUND THEN
            RETURN v_epoch;
        END IF;
        INSERT INTO selfheal_fleet (app, epoch)
        VALUES (p_app, md5(random()::text || clock_timestamp()::text || pg_backend_pid()::text))
        ON CONFLICT DO NOTHING;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION selfheal_renew(
    p_app text, p_session text, p_ttl interval, p_node text, p_tokens text[], p_ids text[], p_tasks text[]
) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_now timestamptz;
    v_answers text[];
    v_last record;
BEGIN
    IF p_ids = '{}' THEN
        RETURN '{}';
    END IF;
    PERFORM FROM selfheal_leases l WHERE l.app = p_app AND l.task_id = ANY (p_ids) ORDER BY l.task_id FOR UPDATE;
    v_now := clock_timestamp();
    WITH renewed AS (
        UPDATE selfheal_leases l SET expires_at = v_now + p_ttl
        FROM unnest(p_tokens, p_ids) AS asked (token, id)
        WHERE l.app = p_app AND l.task_id = asked.id AND l.token = asked.token AND l.expires_at > v_now
        RETURNING l.token
    )
    SELECT array_agg(CASE WHEN r.token IS NULL THEN 'idle' ELSE 'held' END ORDER BY asked.n) INTO v_answers
    FROM unnest(p_tokens) WITH ORDINALITY AS asked (token, n) LEFT JOIN renewed r USING (token);

    FOR n IN 1 .. cardinality(p_ids) LOOP
        CONTINUE WHEN v_answers[n] = 'held';
        task := selfheal_lock_task(p_app, p_ids[n], false);
        CONTINUE WHEN NOT coalesce(task.journal ? p_tokens[n], false);
        v_answers[n] := 'lost';
        CONTINUE WHEN task.token IS NOT NULL;
        SELECT * INTO v_last FROM selfheal_last_start(task.journal);
        CONTINUE WHEN v_last.token <> p_tokens[n] OR v_last.fence < 0;
        -- It ran out (outage) and no later start has taken it: take it again under the same fence.
        v_answers[n] := 'held';
        task.token := p_tokens[n];
        task.fence := v_last.fence;
        task.attempt := '';
        task.expires_at := v_now + p_ttl;
        IF task.run_token IS NULL THEN
            task.run_token := p_tokens[n];
            task.run_session := p_session;
            task.run_task := p_tasks[n];
            task.run_node := p_node;
            task.run_pid := NULL;
            task.run_deadline_seconds := NULL;
            task.run_acquired_at := v_now;
        END IF;
        PERFORM selfheal_save_task(task);
    END LOOP;
    RETURN v_answers;
END $$;

CREATE OR REPLACE FUNCTION selfheal_renew_session(
    p_app text, p_session text, p_ttl interval, p_mode text, p_about text, p_host text
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_expires timestamptz;
    v_standing text := 'lost';
    v_now timestamptz;
BEGIN
    SELECT s.expires_at INTO v_expires FROM selfheal_sessions s
    WHERE s.app = p_app AND s.name = p_session FOR UPDATE;
    v_now := clock_timestamp();
    IF FOUND THEN
        v_standing := CASE WHEN v_expires > v_now THEN 'kept' ELSE 'again' END;
        UPDATE selfheal_sessions s SET
            expires_at = v_now + p_ttl,
            about = CASE WHEN v_standing = 'kept' THEN s.about ELSE p_about END,
            host = CASE WHEN v_standing = 'kept' THEN s.host ELSE p_host END
        WHERE s.app = p_app AND s.name = p_session;
    ELSIF p_mode = 'join' THEN
        v_standing := 'begun';
        INSERT INTO selfheal_sessions VALUES (p_app, p_session, p_about, p_host, v_now + p_ttl);
    END IF;
    PERFORM selfheal_epoch(p_app);
    UPDATE selfheal_fleet f SET
        -- Nobody has beaten for long: the store was away, so no session's expiry proves a death. A silence of half a
        -- ttl can end a session: its last beat was up to a third of a ttl older.
        grace_until = CASE WHEN v_now - f.pulse > p_ttl / 2 THEN v_now + p_ttl ELSE f.grace_until END,
        pulse = greatest(f.pulse, v_now),
        is_forgiven = false
    WHERE f.app = p_app;
    RETURN v_standing;
END $$;
