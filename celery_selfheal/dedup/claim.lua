-- Take a free idempotency key, or say what is known of it. A repeat by the same start is told its own claim.
--
-- KEYS[1]  claim:<key>
-- ARGV[1]  owner: '<task id> <token>'   ARGV[2]  fence        ARGV[3]  task name
-- ARGV[4]  payload's hash, or ''        ARGV[5]  ttl, ms
-- Returns  {}                                                                   the key is this start's now
--          {status, task name, owner, fence, hash, payload or nil, dispatched or nil, age in ms}
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)

local found = redis.call('HMGET', KEYS[1], 'status', 'task', 'owner', 'fence', 'hash', 'payload', 'dispatched', 'at_ms')
if found[1] then
  found[8] = now_ms - tonumber(found[8])
  return found
end

redis.call('HSET', KEYS[1], 'status', 'PROCESSING', 'task', ARGV[3], 'owner', ARGV[1], 'fence', ARGV[2],
    'hash', ARGV[4], 'at_ms', now_ms)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {}
