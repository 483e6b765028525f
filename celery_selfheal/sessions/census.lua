-- Which sessions have run out, who lives on my machine, and may I lead the sweep?
--
-- KEYS[1]  sessions   KEYS[2]  host:<h>   KEYS[3]  about   KEYS[4]  leader   KEYS[5]  grace
-- KEYS[6]  session:<s>, my own   KEYS[7]  pulse
-- ARGV[1]  my session, or '' for a sweep on request   ARGV[2]  how long the lead lasts, ms   ARGV[3]  limit
-- ARGV[4]  ttl of a session, ms
-- Returns  {lead (0 or 1), grace (0 or 1), number of expired sessions, session, about, ... of the expired,
--          session, about, ... of my host}
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local lead = 1
-- As in a beat. A silence is forgiven once, or a fleet that is gone would never be found.
local pulse = redis.call('GET', KEYS[7])
if pulse and not string.find(pulse, ' ') and now_ms - tonumber(pulse) > ARGV[4] / 2 then
  redis.call('SET', KEYS[5], now_ms, 'PX', ARGV[4])
  redis.call('SET', KEYS[7], pulse .. ' forgiven', 'KEEPTTL')
end
local grace = redis.call('EXISTS', KEYS[5])
if ARGV[1] ~= '' and redis.call('EXISTS', KEYS[6]) == 0 then
  -- Mine has run out as well: the store was away, perhaps, and only a beat can open the grace. It comes first.
  lead = 0
elseif ARGV[1] ~= '' then
  local leader = redis.call('GET', KEYS[4])
  if not leader or leader == ARGV[1] then
    redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[2])
  else
    lead = 0
  end
end
local expired = {}
if lead == 1 then
  -- In the grace after an outage only those that said good-bye or whose kernel spoke (score 0) are surely dead.
  local until_ms = now_ms
  if grace == 1 then
    until_ms = 0
  end
  expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', until_ms, 'LIMIT', 0, ARGV[3])
end
local reply = {lead, grace, #expired}
for _, sessions in ipairs({expired, redis.call('SMEMBERS', KEYS[2])}) do
  for _, session in ipairs(sessions) do
    reply[#reply + 1] = session
    reply[#reply + 1] = redis.call('HGET', KEYS[3], session) or '{}'
  end
end
return reply
