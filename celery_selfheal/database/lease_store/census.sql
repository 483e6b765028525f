-- Which sessions have run out, who lives on my machine, and may I lead the sweep?
--
-- p_session  mine, or '' for a sweep on request    p_lead_ms  how long the lead lasts    p_ttl_ms  ttl of a session
CREATE OR REPLACE FUNCTION selfheal_census(
    p_app text, p_patience_ms bigint, p_session text, p_host text, p_lead_ms bigint, p_limit integer, p_ttl_ms bigint,
    OUT lead boolean, OUT grace boolean, OUT expired_names text[], OUT expired_abouts text[],
    OUT neighbour_names text[], OUT neighbour_abouts text[]
) LANGUAGE plpgsql AS $$
DECLARE
    fleet selfheal_fleet;
    v_now timestamptz;
    v_ttl interval := p_ttl_ms * interval '1 ms';
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    PERFORM selfheal_epoch(p_app);
    SELECT * INTO fleet FROM selfheal_fleet f WHERE f.app = p_app FOR UPDATE;
    v_now := clock_timestamp();
    -- As in a beat. A silence is forgiven once, or a fleet that is gone would never be found.
    IF NOT fleet.is_forgiven AND v_now - fleet.pulse > v_ttl / 2 THEN
        fleet.is_forgiven := true;
        fleet.grace_until := v_now + v_ttl;
    END IF;
    grace := fleet.grace_until > v_now;
    IF p_session <> '' AND NOT EXISTS (
        SELECT FROM selfheal_sessions s WHERE s.app = p_app AND s.name = p_session AND s.expires_at > v_now
    ) THEN
        -- Mine has run out as well: the store was away, perhaps, and only a beat can open the grace. It comes first.
        lead := false;
    ELSIF p_session <> '' THEN
        lead := fleet.leader IS NULL OR fleet.leader = p_session OR fleet.leads_until <= v_now;
        IF lead THEN
            fleet.leader := p_session;
            fleet.leads_until := v_now + p_lead_ms * interval '1 ms';
        END IF;
    ELSE
        lead := true;
    END IF;
    UPDATE selfheal_fleet f SET
        is_forgiven = fleet.is_forgiven, grace_until = fleet.grace_until,
        leader = fleet.leader, leads_until = fleet.leads_until
    WHERE f.app = p_app;

    -- In the grace after an outage only those that said good-bye or whose kernel spoke are surely dead.
    SELECT coalesce(array_agg(x.name), '{}'), coalesce(array_agg(x.about), '{}') INTO expired_names, expired_abouts
    FROM (
        SELECT s.name, s.about FROM selfheal_sessions s
        WHERE lead AND s.app = p_app AND s.expires_at <= CASE WHEN grace THEN '-infinity' ELSE v_now END
        ORDER BY s.expires_at, s.name LIMIT p_limit
    ) x;
    SELECT coalesce(array_agg(s.name), '{}'), coalesce(array_agg(s.about), '{}')
    INTO neighbour_names, neighbour_abouts
    FROM selfheal_sessions s WHERE s.app = p_app AND s.host = p_host AND p_host <> '';
END $$;

-- The kernel of its machine says that this session's process is gone: its session ends now.
--
-- p_about  who it was, as it was read before the kernel was asked
-- Returns  false when the session is not that process any more
CREATE OR REPLACE FUNCTION selfheal_condemn(p_app text, p_patience_ms bigint, p_session text, p_about text)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    UPDATE selfheal_sessions s SET expires_at = '-infinity'
    WHERE s.app = p_app AND s.name = p_session AND s.about = p_about;
    RETURN FOUND;
END $$;

-- Forget a dead session; false when it lives.
CREATE OR REPLACE FUNCTION selfheal_bury(p_app text, p_patience_ms bigint, p_session text)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    DELETE FROM selfheal_sessions s WHERE s.app = p_app AND s.name = p_session AND s.expires_at <= clock_timestamp();
    RETURN NOT EXISTS (SELECT FROM selfheal_sessions s WHERE s.app = p_app AND s.name = p_session);
END $$;

-- The worker itself says good-bye: it stops living, and is left to the sweep.
CREATE OR REPLACE FUNCTION selfheal_leave(p_app text, p_patience_ms bigint, p_session text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    UPDATE selfheal_sessions s SET expires_at = '-infinity' WHERE s.app = p_app AND s.name = p_session;
END $$;

-- Remove what is remembered of starts that never ended: a replayed task is not judged by them.
CREATE OR REPLACE FUNCTION selfheal_forget(p_app text, p_patience_ms bigint, p_ids text[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_id text;
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    FOR v_id IN SELECT DISTINCT id FROM unnest(p_ids) AS u (id) ORDER BY id LOOP
        task := selfheal_lock_task(p_app, v_id, false);
        IF task.task_id IS NOT NULL THEN
            task.journal := '{}';
            PERFORM selfheal_save_task(task);
        END IF;
    END LOOP;
END $$;
