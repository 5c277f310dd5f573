// Requests of the console to its router. The API key is stored for this browser tab only.

const KEY = "outrider-api-key";
const TIMEOUT_MS = 10_000;

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
  return Object.assign(new Error(`The router answered ${response.status}: ${message}`), { status: response.status });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(error.name === "TimeoutError" ? `The router did not answer within ${TIMEOUT_MS / 1000} s.` : "The router cannot be reached.");
  }
  if (!response.ok) throw await errorFrom(response);
  return response;
}

/** Sends a GET request and returns the parsed JSON body. */
export async function getJson(path) {
  const response = await request(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  return response.json();
}

export async function send(method, path) {
  await request(path, { method, headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
}

/** Generates an answer and calls `onLine` for each line of the response as it arrives. */
export async function generate(body, onLine, signal) {
  const response = await request("/console/generate", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incomplete = "";
  let isComplete = false;
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
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
  if (!isComplete) throw new Error("The answer is incomplete: the connection to the router was lost.");
}
