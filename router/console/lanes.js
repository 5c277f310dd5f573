// The page Lanes: each lane's k and the data that it was chosen from.

import { getJson } from "./api.js";
import { byId, el, formatNumber, number, plural, render, svg, table } from "./dom.js";

const REASONS = {
  best: "it has the highest predicted throughput",
  within_hysteresis: "another k has a higher prediction, but not by the required margin",
  confirming: "a longer draft has the highest prediction, for the first time beside these lanes",
  settling: "it has just changed, and round times have not settled",
  moving: "it has just changed to the k with the highest prediction",
};

const WIDTH = 320;
const HEIGHT = 150;
const LEFT = 34;
const BOTTOM = 24;
const TOP = 12;

function chart(title, ...marks) {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }), marks);
}

/** Whether the i-th of several labels of this width fits, if they are `step` apart. */
function hasLabel(i, width, step) {
  return i % Math.ceil(width / step) === 0;
}

function acceptance(lane) {
  const values = lane.acceptance_by_position;
  const step = (WIDTH - LEFT) / Math.max(values.length, 1);
  const plotHeight = HEIGHT - BOTTOM - TOP;
  const bars = values.flatMap((value, i) => [
    svg("rect", { class: "bar", x: LEFT + i * step + 3, width: Math.max(step - 6, 1), y: HEIGHT - BOTTOM - value * plotHeight, height: value * plotHeight }),
    hasLabel(i, 14, step) ? svg("text", { x: LEFT + i * step + step / 2, y: HEIGHT - 8, "text-anchor": "middle" }, i + 1) : null,
    hasLabel(i, 24, step) ? svg("text", { x: LEFT + i * step + step / 2, y: HEIGHT - BOTTOM - value * plotHeight - 3, "text-anchor": "middle" }, formatNumber(value, 2)) : null,
  ]);
  const label = values.map((value, i) => `position ${i + 1}: ${formatNumber(value, 2)}`).join(", ");
  return el("figure", {}, el("figcaption", { class: "hint" }, "Probability that a draft is accepted up to this position"), chart(label, bars));
}

function goodput(lane) {
  const { outlook, measured_tokens_per_second: measured } = lane;
  if (outlook.length === 0) return el("p", { class: "hint" }, "No prediction before the first round.");
  const maxValue = Math.max(measured, ...outlook.map((point) => point.tokens_per_second)) * 1.1 || 1;
  const x = (k) => LEFT + 14 + ((WIDTH - LEFT - 28) * k) / Math.max(outlook.length - 1, 1);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / maxValue;
  const points = outlook.map((point) => `${x(point.k)},${y(point.tokens_per_second)}`).join(" ");
  const marks = [
    svg("polyline", { class: "predicted", points }),
    outlook.map((point) => svg("circle", { class: point.k === lane.k ? "dot chosen" : "dot", cx: x(point.k), cy: y(point.tokens_per_second), r: point.k === lane.k ? 6 : 3.5 },
      svg("title", {}, `k = ${point.k}: ${formatNumber(point.tokens_per_second)} tokens/s`))),
    outlook.filter((_, i) => hasLabel(i, 14, x(1) - x(0))).map((point) => svg("text", { x: x(point.k), y: HEIGHT - 8, "text-anchor": "middle" }, point.k)),
    svg("text", { x: 0, y: TOP + 4 }, formatNumber(maxValue, 0)),
    measured > 0 ? svg("line", { class: "measured", x1: LEFT, x2: WIDTH, y1: y(measured), y2: y(measured) }) : null,
  ].flat();
  const label = `Predicted tokens per second by k. ${outlook.map((point) => `${point.k}: ${formatNumber(point.tokens_per_second)}`).join(", ")}. Measured at k = ${lane.k}: ${formatNumber(measured)}`;
  return el("figure", {}, el("figcaption", { class: "hint" },
    `Tokens per second by k: predicted (line), measured at k = ${lane.k}: ${measured > 0 ? formatNumber(measured) : "not yet"} (dashed)`), chart(label, marks));
}

function card(lane) {
  const key = JSON.stringify([lane.model, lane.task_type, lane.temperature]);
  const reason = lane.held_back ? `held back by policy: ${lane.held_back.replaceAll("_", " ")}` : (REASONS[lane.why] ?? lane.why);
  return el("article", { class: "card lane" },
    el("h3", {}, `${lane.task_type || "other"} · ${lane.temperature} · ${lane.model}`),
    el("p", {}, el("strong", {}, `k = ${lane.k}`), ` of at most ${lane.max_k}: ${reason}. `,
      el("span", { class: "hint" }, `${plural(lane.sequences, "sequence")}, of which assigned to a target: ${lane.running}; ${plural(lane.lane_rounds, "round")}, ${plural(lane.probes, "probe")}, verified positions: ${formatNumber(lane.judged, 0)}.`)),
    el("div", { class: "charts" }, acceptance(lane), goodput(lane)),
    el("details", { "data-key": key }, el("summary", { "data-key": `${key} summary` }, "Numbers"),
      table("Prediction for each k", ["k", "tokens per round", "draft wait, ms", "verification, ms", "tokens/s"],
        lane.outlook.map((point) => [point.k, number(point.expected_tokens, 2), number(point.draft_wait_us / 1e3, 2), number(point.verify_us / 1e3, 2), number(point.tokens_per_second, 1)]))));
}

export async function show() {
  const { lanes } = await getJson("/debug/lanes");
  render(byId("lanes"), lanes.length ? lanes.map(card) : el("p", {}, "No lanes yet: a lane is created by its first request."));
}
