// What the console asks of its router. The key stays in this tab.

const KEY = "outrider-api-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  const key = apiKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function failure(response) {
  const text = await response.text();
  let message = text.trim();
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Not in OpenAI's shape: as it is.
  }
  return new Error(`${response.status}: ${message}`);
}

/** GET as JSON. */
export async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function send(method, path) {
  const response = await fetch(path, { method, headers: headers() });
  if (!response.ok) throw await failure(response);
}

/** Generates, and calls `onLine` for each line as it comes. */
export async function generate(body, onLine, signal) {
  const response = await fetch("/console/generate", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const text of lines) {
      const line = JSON.parse(text);
      if (line.failed) throw new Error(line.failed.error.message);
      ended = ended || Boolean(line.end);
      onLine(line);
    }
  }
  if (!ended) throw new Error("the answer ended early: the router or the connection was lost");
}
