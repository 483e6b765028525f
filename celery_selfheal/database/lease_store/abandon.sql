-- Count a start whose process died, and free its lease. A repeat by the same token changes nothing.
--
-- Returns  the number of unfinished starts; NULL when this very start had finished its message
CREATE OR REPLACE FUNCTION selfheal_abandon(
    p_app text, p_patience_ms bigint, p_token text, p_id text, p_journal_ms bigint, p_marker text, p_task text
) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_now timestamptz;
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    task := selfheal_lock_task(p_app, p_id, true);
    v_now := clock_timestamp();
    IF EXISTS (
        SELECT FROM selfheal_done d
        WHERE d.app = p_app AND d.marker = p_marker AND d.token = p_token AND d.expires_at > v_now
    ) THEN
        PERFORM selfheal_save_task(task);
        RETURN NULL;
    END IF;
    -- One that died before it could acquire is counted, too, or a message that kills its decoder loops for ever.
    IF task.run_token = p_token OR NOT task.journal ? p_token THEN
        PERFORM selfheal_count(p_app, 'stalls', p_task, 1);
    END IF;
    IF task.token = p_token THEN
        task.token := NULL;
    END IF;
    IF task.run_token = p_token THEN
        task.run_token := NULL;
    END IF;
    IF NOT task.journal ? p_token THEN
        -- Below every start that has held the lease: it is no later start than they are.
        task.journal := task.journal
            || jsonb_build_object(p_token, (extract(epoch FROM v_now) * 1000000)::bigint - 10000000000000000);
    END IF;
    task.kept_until := v_now + p_journal_ms * interval '1 ms';
    PERFORM selfheal_save_task(task);
    RETURN selfheal_unfinished(task.journal);
END $$;
