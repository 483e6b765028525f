-- Remember that the callbacks of a finished job were sent, whichever start has sent them. A repeat changes nothing.
--
-- KEYS[1]  claim:<key>
-- Returns  1, or 0 when nothing is finished
if redis.call('HGET', KEYS[1], 'status') ~= 'COMPLETED' then
  return 0
end
redis.call('HSET', KEYS[1], 'dispatched', '1')
return 1
