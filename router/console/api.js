// Requests of the console to its router. The API key is stored for this browser tab only.

const KEY = "outrider-api-key";
const TIMEOUT_MS = 10_000;
// Longest part of a body that is shown as an error.
const MESSAGE_LENGTH_MAX = 300;

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
  // The status says what is wrong, also if the connection ends before the body does.
  const text = await response.text().catch(() => "");
  let message = text.trim().slice(0, MESSAGE_LENGTH_MAX) || response.statusText;
  try {
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // The body is not an OpenAI error object, for example the page of a proxy: show its beginning.
  }
  return Object.assign(new Error(`The router answered ${response.status}: ${message}`), { status: response.status });
}

/** The error to show for one of `fetch` or of reading a body: that of the user's Stop stays as it is. */
function connectionError(error) {
  if (error.name === "AbortError") return error;
  return new Error(error.name === "TimeoutError" ? `The router did not answer within ${TIMEOUT_MS / 1000} s.` : "The router cannot be reached.");
}

/**
 * Sends a request. Paths start at the router's address, which a proxy may serve below a prefix: this file is in the
 * folder `console` there.
 */
async function request(path, options) {
  const response = await fetch(new URL(`..${path}`, import.meta.url), options).catch((error) => { throw connectionError(error); });
  if (!response.ok) throw await errorFrom(response);
  return response;
}

/** Sends a GET request and returns the parsed JSON body. */
export async function getJson(path) {
  const response = await request(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  const text = await response.text().catch((error) => { throw connectionError(error); });
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("The answer is not the router's: another server, or a proxy, answers at this address.");
  }
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
  let isComplete = false;
  try {
    for await (const text of linesOf(reader)) {
      const line = JSON.parse(text);
      if (line.failed) throw new Error(line.failed.error.message);
      isComplete = isComplete || Boolean(line.end);
      onLine(line);
    }
  } finally {
    // After an error nobody reads on: the router should not generate on. If all was read, this has no effect.
    reader.cancel().catch(() => {});
  }
  if (!isComplete) throw new Error("The answer is incomplete: the connection to the router was lost.");
}

/** The complete lines of a body, as they arrive. A lost connection ends them, as the end of the body does. */
async function* linesOf(reader) {
  let incomplete = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) return;
    const lines = (incomplete + value).split("\n");
    incomplete = lines.pop();
    yield* lines;
  }
}
