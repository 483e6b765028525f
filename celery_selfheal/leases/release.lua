-- Give a lease back, by its token only. A repeat changes nothing.
--
-- KEYS[1]  lease:<id>      KEYS[2]  journal:<id>   KEYS[3]  done:<marker>
-- KEYS[4]  inflight        KEYS[5]  expiry index   KEYS[6]  counters        KEYS[7]  held:<session>
-- KEYS[8]  unacked         KEYS[9]  unacked_index  KEYS[10] owned:<session>     (only with ARGV[6])
-- ARGV[1]  token           ARGV[2]  task id        ARGV[3]  'ended' or 'handed over'
-- ARGV[4]  ttl of the done marker, ms; '' leaves none      ARGV[5]  event to count: 'state|task'
-- ARGV[6]  delivery tag to acknowledge in the same step, or ''   ARGV[8]  session
-- ARGV[7]  what the marker holds after the token: '' or a space and what is left to do
-- ARGV[9]  what our keys begin with: the name of the lock key, which the lease knows, is made of it here
-- Returns  1, or 0 when another start holds the lease or has finished the task since
local token, id = ARGV[1], ARGV[2]
local holder, locked = unpack(redis.call('HMGET', KEYS[1], 'token', 'lock'))
-- An evicted or expired lease that nobody has taken since is still ours to settle.
local mine = holder == token or (not holder and redis.call('ZREVRANGE', KEYS[2], 0, 0)[1] == token)

if not mine then
  redis.call('ZREM', KEYS[2], token)
  -- Whoever took the lease in another worker is in that one's set.
  local session = string.match(redis.call('HGET', KEYS[4], id) or '', '^%S+ %S+ %S+ (%S+) ')
  if session ~= ARGV[8] then
    redis.call('SREM', KEYS[7], id)
  end
  if holder then
    return 0
  end
  local finished_by = redis.call('GET', KEYS[3])
  if finished_by and string.match(finished_by, '^%S+') ~= token then
    return 0
  end
  return 1
end

if locked and redis.call('HGET', ARGV[9] .. ':lock:' .. locked, 'token') == token then
  redis.call('DEL', ARGV[9] .. ':lock:' .. locked)
end
if locked or not holder then
  redis.call('DEL', ARGV[9] .. ':locking:' .. id)
end
if ARGV[3] == 'ended' then
  redis.call('DEL', KEYS[1], KEYS[2])
else
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], token)
end
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[3], token .. ARGV[7], 'PX', ARGV[4])
end
-- Whoever holds the lease has written the record.
local record = holder ~= token and redis.call('HGET', KEYS[4], id)
if not record or string.match(record, '^%S+ %S+ (%S+) ') == token then
  redis.call('HDEL', KEYS[4], id)
  redis.call('ZREM', KEYS[5], id)
end
redis.call('SREM', KEYS[7], id)
redis.call('HINCRBY', KEYS[6], ARGV[5], 1)
if ARGV[6] ~= '' then
  redis.call('HDEL', KEYS[8], ARGV[6])
  redis.call('ZREM', KEYS[9], ARGV[6])
  redis.call('HDEL', KEYS[10], ARGV[6])
end
return 1
