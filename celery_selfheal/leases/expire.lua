-- Remove the in-flight record of a start that stalled, once. Its token stays in the journal: that is the stall.
--
-- KEYS[1]  lease:<id>     KEYS[2]  journal:<id>    KEYS[3]  inflight
-- KEYS[4]  expiry index   KEYS[5]  held:<session>  KEYS[6]  counters   KEYS[7]  session:<session>
-- ARGV[1]  task id        ARGV[2]  dead session whose lease ends now, or '' for a lease that has run out by itself
-- ARGV[3]  event to count: 'stalls|task'   ARGV[4]  the record as it was read
-- ARGV[5]  what our keys begin with: the name of the lock key is made of it here
-- Returns  the number of unfinished starts, or -1 when there was nothing to remove
local id, session = ARGV[1], ARGV[2]
-- It has beaten again since it was found dead. Where sessions live in another store, it never exists here.
if session ~= '' and redis.call('EXISTS', KEYS[7]) == 1 then
  return -1
end
local record = redis.call('HGET', KEYS[3], id)
if record ~= ARGV[4] then
  if not record then
    redis.call('ZREM', KEYS[4], id)
  end
  if session ~= '' then
    redis.call('SREM', KEYS[5], id)
  end
  return -1
end
local token, owner = string.match(record, '^%S+ %S+ (%S+) (%S+) ')
if session == '' then
  if redis.call('EXISTS', KEYS[1]) == 1 then
    return -1
  end
elseif owner ~= session then
  redis.call('SREM', KEYS[5], id)
  return -1
else
  local leased, locked = unpack(redis.call('HMGET', KEYS[1], 'token', 'lock'))
  if leased == token then
    if locked and redis.call('HGET', ARGV[5] .. ':lock:' .. locked, 'token') == token then
      redis.call('DEL', ARGV[5] .. ':lock:' .. locked)
    end
    redis.call('DEL', KEYS[1])
  end
end
redis.call('HDEL', KEYS[3], id)
redis.call('ZREM', KEYS[4], id)
redis.call('SREM', KEYS[5], id)
redis.call('HINCRBY', KEYS[6], ARGV[3], 1)
return redis.call('ZCARD', KEYS[2])
