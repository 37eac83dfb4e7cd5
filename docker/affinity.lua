-- Gives each request a key, so that requests which can reuse each other's work reach the same server:
--
--   the header X-AttnCache-Affinity, as the client sent it
--   else session_id in the body
--   else the API key, cache_salt and the beginning of the first text, or of its token ids
--
-- Envoy hashes the header. A request without a key goes to the server with the fewest requests. A wrong key costs
-- time and never correctness: every server answers every request. So the body is searched and not parsed.

local HEADER = "x-attncache-affinity"
-- Servers that store no prefixes, such as encoders, gain nothing by keys from the body.
local READS_BODY = os.getenv("ATTNCACHE_AFFINITY") ~= "off"
local TEXT_BYTES = 256
-- Fields with a text, a list of texts, or token ids. Those of one request are on the first line that fits.
local FIELDS = { "inputs", "input", "segments", "query", "source_sentence" }

-- Return the position of the value of a field, or nil. In a JSON string, the quotes around the name would have
-- backslashes before them, so no text is taken for a field.
local function position_of(body, field)
  local name = '"' .. field .. '"'
  local _, last = body:find(name, 1, true)
  while last do
    local position = body:match("^%s*:%s*()", last + 1)
    if position then
      return position
    end
    _, last = body:find(name, last + 1, true)
  end
  return nil
end

-- Return the beginning of the string behind this quote, escaped as in the body.
local function string_at(body, quote)
  local text = body:sub(quote + 1, quote + TEXT_BYTES)
  local found = text:find('["\\]')
  while found do
    if text:sub(found, found) == '"' then
      return text:sub(1, found - 1)
    end
    found = text:find('["\\]', found + 2)
  end
  return text
end

-- Return the string of a field, or the first one of a list of strings, or token ids; nil if there is none.
local function value_of(body, field)
  local position = position_of(body, field)
  if not position then
    return nil
  end
  local first = body:match("^[%s%[]*()", position)
  if body:sub(first, first) == '"' then
    return string_at(body, first)
  end
  return body:sub(first, first + TEXT_BYTES - 1):match("^%d[%d%s,]*")
end

local function first_text(body)
  for _, field in ipairs(FIELDS) do
    local text = value_of(body, field)
    if text and text ~= "" then
      return text
    end
  end
  return nil
end

-- Return 16 hexadecimal digits. The API key and the text stay out of the header, and so out of logs.
local function digest(text)
  local low, high = 0, 0
  for index = 1, #text do
    local byte = text:byte(index)
    low = (low * 31 + byte) % 4294967296
    high = (high * 257 + byte) % 4294967291
  end
  return string.format("%08x%08x", high, low)
end

local function key_of(headers, body)
  local session = value_of(body, "session_id")
  if session and session ~= "" then
    return digest("session\0" .. session)
  end
  local text = first_text(body)
  if not text then
    return nil
  end
  local api_key = headers:get("x-api-key") or headers:get("authorization") or ""
  return digest(api_key .. "\0" .. (value_of(body, "cache_salt") or "") .. "\0" .. text)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local given = headers:get(HEADER)
  if given and given ~= "" then
    return
  end
  headers:remove(HEADER)
  if not READS_BODY or headers:get(":method") ~= "POST" then
    return
  end
  local body = handle:body()
  if not body then
    return
  end
  -- The body may have arrived later, and an older object for the headers is not valid then.
  headers = handle:headers()
  local key = key_of(headers, body:getBytes(0, body:length()))
  if key then
    headers:replace(HEADER, key)
  end
end
