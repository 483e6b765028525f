-- Take the lease on a task for one start, or say why not. A repeat by the same token changes nothing.
--
-- KEYS[1]  lease:<id>        KEYS[2]  journal:<id>   KEYS[3]  done:<marker>   KEYS[4]  wait:<token>
-- KEYS[5]  budget:<task>     KEYS[6]  inflight       KEYS[7]  expiry index    KEYS[8]  fence
-- KEYS[9]  counters          KEYS[10] held:<session>
-- KEYS[11] unacked           KEYS[12] owned:<session>     (only with ARGV[5])
-- ARGV[1]  token             ARGV[2]  task id        ARGV[3]  attempt         ARGV[4]  predecessor's token or ''
-- ARGV[5]  delivery tag or ''
-- ARGV[6]  'first', 'retry' or 'paid' (a retry that has waited for its place)
-- ARGV[7]  session           ARGV[8]  task name      ARGV[9]  record for people and the reaper (JSON)
-- ARGV[10] ttl, ms           ARGV[11] max_stalls     ARGV[12] journal's ttl, ms
-- ARGV[13] tokens that a first attempt earns, or '' without a budget    ARGV[14] tokens that a second earns
-- ARGV[15] most tokens that time can earn
-- ARGV[16] what our keys begin with: names of lock keys are made of it here, since scripts find them without being told
-- ARGV[17] lock key, only if the task has one
-- Returns  one text, since that costs the client least:
--          'held <fence> <stalls> <overtaken record or nothing>'   the start may run
--          'stalled <fence> <stalls> '     lease taken, but the start must fail instead of running
--          'done <token, and after a space what the start left to do>'
--          'busy <ms left> <attempt of the holder>'                'not-mine'
--          'busy-lock <ms left> <node of the holder>'      another task has the lock key
--          'over-budget <ms to wait>'      a retry too many: it has its place in the queue of retries
local token, id, ttl = ARGV[1], ARGV[2], tonumber(ARGV[10])

if ARGV[5] ~= '' and
    (redis.call('HEXISTS', KEYS[11], ARGV[5]) == 0 or redis.call('HEXISTS', KEYS[12], ARGV[5]) == 0) then
  return 'not-mine'
end

local root, wanted = ARGV[16], ARGV[17]
local holder, locked = unpack(redis.call('HMGET', KEYS[1], 'token', 'lock'))
local unfinished = redis.call('ZCARD', KEYS[2])
local stalls = unfinished
if stalls > 0 and redis.call('ZSCORE', KEYS[2], token) then
  stalls = stalls - 1
end
if holder == token then
  redis.call('PEXPIRE', KEYS[1], ttl)
  if locked and redis.call('HGET', root .. ':lock:' .. locked, 'token') == token then
    redis.call('PEXPIRE', root .. ':lock:' .. locked, ttl)
  end
  local state = 'held'
  if stalls > tonumber(ARGV[11]) then
    state = 'stalled'
  end
  return table.concat({state, redis.call('HGET', KEYS[1], 'fence'), stalls, ''}, ' ')
end

local finished_by = redis.call('GET', KEYS[3])
if finished_by then
  return 'done ' .. finished_by
end

local follows = ARGV[4] ~= '' and (holder == ARGV[4] or (not holder and redis.call('ZSCORE', KEYS[2], ARGV[4])))
if holder and not follows then
  return table.concat({'busy', redis.call('PTTL', KEYS[1]), redis.call('HGET', KEYS[1], 'attempt') or ''}, ' ')
end

-- Who has stalled too often only fails, and guards nothing. Before the budget: a wait for a lock costs no retry.
local fails = not follows and stalls > tonumber(ARGV[11])
local lock = wanted and not fails and root .. ':lock:' .. wanted
local owner = lock and redis.call('HGET', lock, 'id')
if owner and owner ~= id then
  -- Of a lost answer, before the lease ran out: this start has not begun, so it cannot have stalled.
  redis.call('ZREM', KEYS[2], token)
  local about = string.match(redis.call('HGET', KEYS[6], owner) or '', '^%S+ %S+ %S+ %S+ (.*)$')
  return table.concat({'busy-lock', redis.call('PTTL', lock), about and cjson.decode(about).node or ''}, ' ')
end

local now = redis.call('TIME')
local now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
local now_ms = math.floor(now_us / 1000)

if ARGV[13] ~= '' then
  local is_retry = ARGV[6] == 'retry'
  local wait_ms = is_retry and redis.call('GET', KEYS[4])
  if wait_ms then
    return 'over-budget ' .. wait_ms
  end
  local share, per_second, most = tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15])
  local window_ms = math.floor(most / per_second * 1000 + 0.5)
  local bucket = redis.call('HMGET', KEYS[5], 'tokens', 'at_ms', 'firsts', 'firsts_before')
  local tokens, at_ms = tonumber(bucket[1] or most), tonumber(bucket[2] or now_ms)
  local firsts, before = tonumber(bucket[3] or 0), tonumber(bucket[4] or 0)
  local windows = math.floor(now_ms / window_ms) - math.floor(at_ms / window_ms)
  if windows == 1 then
    firsts, before = 0, firsts
  elseif windows > 1 then
    firsts, before = 0, 0
  end
  if tokens < most then
    tokens = math.min(most, tokens + math.max(0, now_ms - at_ms) / 1000 * per_second)
  end
  -- Shares go with the first attempts that earned them: a quiet week must not pay for a stampede.
  local recent = firsts + before * (1 - now_ms % window_ms / window_ms)
  tokens = math.min(tokens, most + share * recent)
  if ARGV[6] == 'first' then
    tokens, firsts = tokens + share, firsts + 1
  elseif is_retry then
    tokens = tokens - 1
  end
  redis.call('HSET', KEYS[5], 'tokens', tostring(tokens), 'at_ms', now_ms,
      'firsts', firsts, 'firsts_before', before)
  -- For as long as the bucket is not as good as new. Of what first attempts earn, nothing is left two windows after
  -- the begin of theirs: the first of them has seen to it.
  if is_retry or windows ~= 0 or not bucket[1] then
    redis.call('PEXPIRE', KEYS[5], math.ceil(math.max(0, most - tokens) / per_second * 1000) + 2 * window_ms)
  end
  if is_retry and tokens < 0 then
    redis.call('HINCRBY', KEYS[9], 'over_budget|' .. ARGV[8], 1)
    wait_ms = math.ceil(-tokens / per_second * 1000)
    redis.call('SET', KEYS[4], wait_ms, 'PX', 60000)
    return 'over-budget ' .. wait_ms
  end
end

-- The predecessor's body has ended, or this message would not exist: its start and those before it are settled.
if follows then
  redis.call('DEL', KEYS[2])
  stalls = 0
end

local fence = math.max(tonumber(redis.call('GET', KEYS[8]) or '0') + 1, now_us)
local fence_text = string.format('%.0f', fence)

local overtaken = ''
-- Whoever left a record has left its token in the journal, too.
local previous = unfinished > 0 and not follows and redis.call('HGET', KEYS[6], id)
-- One's own record is there when the lease ran out between a lost reply and its repeat: nobody has died.
if previous and string.match(previous, '^%S+ %S+ (%S+) ') ~= token then
  overtaken = previous
  redis.call('HINCRBY', KEYS[9], 'stalls|' .. ARGV[8], 1)
end

-- The predecessor's lock key may be another one.
if locked and locked ~= (lock and wanted) then
  if redis.call('HGET', root .. ':lock:' .. locked, 'token') == holder then
    redis.call('DEL', root .. ':lock:' .. locked)
  end
  redis.call('HDEL', KEYS[1], 'lock')
end
redis.call('SET', KEYS[8], fence_text, 'PX', ARGV[12])
redis.call('HSET', KEYS[1], 'token', token, 'fence', fence_text, 'session', ARGV[7], 'attempt', ARGV[3])
if lock then
  redis.call('HSET', KEYS[1], 'lock', wanted)
  redis.call('HSET', lock, 'id', id, 'token', token, 'fence', fence_text)
  redis.call('PEXPIRE', lock, ttl)
  -- For a beat that finds both of them run out.
  redis.call('SET', root .. ':locking:' .. id, token .. ' ' .. wanted, 'PX', ARGV[12])
end
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('HSET', KEYS[6], id, table.concat({now_ms, fence_text, token, ARGV[7], ARGV[9]}, ' '))
redis.call('ZADD', KEYS[7], now_ms + ttl, id)
redis.call('SADD', KEYS[10], id)
redis.call('PEXPIRE', KEYS[10], ARGV[12])
if stalls > tonumber(ARGV[11]) then
  return table.concat({'stalled', fence_text, stalls, overtaken}, ' ')
end
redis.call('ZADD', KEYS[2], fence_text, token)
redis.call('PEXPIRE', KEYS[2], ARGV[12])
redis.call('HINCRBY', KEYS[9], 'starts|' .. ARGV[8], 1)
return table.concat({'held', fence_text, stalls, overtaken}, ' ')
