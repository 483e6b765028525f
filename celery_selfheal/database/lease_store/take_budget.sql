-- Account for one start in the retry budget of its task name, as RetryBudget.take does.
--
-- Returns  milliseconds that a retry must wait for its place; 0 when it may start
CREATE OR REPLACE FUNCTION selfheal_take_budget(
    p_app text, p_task text, p_token text, p_turn text, p_share double precision, p_per_second double precision,
    p_most double precision
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    bucket selfheal_budgets;
    v_now timestamptz;
    v_now_ms bigint;
    v_window_ms bigint := round(p_most / p_per_second * 1000);
    v_windows bigint;
    v_recent double precision;
    v_wait_ms bigint;
BEGIN
    IF p_turn = 'retry' THEN
        SELECT w.wait_ms INTO v_wait_ms FROM selfheal_waits w
        WHERE w.app = p_app AND w.token = p_token AND w.expires_at > clock_timestamp();
        IF FOUND THEN
            RETURN v_wait_ms;
        END IF;
        INSERT INTO selfheal_budgets VALUES (p_app, p_task, p_most, 0, 0, 0, '-infinity') ON CONFLICT DO NOTHING;
        SELECT * INTO bucket FROM selfheal_budgets b WHERE b.app = p_app AND b.task = p_task FOR UPDATE;
    ELSE
        SELECT * INTO bucket FROM selfheal_budgets b WHERE b.app = p_app AND b.task = p_task FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            INSERT INTO selfheal_budgets VALUES (p_app, p_task, p_most, 0, 0, 0, '-infinity')
            ON CONFLICT DO NOTHING RETURNING * INTO bucket;
            -- Another start writes it just now. Rather a share less than first attempts that wait for its commit.
            IF NOT FOUND THEN
                RETURN 0;
            END IF;
        END IF;
    END IF;

    v_now := clock_timestamp();
    v_now_ms := floor(extract(epoch FROM v_now) * 1000);
    IF bucket.expires_at <= v_now THEN
        bucket.tokens := p_most;
        bucket.at_ms := v_now_ms;
        bucket.firsts := 0;
        bucket.firsts_before := 0;
    END IF;
    v_windows := v_now_ms / v_window_ms - bucket.at_ms / v_window_ms;
    IF v_windows > 0 THEN
        bucket.firsts_before := CASE WHEN v_windows = 1 THEN bucket.firsts ELSE 0 END;
        bucket.firsts := 0;
    END IF;
    IF bucket.tokens < p_most THEN
        bucket.tokens := least(p_most, bucket.tokens + greatest(0, v_now_ms - bucket.at_ms) / 1000.0 * p_per_second);
    END IF;
    -- Shares go with the first attempts that earned them: a quiet week must not pay for a stampede.
    v_recent := bucket.firsts + bucket.firsts_before * (1 - (v_now_ms % v_window_ms)::double precision / v_window_ms);
    bucket.tokens := least(bucket.tokens, p_most + p_share * v_recent);
    IF p_turn = 'first' THEN
        bucket.tokens := bucket.tokens + p_share;
        bucket.firsts := bucket.firsts + 1;
    ELSIF p_turn = 'retry' THEN
        bucket.tokens := bucket.tokens - 1;
    END IF;
    UPDATE selfheal_budgets b SET
        tokens = bucket.tokens, at_ms = v_now_ms, firsts = bucket.firsts, firsts_before = bucket.firsts_before,
        -- For as long as the bucket is not as good as new.
        expires_at = v_now + (ceil(greatest(0, p_most - bucket.tokens) / p_per_second * 1000) + 2 * v_window_ms)
            * interval '1 ms'
    WHERE b.app = p_app AND b.task = p_task;
    IF p_turn <> 'retry' OR bucket.tokens >= 0 THEN
        RETURN 0;
    END IF;
    v_wait_ms := ceil(-bucket.tokens / p_per_second * 1000);
    INSERT INTO selfheal_waits AS w VALUES (p_app, p_token, v_wait_ms, v_now + interval '1 minute')
    ON CONFLICT (app, token) DO UPDATE SET wait_ms = EXCLUDED.wait_ms, expires_at = EXCLUDED.expires_at;
    PERFORM selfheal_count(p_app, 'over_budget', p_task, 1);
    RETURN v_wait_ms;
END $$;
