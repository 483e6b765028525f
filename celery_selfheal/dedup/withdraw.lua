-- Give a key back after a failure: only one's own, and only before its end. A repeat changes nothing.
--
-- KEYS[1]  claim:<key>
-- ARGV[1]  owner: '<task id> <token>'
-- Returns  1 if there was something to remove, else 0
local found = redis.call('HMGET', KEYS[1], 'status', 'owner')
if found[1] == 'PROCESSING' and found[2] == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
