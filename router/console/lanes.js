// Lanes: each lane's k, and what the choice rests on.

import { getJson } from "/console/api.js";
import { byId, el, figure, svg, table } from "/console/dom.js";

const WHY = {
  best: "it promises the most tokens a second",
  within_hysteresis: "another k promises more, but not by enough to move",
  settling: "it has just been moved, and rounds are not yet what they will be",
  moving: "it has just moved towards the k that promises the most",
};

const WIDTH = 320;
const HEIGHT = 150;
const LEFT = 34;
const BOTTOM = 24;
const TOP = 12;

function frame(title, ...inside) {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }), inside);
}

function acceptance(lane) {
  const values = lane.acceptance_by_position;
  const step = (WIDTH - LEFT) / Math.max(values.length, 1);
  const tall = HEIGHT - BOTTOM - TOP;
  const bars = values.flatMap((value, i) => [
    svg("rect", { class: "bar", x: LEFT + i * step + 3, width: step - 6, y: HEIGHT - BOTTOM - value * tall, height: value * tall }),
    svg("text", { x: LEFT + i * step + step / 2, y: HEIGHT - 8, "text-anchor": "middle" }, i + 1),
    svg("text", { x: LEFT + i * step + step / 2, y: HEIGHT - BOTTOM - value * tall - 3, "text-anchor": "middle" }, figure(value, 2)),
  ]);
  const says = values.map((value, i) => `position ${i + 1}: ${figure(value, 2)}`).join(", ");
  return el("figure", {}, el("figcaption", { class: "hint" }, "Chance that a draft is accepted up to this position"), frame(says, bars));
}

function goodput(lane) {
  const { outlook, measured_tokens_per_second: measured } = lane;
  if (outlook.length === 0) return el("p", { class: "hint" }, "No outlook before the first round.");
  const most = Math.max(measured, ...outlook.map((at) => at.tokens_per_second)) * 1.1 || 1;
  const x = (k) => LEFT + 14 + ((WIDTH - LEFT - 28) * k) / Math.max(outlook.length - 1, 1);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / most;
  const points = outlook.map((at) => `${x(at.k)},${y(at.tokens_per_second)}`).join(" ");
  const inside = [
    svg("polyline", { class: "predicted", points }),
    outlook.map((at) => svg("circle", { class: at.k === lane.k ? "dot chosen" : "dot", cx: x(at.k), cy: y(at.tokens_per_second), r: at.k === lane.k ? 6 : 3.5 },
      svg("title", {}, `k = ${at.k}: ${figure(at.tokens_per_second)} tokens/s`))),
    outlook.map((at) => svg("text", { x: x(at.k), y: HEIGHT - 8, "text-anchor": "middle" }, at.k)),
    svg("text", { x: 0, y: TOP + 4 }, figure(most, 0)),
    measured > 0 ? svg("line", { class: "measured", x1: LEFT, x2: WIDTH, y1: y(measured), y2: y(measured) }) : null,
  ].flat();
  const says = `Predicted tokens a second by k. ${outlook.map((at) => `${at.k}: ${figure(at.tokens_per_second)}`).join(", ")}. Measured at k = ${lane.k}: ${figure(measured)}`;
  return el("figure", {}, el("figcaption", { class: "hint" },
    `Tokens a second by k: predicted (line), measured at k = ${lane.k}: ${measured > 0 ? figure(measured) : "not yet"} (dashed)`), frame(says, inside));
}

function card(lane) {
  const why = lane.held_back ? `held back by policy: ${lane.held_back}` : (WHY[lane.why] ?? lane.why);
  return el("article", { class: "card lane" },
    el("h3", {}, `${lane.task_type || "other"} · ${lane.temperature} · ${lane.model}`),
    el("p", {}, el("strong", {}, `k = ${lane.k}`), ` of at most ${lane.max_k}: ${why}. `,
      el("span", { class: "hint" }, `${lane.sequences} sequences now, ${lane.running} of them at a target, ${lane.lane_rounds} rounds, ${lane.probes} probes, ${figure(lane.judged, 0)} judged positions.`)),
    el("div", { class: "charts" }, acceptance(lane), goodput(lane)),
    el("details", {}, el("summary", {}, "Numbers"),
      table("What each k promises", ["k", "tokens a round", "draft wait, ms", "verification, ms", "tokens/s"],
        lane.outlook.map((at) => [at.k, Number(figure(at.expected_tokens, 2)), Number(figure(at.draft_wait_us / 1e3, 2)), Number(figure(at.verify_us / 1e3, 2)), Number(figure(at.tokens_per_second))]))));
}

export async function show() {
  const { lanes } = await getJson("/debug/lanes");
  const box = byId("lanes");
  const open = [...box.querySelectorAll("details")].map((details) => details.open);
  box.replaceChildren(...(lanes.length ? lanes.map(card) : [el("p", {}, "No lane yet: lanes open with their first request.")]));
  box.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
}
