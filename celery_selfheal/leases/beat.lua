-- One beat of a worker: renew its session, the leases of its running starts and the deliveries it holds.
-- Expiry is set, never added to; a repeat changes nothing.
--
-- KEYS[1]  session:<s>   KEYS[2]  sessions   KEYS[3]  about      KEYS[4]  host:<h>   KEYS[5]  owned:<s>
-- KEYS[6]  pulse         KEYS[7]  grace      KEYS[8]  epoch      KEYS[9]  inflight   KEYS[10] expiry index
-- KEYS[11] held:<s>      KEYS[12] unacked    KEYS[13] unacked_index
-- KEYS[14] counters
-- KEYS[15...]  lease:<id>, journal:<id> of each lease
-- ARGV[1]  session             ARGV[2]  ttl, ms
-- ARGV[3]  who we are (JSON)   ARGV[4]  'join' begins the session, 'stay' renews it, 'none' leaves it alone
-- ARGV[5]  a random value, the epoch of an empty store   ARGV[6]  ttl of bookkeeping keys, ms
-- ARGV[7]  number of leases, then token, task id and task name of each
-- then     the delivery tags that live requests know
-- Returns  {epoch, 'kept' | 'again' | 'begun' | 'lost' | '', answer of each lease..., unknown tags...}
--          Each lease: 'held'; 'lost', another start has it; 'idle', this start has not begun or has ended.
local session, ttl = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

if not redis.call('GET', KEYS[8]) then
  redis.call('SET', KEYS[8], ARGV[5])
end
local reply = {redis.call('GET', KEYS[8]), ''}

if ARGV[4] ~= 'none' then
  local pulse = tonumber(string.match(redis.call('GET', KEYS[6]) or now_ms, '^%S+'))
  -- Nobody has beaten for long: the store was away, so no session's expiry proves a death. A silence of half a ttl
  -- can end a session: its last beat was up to a third of a ttl older.
  if now_ms - pulse > ttl / 2 then
    redis.call('SET', KEYS[7], now_ms, 'PX', ttl)
  end
  redis.call('SET', KEYS[6], now_ms, 'PX', ARGV[6])
  local state = 'kept'
  if redis.call('PEXPIRE', KEYS[1], ttl) == 0 then
    if redis.call('ZSCORE', KEYS[2], session) then
      state = 'again'
    elseif ARGV[4] == 'join' then
      state = 'begun'
    else
      state = 'lost'
    end
    if state ~= 'lost' then
      redis.call('SET', KEYS[1], ARGV[3], 'PX', ttl)
      redis.call('HSET', KEYS[3], session, ARGV[3])
      redis.call('SADD', KEYS[4], session)
    end
  end
  reply[2] = state
  if state ~= 'lost' then
    redis.call('ZADD', KEYS[2], now_ms + ttl, session)
  end
end

-- What the reaper says of a start whose record is gone.
local function people(task)
  local node = ARGV[3] ~= '' and cjson.decode(ARGV[3]).node or ''
  return cjson.encode({task = task, node = node})
end

local leases = tonumber(ARGV[7])
for n = 0, leases - 1 do
  local lease, journal = KEYS[15 + 2 * n], KEYS[16 + 2 * n]
  local token, id = ARGV[8 + 3 * n], ARGV[9 + 3 * n]
  local holder = redis.call('HGET', lease, 'token')
  local answer = 'idle'
  if holder == token then
    redis.call('PEXPIRE', lease, ttl)
    redis.call('ZADD', KEYS[10], now_ms + ttl, id)
    answer = 'held'
  elseif holder then
    if redis.call('ZSCORE', journal, token) then
      answer = 'lost'
    end
  else
    local last = redis.call('ZREVRANGE', journal, 0, 0, 'WITHSCORES')
    if last[1] == token and tonumber(last[2]) > 0 then
      -- It ran out (outage, eviction) and no later start has taken it: take it again under the same fence.
      local fence = string.format('%.0f', tonumber(last[2]))
      redis.call('HSET', lease, 'token', token, 'fence', fence, 'session', session, 'attempt', '')
      redis.call('PEXPIRE', lease, ttl)
      redis.call('ZADD', KEYS[10], now_ms + ttl, id)
      redis.call('SADD', KEYS[11], id)
      if not redis.call('HGET', KEYS[9], id) then
        redis.call('HSET', KEYS[9], id, table.concat({now_ms, fence, token, session, people(ARGV[10 + 3 * n])}, ' '))
      end
      answer = 'held'
    elseif redis.call('ZSCORE', journal, token) then
      answer = 'lost'
    end
  end
  reply[#reply + 1] = answer
end

-- Last of all: what was written above may be the first of its key.
for _, key in ipairs({KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[14]}) do
  redis.call('PEXPIRE', key, ARGV[6])
end

local known, count = {}, 0
for n = 8 + 3 * leases, #ARGV do
  local tag = ARGV[n]
  redis.call('ZADD', KEYS[13], 'XX', time[1] .. '.' .. string.format('%06d', time[2]), tag)
  if not known[tag] and redis.call('HEXISTS', KEYS[5], tag) == 1 then
    known[tag] = true
    count = count + 1
  end
end
if ARGV[4] ~= 'none' and redis.call('HLEN', KEYS[5]) > count then
  for _, tag in ipairs(redis.call('HKEYS', KEYS[5])) do
    if not known[tag] then
      reply[#reply + 1] = tag
    end
  end
end
return reply
