-- Take one dead letter out of its list and, unless it is dropped, put its message into the list it came from.
--
-- KEYS[1]  list of the dead letter queue   KEYS[2]  list of the origin     (only with ARGV[2])
-- ARGV[1]  the entry, byte for byte        ARGV[2]  the message to push    (absent: drop)
-- Returns  1, or 0 when the entry is not there any more
-- From the tail, where the oldest entries are.
if not redis.call('LPOS', KEYS[1], ARGV[1], 'RANK', -1) then
  return 0
end
-- The push comes first: a refused write then leaves everything as it was.
if ARGV[2] then
  redis.call('LPUSH', KEYS[2], ARGV[2])
end
redis.call('LREM', KEYS[1], -1, ARGV[1])
return 1
