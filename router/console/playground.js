// The playground: one prompt, its tokens by origin, and a race of speculation on against off.

import { generate, getJson } from "/console/api.js";
import { Answer } from "/console/answer.js";
import { byId, el, figure } from "/console/dom.js";

let running = null;

function body(speculation) {
  return {
    model: byId("model").value,
    messages: [{ role: "user", content: byId("prompt").value }],
    seed: Number(byId("seed").value),
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    logprobs: true,
    top_logprobs: 3,
    ignore_eos: true,
    speculation,
  };
}

function wanted() {
  const k = byId("k").value;
  if (k === "auto") return {};
  return k === "0" ? { enabled: false } : { num_draft_tokens: Number(k) };
}

function verdict(text, kind = "") {
  byId("verdict").className = `verdict ${kind}`;
  byId("verdict").textContent = text;
}

async function run(answer, speculation, signal) {
  try {
    await generate(body(speculation), (line) => answer.take(line), signal);
  } finally {
    answer.finished();
  }
}

/** Runs one thing at a time, with Stop enabled while it lasts. */
async function only(work) {
  if (running) return;
  running = new AbortController();
  for (const id of ["generate", "race"]) byId(id).disabled = true;
  byId("stop").disabled = false;
  verdict("");
  try {
    await work(running.signal);
  } catch (error) {
    verdict(error.name === "AbortError" ? "Stopped." : error.message, error.name === "AbortError" ? "" : "bad");
  } finally {
    running = null;
    for (const id of ["generate", "race"]) byId(id).disabled = false;
    byId("stop").disabled = true;
  }
}

async function one(signal) {
  const answer = new Answer("Answer");
  byId("answers").replaceChildren(answer.card);
  await run(answer, wanted(), signal);
}

// One after the other: at the same time they would share the target, and neither would be alone with the clock.
async function race(signal) {
  const off = new Answer("Speculation off");
  const on = new Answer("Speculation on");
  byId("answers").replaceChildren(off.card, on.card);
  await run(off, { enabled: false }, signal);
  const speculation = wanted();
  await run(on, speculation.enabled === false ? {} : speculation, signal);
  const differs = firstDifference(off.ids, on.ids);
  const ratio = `${figure(on.pace() / off.pace(), 2)} times as fast with speculation`;
  if (differs === null) {
    verdict(`Identical: all ${on.ids.length} token ids are equal. ${ratio}.`, "good");
  } else {
    [off, on].forEach((answer) => answer.mark(differs));
    verdict(`The ids differ from position ${differs} on. ${ratio}.`, "bad");
  }
}

/** The first position at which two lists of ids differ; null where they are equal. */
export function firstDifference(a, b) {
  for (let i = 0; i < Math.max(a.length, b.length); i += 1) if (a[i] !== b[i]) return i;
  return null;
}

async function showModels() {
  const { workers } = await getJson("/debug/lanes");
  const models = [...new Set(workers.filter((worker) => worker.role === "target").map((worker) => worker.model))];
  const select = byId("model");
  const before = select.value;
  select.replaceChildren(...models.map((model) => el("option", { value: model }, model)));
  if (models.includes(before)) select.value = before;
}

export function setUp() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    only(one);
  });
  byId("race").addEventListener("click", () => only(race));
  byId("stop").addEventListener("click", () => running?.abort());
}

export async function show() {
  await showModels();
}
