-- Give a lease back, by its token only. A repeat changes nothing.
--
-- p_ended   the start came to an end of its own; else it is a hand-over
-- p_done_ms how long the done marker is kept; NULL leaves none     p_failure  what the marker holds
-- p_event   what the end is counted as
-- Returns  false when another start holds the lease or has finished the task since
CREATE OR REPLACE FUNCTION selfheal_release(
    p_app text, p_patience_ms bigint, p_token text, p_id text, p_ended boolean, p_marker text, p_done_ms bigint,
    p_failure text, p_event text, p_task text
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_is_mine boolean;
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    task := selfheal_lock_task(p_app, p_id, false);
    IF task.token IS NULL THEN
        -- An expired lease that nobody has taken since is still ours to settle.
        v_is_mine := coalesce((SELECT last.token = p_token FROM selfheal_last_start(task.journal) last), false);
    ELSE
        v_is_mine := task.token = p_token;
    END IF;

    IF NOT v_is_mine THEN
        IF task.journal ? p_token THEN
            task.journal := task.journal - p_token;
            PERFORM selfheal_save_task(task);
        END IF;
        RETURN task.token IS NULL AND NOT EXISTS (
            SELECT FROM selfheal_done d
            WHERE d.app = p_app AND d.marker = p_marker AND d.expires_at > clock_timestamp() AND d.token <> p_token
        );
    END IF;

    task.token := NULL;
    task.journal := CASE WHEN p_ended THEN '{}' ELSE task.journal - p_token END;
    IF task.run_token = p_token THEN
        task.run_token := NULL;
    END IF;
    PERFORM selfheal_save_task(task);
    IF p_done_ms IS NOT NULL THEN
        INSERT INTO selfheal_done VALUES
            (p_app, p_marker, p_token, p_failure, clock_timestamp() + p_done_ms * interval '1 ms')
        ON CONFLICT (app, marker) DO UPDATE
        SET token = EXCLUDED.token, failure = EXCLUDED.failure, expires_at = EXCLUDED.expires_at;
    END IF;
    PERFORM selfheal_count(p_app, p_event, p_task, 1);
    RETURN true;
END $$;
