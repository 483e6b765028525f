-- The kernel of its machine says that this session's process is gone: its session ends now.
--
-- KEYS[1]  session:<s>   KEYS[2]  sessions   KEYS[3]  about
-- ARGV[1]  session       ARGV[2]  who it was, as it was read before the kernel was asked
-- Returns  1, or 0 when the session is not that process any more
if redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
return 1
