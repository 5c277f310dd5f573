// The page Playground: the answer to a prompt, its tokens by origin, and a race of speculation off against on.

import { generate, getJson } from "./api.js";
import { Answer } from "./answer.js";
import { byId, el, formatNumber } from "./dom.js";

let running = null;

/** The request that the form describes, without `speculation`. */
function requestBody() {
  return {
    model: byId("model").value,
    messages: [{ role: "user", content: byId("prompt").value }],
    seed: Number(byId("seed").value),
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    logprobs: true,
    top_logprobs: 3,
    ignore_eos: byId("ignore-eos").checked,
  };
}

function speculationOptions() {
  const k = byId("k").value;
  if (k === "auto") return {};
  return k === "0" ? { enabled: false } : { num_draft_tokens: Number(k) };
}

function showVerdict(text, kind = "") {
  byId("verdict").className = `verdict ${kind}`;
  byId("verdict").textContent = text;
}

async function run(answer, body, signal) {
  answer.begin();
  try {
    await generate(body, (line) => answer.addLine(line), signal);
  } finally {
    answer.finish();
  }
}

/** Runs `work` unless something is running already. Stop is enabled while it runs. */
async function runExclusively(work) {
  if (running) return;
  running = new AbortController();
  // A button that is disabled loses the focus, so the focus moves to the one that can be pressed next, and back.
  const pressed = document.activeElement;
  byId("stop").disabled = false;
  if (["generate", "race"].includes(pressed?.id)) byId("stop").focus();
  for (const id of ["generate", "race"]) byId(id).disabled = true;
  showVerdict("");
  try {
    await work(running.signal);
  } catch (error) {
    showVerdict(error.name === "AbortError" ? "Stopped." : error.message, error.name === "AbortError" ? "" : "bad");
  } finally {
    running = null;
    for (const id of ["generate", "race"]) byId(id).disabled = false;
    if (document.activeElement === byId("stop")) pressed.focus();
    byId("stop").disabled = true;
  }
}

async function generateOne(signal) {
  const answer = new Answer("Answer");
  byId("answers").replaceChildren(answer.card);
  await run(answer, { ...requestBody(), speculation: speculationOptions() }, signal);
}

// One after the other, because concurrent runs would share the target and slow each other down. Both take the form as
// it is now: what is typed in it meanwhile must not make their ids differ.
async function race(signal) {
  const body = requestBody();
  const chosen = speculationOptions();
  const off = new Answer("Speculation off");
  const on = new Answer("Speculation on");
  byId("answers").replaceChildren(off.card, on.card);
  await run(off, { ...body, speculation: { enabled: false } }, signal);
  await run(on, { ...body, speculation: chosen.enabled === false ? {} : chosen }, signal);
  const difference = firstDifference(off.ids, on.ids);
  const ratio = on.tokensPerSecond() / off.tokensPerSecond();
  const speed = Number.isFinite(ratio) ? `${formatNumber(ratio, 2)} times as fast with speculation.` : "Too few tokens to compare the speed.";
  if (difference === null) {
    showVerdict(`Identical: all ${on.ids.length} token ids are equal. ${speed}`, "good");
  } else {
    [off, on].forEach((answer) => answer.markDifference(difference));
    showVerdict(`The ids differ from position ${difference} on. ${speed}`, "bad");
  }
}

/** The first position at which two lists of ids differ; null if they are equal. */
export function firstDifference(a, b) {
  for (let i = 0; i < Math.max(a.length, b.length); i += 1) if (a[i] !== b[i]) return i;
  return null;
}

async function showModels() {
  const { data } = await getJson("/console/models");
  const models = data.map((model) => model.id);
  const select = byId("model");
  const selected = select.value;
  select.replaceChildren(...models.map((model) => el("option", { value: model }, model)));
  if (models.includes(selected)) select.value = selected;
  if (models.length === 0) throw new Error("No model is served yet: a target worker must be ready first.");
}

export function setUp() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    runExclusively(generateOne);
  });
  byId("race").addEventListener("click", () => {
    // Only a submitted form is checked by the browser.
    if (byId("ask").reportValidity()) runExclusively(race);
  });
  byId("stop").addEventListener("click", () => running?.abort());
}

export async function show() {
  await showModels();
}
