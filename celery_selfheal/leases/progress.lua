-- Keep what a start says of its progress, while it has neither ended nor been handed over. A repeat changes nothing.
--
-- KEYS[1]  journal:<id>   KEYS[2]  progress:<id>
-- ARGV[1]  token          ARGV[2]  the progress (JSON)    ARGV[3]  ttl, ms
-- Returns  1, or 0 when this start has ended
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return 0
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
