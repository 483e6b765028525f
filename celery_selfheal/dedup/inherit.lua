-- Take a key from a start that is gone, or put it in doubt. A repeat by the same start changes nothing.
--
-- KEYS[1]  claim:<key>
-- ARGV[1]  owner: '<task id> <token>'   ARGV[2]  fence        ARGV[3]  task name
-- ARGV[4]  payload's hash, or ''        ARGV[5]  ttl, ms      ARGV[6]  'PROCESSING' or 'IN_DOUBT'
-- ARGV[7]  owner as read before         ARGV[8]  fence as read before; not larger than ARGV[2]
-- Returns  1, or 0 when another start was quicker
local found = redis.call('HMGET', KEYS[1], 'status', 'owner', 'fence')
if found[1] == ARGV[6] and found[2] == ARGV[1] then
  return 1
end
if found[1] ~= 'PROCESSING' or found[2] ~= ARGV[7] or found[3] ~= ARGV[8] then
  return 0
end

local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[1], 'status', ARGV[6], 'owner', ARGV[1], 'fence', ARGV[2], 'at_ms', now_ms)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
