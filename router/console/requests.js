// The page Requests: a waterfall of the steps of recent requests.

import { getJson } from "./api.js";
import { byId, el, formatNumber, number, plural, svg, table } from "./dom.js";

const PARTS = { queue: "queue", prefill: "prefill at the target", draft: "draft forward", wire: "network, and waiting for a CPU core", wait: "router", verify: "verification" };
const WIDTH = 1000;
const ROW = 14;
const LABELS = 120;

/** The part of a step's round trip outside the worker's queue and the reported forward, microseconds. */
function timeOutsideForward(step) {
  return Math.max((step.answered_us ?? step.sent_us) - step.sent_us - step.queue_us - step.compute_us, 0);
}

/** The median network time of the target's steps after the prompt, which take one forward each. */
function medianWireUs(steps) {
  const wireTimes = steps.filter(({ step, isPrompt }) => step.role === "target" && !isPrompt && step.answered_us).map(({ step }) => timeOutsideForward(step));
  wireTimes.sort((a, b) => a - b);
  return wireTimes[wireTimes.length >> 1] ?? 0;
}

/** The parts of one step: queue and compute as the worker reported them; the rest of the round trip is network time. A long prompt takes several
 * forwards, of which only the last is reported: the time of its step beyond the median network time counts as prefill. */
function partsOf(step, isPrompt, wireUs) {
  const end = step.answered_us ?? step.sent_us;
  const forwards = step.reply === "proposal" ? Math.max(step.num_tokens, 1) : 1;
  const roundTrip = end - step.sent_us;
  const queue = Math.min(step.queue_us, roundTrip);
  const reported = Math.min(step.compute_us * forwards, roundTrip - queue);
  const compute = isPrompt ? Math.max(reported, roundTrip - queue - wireUs) : reported;
  const name = step.role === "draft" ? "draft" : isPrompt ? "prefill" : "verify";
  const wire = roundTrip - queue - compute;
  return [["wire", wire / 2], ["queue", queue], [name, compute], ["wire", wire / 2]];
}

/** The steps of a timeline, each with the parts of its time. */
export function stepsOf(timeline) {
  let hasOutput = false;
  const steps = timeline.steps.map((step) => {
    const isPrompt = step.role === "target" && !hasOutput;
    if (step.role === "target" && step.reply === "span") hasOutput = true;
    return { step, isPrompt };
  });
  const wireUs = medianWireUs(steps);
  return steps.map(({ step, isPrompt }) => ({ step, isPrompt, parts: partsOf(step, isPrompt, wireUs) }));
}

/** Sums over a request, microseconds. Draft steps may overlap with verification, so the sum may exceed the total time. */
function sums(timeline, steps) {
  const total = Object.fromEntries(Object.keys(PARTS).map((name) => [name, 0]));
  for (const { parts } of steps) for (const [name, us] of parts) total[name] += us;
  const first = timeline.steps.find((step) => step.role === "target");
  total.queue += first ? first.sent_us : timeline.ended_us;
  const covered = timeline.steps.filter((step) => step.answered_us).map((step) => [step.sent_us, step.answered_us]);
  covered.sort((a, b) => a[0] - b[0]);
  let until = first?.sent_us ?? 0;
  for (const [start, end] of covered) {
    if (start > until) total.wait += start - until;
    until = Math.max(until, end);
  }
  total.wait += Math.max(0, timeline.ended_us - until);
  return total;
}

function waterfall(timeline, steps) {
  const x = (us) => LABELS + ((WIDTH - LABELS) * us) / Math.max(timeline.ended_us, 1);
  const shown = steps.slice(0, 60);
  const rows = shown.map(({ step, isPrompt, parts }, i) => {
    let at = step.sent_us;
    const bars = parts.map(([name, us]) => {
      const bar = svg("rect", { class: `part-${name}`, x: x(at), width: Math.max(x(at + us) - x(at), us > 0 ? 0.5 : 0), y: i * ROW + 2, height: ROW - 4 },
        svg("title", {}, `${PARTS[name]}: ${formatNumber(us / 1e3, 2)} ms`));
      at += us;
      return bar;
    });
    const label = step.role === "draft" ? `draft ${step.num_tokens} of ${step.k}`
      : step.reply === "fed" ? `append ${step.num_appended}`
      : isPrompt ? `prefill ${step.num_appended}`
      : step.k ? `verify ${step.num_tokens} of ${step.k}` : "decode";
    return [svg("text", { x: 0, y: i * ROW + 11 }, `${step.step_seq} ${label}`), bars];
  });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${Math.max(shown.length, 1) * ROW}`, role: "img", "aria-label": `Waterfall of ${plural(steps.length, "step")}` }, rows);
  return el("div", { class: "scroll waterfall" }, picture);
}

function card(timeline, isOpen) {
  const steps = stepsOf(timeline);
  const total = sums(timeline, steps);
  const rows = Object.entries(PARTS).map(([name, text]) => [text, number(total[name] / 1e3, 1), number((100 * total[name]) / Math.max(timeline.ended_us, 1), 0)]);
  return el("details", { class: "card timeline", open: isOpen, "data-request": `${timeline.request_id}/${timeline.choice}` },
    el("summary", {}, `${timeline.task_type || "other"} · ${formatNumber(timeline.ended_us / 1e3, 0)} ms · ${plural(timeline.num_tokens, "token")} · ${plural(timeline.steps.length + timeline.steps_left_out, "step")} · ${timeline.end} · ${timeline.request_id}`),
    waterfall(timeline, steps),
    steps.length > 60 ? el("p", { class: "hint" }, `The first 60 of ${steps.length + timeline.steps_left_out} steps are shown.`) : null,
    table("Sums over all recorded steps. Drafting may overlap with verification.", ["Part", "ms", "% of the request"], rows));
}

export function setUp() {
  byId("requests-legend").replaceChildren(...Object.entries(PARTS).map(([name, text]) =>
    el("span", {}, el("span", { class: `swatch part-${name}` }), text)));
}

export async function show() {
  const timelines = await getJson("/console/requests");
  const container = byId("requests");
  const known = new Map([...container.querySelectorAll("details")].map((details) => [details.dataset.request, details]));
  const cards = timelines.map((timeline, i) => known.get(`${timeline.request_id}/${timeline.choice}`) ?? card(timeline, i === 0 && known.size === 0));
  // Cards that are there stay in place: put in again, they would lose the focus, a selection and their scroll position.
  const shown = cards.length ? cards : [el("p", {}, "No request has ended yet.")];
  shown.forEach((card, i) => {
    if (container.children[i] !== card) container.insertBefore(card, container.children[i] ?? null);
  });
  while (container.children.length > shown.length) container.lastElementChild.remove();
}
