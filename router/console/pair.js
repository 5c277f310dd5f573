// Pair: what `outrider check-pair` finds of the target and its draft, by task type.

import { getJson, send } from "/console/api.js";
import { byId, el, figure, svg, table } from "/console/dom.js";

let shown = "";

/** A checkpoint's folder and the one that it is in: the rest of a path says nothing of a model. */
function short(path) {
  return path.split("/").slice(-2).join("/");
}

function bar(rate) {
  if (rate === null) return "–";
  return el("span", { class: "rate" },
    svg("svg", { viewBox: "0 0 100 12", role: "img", "aria-label": `${figure(100 * rate, 0)} percent` },
      svg("rect", { class: "track", x: 0, y: 0, width: 100, height: 12 }),
      svg("rect", { class: "bar", x: 0, y: 0, width: 100 * rate, height: 12 })),
    ` ${figure(rate, 2)}`);
}

function advice(task, placement, sequences) {
  const found = task.advice.find((one) => one.placement === placement && one.sequences === sequences);
  if (!found) return "–";
  return found.k === 0 ? "off" : `k = ${found.k}, ${figure(found.speedup, 2)} times`;
}

function tasks(measured) {
  const places = [["colocated", 1], ["colocated", 8], ["apart", 1], ["apart", 8]];
  const head = ["task type", "accepted", "tokens a verification", ...places.map(([place, n]) => `${place}, ${n} at once`)];
  const rows = measured.tasks.map((task) => [task.task, bar(task.acceptance_rate), Number(figure(task.acceptance_length, 2)), ...places.map((place) => advice(task, ...place))]);
  return table(`The k that pays and the expected speedup, by task type (drafts of ${measured.num_draft_tokens} tokens were measured)`, head, rows);
}

function positions(measured) {
  const lines = measured.acceptance.filter((line) => line.mode === "coupled" && line.task === "all");
  const most = Math.max(0, ...lines.map((line) => line.acceptance_by_position.length));
  const head = ["temperature", ...Array.from({ length: most }, (_, i) => `position ${i + 1}`)];
  const rows = lines.map((line) => [Number(figure(line.temperature, 1)), ...Array.from({ length: most }, (_, i) => Number(figure(line.acceptance_by_position[i] ?? NaN, 2)) || "–")]);
  return table("Chance to be accepted by position, where all before were", head, rows);
}

function card(report) {
  const { measured, size, text } = report;
  if (!measured) {
    return el("article", { class: "card" }, el("h3", {}, report.draft),
      el("p", { class: "verdict bad" }, `No router pairs it with ${report.target}: their token lists differ, first at ${text.first_difference}.`));
  }
  const best = Math.max(...measured.tasks.filter((task) => task.task === "all").flatMap((task) => task.advice.map((one) => one.speedup)), 1);
  const verdict = best > 1.05 ? `Drafting pays: up to ${figure(best, 2)} times as fast on this machine.` : "Drafting does not pay on this machine.";
  const off = measured.tasks.filter((task) => task.switch_off && task.task !== "all").map((task) => task.task);
  return el("article", { class: "card pair" },
    el("h3", {}, `${short(report.draft)} for ${short(report.target)}`),
    el("p", { class: best > 1.05 ? "verdict good" : "verdict" }, verdict),
    el("p", { class: "hint" }, `Parameters 1 to ${figure(size.ratio)}; a draft step takes ${figure(measured.cost.ratio_at_1_row ?? NaN, 2)} of a target step with 1 row, ${figure(measured.cost.ratio_at_8_rows ?? NaN, 2)} with 8.`,
      off.length ? ` Accepted less than half: ${off.join(", ")}.` : ""),
    tasks(measured), positions(measured));
}

function says(page) {
  switch (page.state) {
    case "not_configured": return "This router was not told how to check its pair. Run `outrider check-pair --target DIR --draft DIR` beside the models, or start the router with --pair-check (docs/operating.md).";
    case "not_run": return "Not checked yet.";
    case "running": return "Checking. Both models are loaded a second time, and some prompts of each task type are decoded: this takes a minute, and time from what is served.";
    case "failed": return `The check failed: ${page.message}`;
    default: return `Checked in ${figure(page.seconds, 0)} s.`;
  }
}

function render(page) {
  byId("pair-check").disabled = ["not_configured", "running"].includes(page.state);
  const text = JSON.stringify(page);
  if (text === shown) return;
  shown = text;
  byId("pair-status").textContent = says(page);
  byId("pair-command").textContent = page.command.join(" ");
  byId("pair-report").replaceChildren(...(page.reports ?? []).map(card));
}

export async function show() {
  render(await getJson("/console/pair"));
}

export function setUp() {
  byId("pair-check").addEventListener("click", async () => {
    byId("pair-check").disabled = true;
    try {
      await send("POST", "/console/pair");
      await show();
    } catch (error) {
      byId("pair-status").textContent = error.message;
      byId("pair-check").disabled = false;
    }
  });
}
