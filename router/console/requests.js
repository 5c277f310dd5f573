// Requests: a waterfall of the steps of recent requests.

import { getJson } from "/console/api.js";
import { byId, el, figure, svg, table } from "/console/dom.js";

const PARTS = { queue: "queue", prefill: "prompt at the target", draft: "draft forward", wire: "wire, and waiting for a core", wait: "router", verify: "verification" };
const WIDTH = 1000;
const ROW = 14;
const LABELS = 120;

/** What a step's round trip took beyond the worker's queue and the forward that its reply came from. */
function beyondForward(step) {
  return Math.max((step.answered_us ?? step.sent_us) - step.sent_us - step.queue_us - step.compute_us, 0);
}

/** The middle of what later steps to the target took beyond their forwards: the wire, for those are one forward each. */
function usualWire(steps) {
  const wires = steps.filter(({ step, isPrompt }) => step.role === "target" && !isPrompt && step.answered_us).map(({ step }) => beyondForward(step));
  wires.sort((a, b) => a - b);
  return wires[wires.length >> 1] ?? 0;
}

/** The parts of one step: queue and compute as the worker reported them, the rest of the round trip is the wire. A long prompt takes several
 * forwards, of which only the last is reported: of it all that is more than the usual wire is the prompt. */
function partsOf(step, isPrompt, wireUs) {
  const end = step.answered_us ?? step.sent_us;
  const forwards = step.reply === "proposal" ? Math.max(step.num_tokens, 1) : 1;
  const whole = end - step.sent_us;
  const queue = Math.min(step.queue_us, whole);
  const reported = Math.min(step.compute_us * forwards, whole - queue);
  const compute = isPrompt ? Math.max(reported, whole - queue - wireUs) : reported;
  const name = step.role === "draft" ? "draft" : isPrompt ? "prefill" : "verify";
  const wire = whole - queue - compute;
  return [["wire", wire / 2], ["queue", queue], [name, compute], ["wire", wire / 2]];
}

/** Steps with the parts of their time. */
export function stepsOf(trail) {
  let hasOutput = false;
  const steps = trail.steps.map((step) => {
    const isPrompt = step.role === "target" && !hasOutput;
    if (step.role === "target" && step.reply === "span") hasOutput = true;
    return { step, isPrompt };
  });
  const wireUs = usualWire(steps);
  return steps.map(({ step, isPrompt }) => ({ step, isPrompt, parts: partsOf(step, isPrompt, wireUs) }));
}

/** Sums over a request, microseconds. Draft steps may overlap with verification, so they need not add up to the whole. */
function sums(trail, steps) {
  const total = Object.fromEntries(Object.keys(PARTS).map((name) => [name, 0]));
  for (const { parts } of steps) for (const [name, us] of parts) total[name] += us;
  const first = trail.steps.find((step) => step.role === "target");
  total.queue += first ? first.sent_us : trail.ended_us;
  const covered = trail.steps.filter((step) => step.answered_us).map((step) => [step.sent_us, step.answered_us]);
  covered.sort((a, b) => a[0] - b[0]);
  let until = first?.sent_us ?? 0;
  for (const [start, end] of covered) {
    if (start > until) total.wait += start - until;
    until = Math.max(until, end);
  }
  total.wait += Math.max(0, trail.ended_us - until);
  return total;
}

function waterfall(trail, steps) {
  const x = (us) => LABELS + ((WIDTH - LABELS) * us) / Math.max(trail.ended_us, 1);
  const shown = steps.slice(0, 60);
  const rows = shown.map(({ step, isPrompt, parts }, i) => {
    let at = step.sent_us;
    const bars = parts.map(([name, us]) => {
      const bar = svg("rect", { class: `part-${name}`, x: x(at), width: Math.max(x(at + us) - x(at), us > 0 ? 0.5 : 0), y: i * ROW + 2, height: ROW - 4 },
        svg("title", {}, `${PARTS[name]}: ${figure(us / 1e3, 2)} ms`));
      at += us;
      return bar;
    });
    const what = step.role === "draft" ? `draft ${step.num_tokens} of ${step.k}`
      : step.reply === "fed" ? `feed ${step.num_appended}`
      : isPrompt ? `prompt ${step.num_appended}`
      : step.k ? `verify ${step.num_tokens} of ${step.k}` : "decode";
    return [svg("text", { x: 0, y: i * ROW + 11 }, `${step.step_seq} ${what}`), bars];
  });
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${Math.max(shown.length, 1) * ROW}`, role: "img", "aria-label": `Waterfall of ${steps.length} steps` }, rows);
}

function card(trail, isOpen) {
  const steps = stepsOf(trail);
  const total = sums(trail, steps);
  const rows = Object.entries(PARTS).map(([name, text]) => [text, Number(figure(total[name] / 1e3, 1)), Number(figure((100 * total[name]) / Math.max(trail.ended_us, 1), 0))]);
  return el("details", { class: "card trail", open: isOpen, "data-request": `${trail.request_id}/${trail.choice}` },
    el("summary", {}, `${trail.task_type} · ${figure(trail.ended_us / 1e3, 0)} ms · ${trail.num_tokens} tokens · ${trail.steps.length + trail.steps_left_out} steps · ${trail.end} · ${trail.request_id}`),
    waterfall(trail, steps),
    steps.length > 60 ? el("p", { class: "hint" }, `The first 60 of ${steps.length + trail.steps_left_out} steps are drawn.`) : null,
    table("Sums over all recorded steps. Drafting may overlap with verification.", ["Part", "ms", "% of the request"], rows));
}

export function setUp() {
  byId("requests-legend").replaceChildren(...Object.entries(PARTS).map(([name, text]) =>
    el("span", {}, el("span", { class: `swatch part-${name}` }), text)));
}

export async function show() {
  const trails = await getJson("/console/requests");
  const box = byId("requests");
  const known = new Map([...box.querySelectorAll("details")].map((details) => [details.dataset.request, details]));
  const cards = trails.map((trail, i) => known.get(`${trail.request_id}/${trail.choice}`) ?? card(trail, i === 0 && known.size === 0));
  box.replaceChildren(...(cards.length ? cards : [el("p", {}, "No request has ended yet.")]));
}
