-- Count a start whose process died, and free its lease. A repeat by the same token changes nothing.
--
-- KEYS[1]  lease:<id>     KEYS[2]  journal:<id>    KEYS[3]  done:<marker>   KEYS[4]  inflight
-- KEYS[5]  expiry index   KEYS[6]  held:<session>  KEYS[7]  counters
-- ARGV[1]  token          ARGV[2]  task id         ARGV[3]  journal's ttl, ms   ARGV[4]  task name
-- ARGV[5]  session        ARGV[6]  what our keys begin with: the name of the lock key is made of it here
-- Returns  the number of unfinished starts, or -1 when this very start had finished its message
local token, id = ARGV[1], ARGV[2]
local finished_by = redis.call('GET', KEYS[3])
if finished_by and string.match(finished_by, '^%S+') == token then
  return -1
end
local score = tonumber(redis.call('ZSCORE', KEYS[2], token) or '')
local record = redis.call('HGET', KEYS[4], id)
local holder, session = string.match(record or '', '^%S+ %S+ (%S+) (%S+) ')
local leased, locked = unpack(redis.call('HMGET', KEYS[1], 'token', 'lock'))
if leased == token then
  if locked and redis.call('HGET', ARGV[6] .. ':lock:' .. locked, 'token') == token then
    redis.call('DEL', ARGV[6] .. ':lock:' .. locked)
  end
  redis.call('DEL', KEYS[1])
end
if holder == token then
  redis.call('HDEL', KEYS[4], id)
  redis.call('ZREM', KEYS[5], id)
end
-- A copy in the same worker may hold the lease.
if holder == token or session ~= ARGV[5] then
  redis.call('SREM', KEYS[6], id)
end
-- One that died before it could acquire is counted all the same, or a message that kills its decoder loops for ever.
if holder == token or not score then
  redis.call('HINCRBY', KEYS[7], 'stalls|' .. ARGV[4], 1)
end
if not score then
  -- Below every start that has held the lease: it is no later start than they are.
  local now = redis.call('TIME')
  redis.call('ZADD', KEYS[2], string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2]) - 1e16), token)
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return redis.call('ZCARD', KEYS[2])
