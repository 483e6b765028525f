-- Count a start whose process died, and free its lease. A repeat by the same token changes nothing.
--
-- KEYS[1]  lease:<id>     KEYS[2]  journal:<id>    KEYS[3]  done:<marker>   KEYS[4]  inflight
-- KEYS[5]  expiry index   KEYS[6]  held:<session>  KEYS[7]  fence           KEYS[8]  counters
-- ARGV[1]  token          ARGV[2]  task id         ARGV[3]  journal's ttl, ms   ARGV[4]  task name
-- Returns  the number of unfinished starts, or -1 when this very start had finished its message
local token, id = ARGV[1], ARGV[2]
local finished_by = redis.call('GET', KEYS[3])
if finished_by and string.match(finished_by, '^%S+') == token then
  return -1
end
if redis.call('HGET', KEYS[1], 'token') == token then
  redis.call('DEL', KEYS[1])
end
local record = redis.call('HGET', KEYS[4], id)
local counted = false
if record and string.match(record, '^%S+ %S+ (%S+) ') == token then
  redis.call('HDEL', KEYS[4], id)
  redis.call('ZREM', KEYS[5], id)
  redis.call('HINCRBY', KEYS[8], 'stalls|' .. ARGV[4], 1)
  counted = true
end
redis.call('SREM', KEYS[6], id)
if not redis.call('ZSCORE', KEYS[2], token) then
  -- It died before it could acquire: count it all the same, or a message that kills its decoder loops for ever.
  local now = redis.call('TIME')
  local now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
  local fence = math.max(tonumber(redis.call('GET', KEYS[7]) or '0') + 1, now_us)
  local fence_text = string.format('%.0f', fence)
  redis.call('SET', KEYS[7], fence_text, 'PX', ARGV[3])
  redis.call('ZADD', KEYS[2], fence_text, token)
  if not counted then
    redis.call('HINCRBY', KEYS[8], 'stalls|' .. ARGV[4], 1)
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return redis.call('ZCARD', KEYS[2])
