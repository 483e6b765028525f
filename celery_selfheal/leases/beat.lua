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
-- ARGV[7]  JSON of five lists: token, task id and task name of each lease; the tags of this session that live requests
--          know, and those of its earlier ones
-- ARGV[8]  what our keys begin with: names of lock keys, which the leases know, are made of it here
-- Returns  {epoch, 'kept' | 'again' | 'begun' | 'lost' | '', a letter for each lease, unknown tags...}
--          Letters: 'h', held; 'l', lost, another start has it or another task its lock key; 'i', idle, this start has not begun or has ended.
local session, ttl = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local tokens, ids, tasks, tags, others = unpack(cjson.decode(ARGV[7]))

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

-- One command for many members, since Lua's stack takes some thousand arguments; returns what the commands count.
local function add(key, score, members, ...)
  local count = 0
  for first = 1, #members, 1000 do
    local words = {...}
    for n = first, math.min(first + 999, #members) do
      words[#words + 1] = score
      words[#words + 1] = members[n]
    end
    count = count + redis.call('ZADD', key, unpack(words))
  end
  return count
end

-- Renew a lock key, or take it again where it has run out; false when another task has it.
local function keep(key, id, token, fence)
  local lock = ARGV[8] .. ':lock:' .. key
  local owner, by = unpack(redis.call('HMGET', lock, 'id', 'token'))
  if owner and owner ~= id then
    return false
  end
  if by ~= token then
    redis.call('HSET', lock, 'id', id, 'token', token, 'fence', fence)
  end
  redis.call('PEXPIRE', lock, ttl)
  return true
end

local letters, held = {}, {}
for n, token in ipairs(tokens) do
  local lease, journal = KEYS[13 + 2 * n], KEYS[14 + 2 * n]
  local id = ids[n]
  local holder, key, fence = unpack(redis.call('HMGET', lease, 'token', 'lock', 'fence'))
  local letter = 'i'
  if holder == token then
    letter = 'l'
    if not key or keep(key, id, token, fence) then
      redis.call('PEXPIRE', lease, ttl)
      letter = 'h'
    end
  elseif holder then
    if redis.call('ZSCORE', journal, token) then
      letter = 'l'
    end
  else
    local last = redis.call('ZREVRANGE', journal, 0, 0, 'WITHSCORES')
    if last[1] == token and tonumber(last[2]) > 0 then
      -- It ran out (outage, eviction) and no later start has taken it: take it again under the same fence.
      fence = string.format('%.0f', tonumber(last[2]))
      local by, wanted = string.match(redis.call('GET', ARGV[8] .. ':locking:' .. id) or '', '^(%S+) (.*)$')
      letter = 'l'
      if by ~= token or keep(wanted, id, token, fence) then
        redis.call('HSET', lease, 'token', token, 'fence', fence, 'session', session, 'attempt', '')
        if by == token then
          redis.call('HSET', lease, 'lock', wanted)
        end
        redis.call('PEXPIRE', lease, ttl)
        redis.call('SADD', KEYS[11], id)
        if not redis.call('HGET', KEYS[9], id) then
          redis.call('HSET', KEYS[9], id, table.concat({now_ms, fence, token, session, people(tasks[n])}, ' '))
        end
        letter = 'h'
      end
    elseif redis.call('ZSCORE', journal, token) then
      letter = 'l'
    end
  end
  letters[n] = letter
  if letter == 'h' then
    held[#held + 1] = id
  end
end
add(KEYS[10], now_ms + ttl, held)
reply[3] = table.concat(letters)

-- Last of all: what was written above may be the first of its key.
for _, key in ipairs({KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[14]}) do
  redis.call('PEXPIRE', key, ARGV[6])
end

-- Index and owner records have the same tags: as many changed as there are owned, and nothing is unknown.
local score = time[1] .. '.' .. string.format('%06d', time[2])
local refreshed = add(KEYS[13], score, tags, 'XX', 'CH')
add(KEYS[13], score, others, 'XX')
if ARGV[4] ~= 'none' and redis.call('HLEN', KEYS[5]) > refreshed then
  local known = {}
  for _, tag in ipairs(tags) do
    known[tag] = true
  end
  for _, tag in ipairs(redis.call('HKEYS', KEYS[5])) do
    if not known[tag] then
      reply[#reply + 1] = tag
    end
  end
end
return reply
