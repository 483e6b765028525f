-- Put back one delivery that has no owner record and whose visibility timeout has passed, once.
--
-- KEYS[1]  unacked   KEYS[2]  unacked_index   KEYS[3...]  the lists to push to, one a queue; without one it stays
-- ARGV[1]  delivery tag   ARGV[2]  visibility timeout, seconds   ARGV[3]  the message
-- Returns  1, or 0 when it is settled already or not due
local score = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not score or tonumber(score) > tonumber(redis.call('TIME')[1]) - tonumber(ARGV[2]) then
  return 0
end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
if #KEYS == 2 then
  return 0
end
for n = 3, #KEYS do
  -- A push that fails behind one that did not would be repeated at each sweep.
  redis.call('LLEN', KEYS[n])
end
for n = 3, #KEYS do
  redis.call('RPUSH', KEYS[n], ARGV[3])
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
