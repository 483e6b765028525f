-- Record that the effect is there, with its result. The key's TTL goes on. A repeat changes nothing.
--
-- KEYS[1]  claim:<key>
-- ARGV[1]  owner: '<task id> <token>'   ARGV[2]  fence        ARGV[3]  task name
-- ARGV[4]  payload's hash, or ''        ARGV[5]  ttl, ms      ARGV[6]  payload, JSON
-- Returns  1, or 0 when another start has the key, or it is in doubt
local found = redis.call('HMGET', KEYS[1], 'status', 'owner')
if found[1] and found[2] ~= ARGV[1] then
  return 0
end
if found[1] == 'COMPLETED' then
  return 1
end
if found[1] and found[1] ~= 'PROCESSING' then
  return 0
end

local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[1], 'status', 'COMPLETED', 'task', ARGV[3], 'owner', ARGV[1], 'fence', ARGV[2],
    'hash', ARGV[4], 'at_ms', now_ms, 'payload', ARGV[6])
if not found[1] then
  -- The store was emptied, or the body ran longer than the key lived: nobody has taken it since.
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
return 1
