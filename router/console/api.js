// Requests of the console to its router. The API key is stored for this browser tab only.

const KEY = "outrider-api-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(extra = {}) {
  const key = apiKey();
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function errorFrom(response) {
  const text = await response.text();
  let message = text.trim();
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // The body is not an OpenAI error object: show it unchanged.
  }
  return new Error(`${response.status}: ${message}`);
}

/** Sends a GET request and returns the parsed JSON body. */
export async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await errorFrom(response);
  return response.json();
}

export async function send(method, path) {
  const response = await fetch(path, { method, headers: headers() });
  if (!response.ok) throw await errorFrom(response);
}

/** Generates an answer and calls `onLine` for each line of the response as it arrives. */
export async function generate(body, onLine, signal) {
  const response = await fetch("/console/generate", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorFrom(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incomplete = "";
  let isComplete = false;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (incomplete + value).split("\n");
    incomplete = lines.pop();
    for (const text of lines) {
      const line = JSON.parse(text);
      if (line.failed) throw new Error(line.failed.error.message);
      isComplete = isComplete || Boolean(line.end);
      onLine(line);
    }
  }
  if (!isComplete) throw new Error("the answer is incomplete: the connection to the router was lost");
}
