-- Move one delivery out of the unacked hash, once: back to a list, or replaced by its successor.
--
-- KEYS[1]  session:<s>   KEYS[2]  owned:<s>   KEYS[3]  unacked   KEYS[4]  unacked_index   KEYS[5]  list
-- ARGV[1]  delivery tag
-- ARGV[2]  'dead': only when the session does not exist; 'mine': the owner itself asks
-- ARGV[3]  'front' (taken next) or 'back'       ARGV[4]  the message to push
-- Returns  1; 0 when the delivery is settled already; -1 when its owner lives
if ARGV[2] == 'dead' and redis.call('EXISTS', KEYS[1]) == 1 then
  return -1
end
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then
  return 0
end
local unacked = redis.call('HEXISTS', KEYS[3], ARGV[1])
-- The push comes first: a refused write then leaves everything as it was.
if unacked == 1 then
  if ARGV[3] == 'front' then
    redis.call('RPUSH', KEYS[5], ARGV[4])
  else
    redis.call('LPUSH', KEYS[5], ARGV[4])
  end
end
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return unacked
