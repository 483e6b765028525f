-- Take the lease on a task for one start, or say why not. A repeat by the same token changes nothing.
--
-- p_patience_ms  longest wait for a row        p_predecessor  token of the start whose retry this is, or NULL
-- p_journal_ms   how long unfinished starts are remembered   p_marker  names this very message
-- p_turn         'first', 'retry' or 'paid' (a retry that has waited for its place)
-- p_share, p_per_second, p_most   tokens that a first attempt earns, that a second earns, most that time can earn;
--                                 NULL without a budget
-- state  'held'         fence, stalls: the start may run; overtaken_*: whose lease had run out unnoticed
--        'stalled'      fence, stalls: lease taken, but the start must fail instead of running
--        'done'         detail: what the start that finished the message left to do
--        'busy'         wait_ms: left of the lease; detail: attempt of the holder
--        'over budget'  wait_ms: a retry too many, it has its place in the queue of retries
CREATE OR REPLACE FUNCTION selfheal_acquire(
    p_app text, p_patience_ms bigint, p_token text, p_id text, p_ttl_ms bigint, p_max_stalls integer, p_session text,
    p_attempt text, p_predecessor text, p_journal_ms bigint, p_marker text, p_task text, p_node text, p_pid integer,
    p_deadline_seconds double precision, p_turn text, p_share double precision, p_per_second double precision,
    p_most double precision,
    OUT state text, OUT fence bigint, OUT stalls integer, OUT wait_ms bigint, OUT detail text,
    OUT overtaken_token text, OUT overtaken_task text, OUT overtaken_owner text, OUT overtaken_seconds double precision
) LANGUAGE plpgsql AS $$
DECLARE
    task selfheal_leases;
    v_now timestamptz;
    v_expires timestamptz;
    v_follows boolean;
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    task := selfheal_lock_task(p_app, p_id, true);
    v_now := clock_timestamp();
    v_expires := v_now + p_ttl_ms * interval '1 ms';
    stalls := selfheal_unfinished(task.journal - p_token);
    IF task.token = p_token THEN
        task.expires_at := v_expires;
        PERFORM selfheal_save_task(task);
        state := CASE WHEN stalls > p_max_stalls THEN 'stalled' ELSE 'held' END;
        fence := task.fence;
        RETURN;
    END IF;

    SELECT d.failure INTO detail FROM selfheal_done d
    WHERE d.app = p_app AND d.marker = p_marker AND d.expires_at > v_now;
    IF FOUND THEN
        PERFORM selfheal_save_task(task);
        state := 'done';
        RETURN;
    END IF;

    v_follows := p_predecessor IS NOT NULL AND CASE
        WHEN task.token IS NULL THEN task.journal ? p_predecessor
        ELSE task.token = p_predecessor
    END;
    IF task.token IS NOT NULL AND NOT v_follows THEN
        state := 'busy';
        wait_ms := ceil(extract(epoch FROM task.expires_at - v_now) * 1000);
        detail := task.attempt;
        RETURN;
    END IF;

    IF p_share IS NOT NULL THEN
        wait_ms := selfheal_take_budget(p_app, p_task, p_token, p_turn, p_share, p_per_second, p_most);
        IF wait_ms > 0 THEN
            PERFORM selfheal_save_task(task);
            state := 'over budget';
            RETURN;
        END IF;
    END IF;

    fence := selfheal_next_fence();
    IF v_follows THEN
        -- The predecessor's body has ended, or this message would not exist: its start and those before it are settled.
        task.journal := '{}';
        stalls := 0;
    ELSIF task.run_token <> p_token THEN
        -- One's own record is there when the lease ran out between a lost reply and its repeat: nobody has died.
        overtaken_token := task.run_token;
        overtaken_task := task.run_task;
        overtaken_owner := coalesce(nullif(task.run_node, ''), task.run_session);
        overtaken_seconds := extract(epoch FROM v_now - task.run_acquired_at);
        PERFORM selfheal_count(p_app, 'stalls', p_task, 1);
    END IF;

    task.token := p_token;
    task.fence := fence;
    task.attempt := p_attempt;
    task.expires_at := v_expires;
    task.run_token := p_token;
    task.run_session := p_session;
    task.run_task := p_task;
    task.run_node := p_node;
    task.run_pid := p_pid;
    task.run_deadline_seconds := p_deadline_seconds;
    task.run_acquired_at := v_now;
    state := 'stalled';
    IF stalls <= p_max_stalls THEN
        state := 'held';
        task.journal := task.journal || jsonb_build_object(p_token, fence);
        task.kept_until := v_now + p_journal_ms * interval '1 ms';
        PERFORM selfheal_count(p_app, 'starts', p_task, 1);
    END IF;
    PERFORM selfheal_save_task(task);
END $$;

-- Whether this very start holds the lease of its task now.
CREATE OR REPLACE FUNCTION selfheal_is_held(p_app text, p_patience_ms bigint, p_id text, p_token text)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM selfheal_enter(p_patience_ms);
    RETURN EXISTS (
        SELECT FROM selfheal_leases l
        WHERE l.app = p_app AND l.task_id = p_id AND l.token = p_token AND l.expires_at > clock_timestamp()
    );
END $$;
