-- Forget a dead session, once all that it owned is restored.
--
-- KEYS[1]  session:<s>   KEYS[2]  sessions   KEYS[3]  about   KEYS[4]  host:<h>   KEYS[5]  owned:<s>
-- ARGV[1]  session       ARGV[2]  'leave': the worker itself says good-bye; 'bury': only when it does not exist
-- Returns  1, or 0 when it lives or still owns deliveries
if ARGV[2] == 'bury' then
  if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HLEN', KEYS[5]) > 0 then
    return 0
  end
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('SREM', KEYS[4], ARGV[1])
else
  -- What it still owns is left to the sweep: the session only stops living.
  redis.call('DEL', KEYS[1])
  redis.call('ZADD', KEYS[2], 'XX', 0, ARGV[1])
end
return 1
