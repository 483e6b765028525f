-- Take one message from the first list that has one, and record it as unacked and as ours in the same step.
-- Decodes nothing. Everything is written before the message leaves its list, so that a failing write loses nothing.
--
-- KEYS[1]  session:<s>   KEYS[2]  unacked   KEYS[3]  unacked_index   KEYS[4]  owned:<s>
-- KEYS[5...]  the lists, in order of preference
-- ARGV[1]  delivery tag minted for this delivery
-- ARGV[2...]  per list: its queue's name as a JSON string
-- Returns  nil when all lists are empty; 0 when the session has expired; {position of the list, message}
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
-- A repeat: a second message under one tag would overwrite the first.
if redis.call('HEXISTS', KEYS[4], ARGV[1]) == 1 then
  return nil
end
for n = 5, #KEYS do
  local message = redis.call('LINDEX', KEYS[n], -1)
  if message then
    local now = redis.call('TIME')
    local micros = string.format('%06d', now[2])
    redis.call('HSET', KEYS[4], ARGV[1], now[1] .. micros .. ' ' .. KEYS[n])
    redis.call('ZADD', KEYS[3], now[1] .. '.' .. micros, ARGV[1])
    -- The list's own queue and the anonymous exchange: a restore needs no binding and doubles no topic message.
    redis.call('HSET', KEYS[2], ARGV[1], '[' .. message .. ',"",' .. ARGV[n - 3] .. ']')
    redis.call('RPOP', KEYS[n])
    return {n - 4, message}
  end
end
return nil
