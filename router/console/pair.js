// The page Pair: the report of `outrider check-pair` on the target and its draft, by task type.

import { getJson, send } from "./api.js";
import { byId, el, formatNumber, number, plural, svg, table } from "./dom.js";

let shownReport = "";

/** The last two components of a checkpoint's path, which identify the model. */
function shortPath(path) {
  return path.split("/").slice(-2).join("/");
}

function rateBar(rate) {
  if (rate === null) return "–";
  return el("span", { class: "rate" },
    svg("svg", { viewBox: "0 0 100 12", role: "img", "aria-label": `${formatNumber(100 * rate, 0)} percent` },
      svg("rect", { class: "track", x: 0, y: 0, width: 100, height: 12 }),
      svg("rect", { class: "bar", x: 0, y: 0, width: 100 * rate, height: 12 })),
    ` ${formatNumber(rate, 2)}`);
}

function advice(task, placement, sequences) {
  const entry = task.advice.find((candidate) => candidate.placement === placement && candidate.sequences === sequences);
  if (!entry) return "–";
  return entry.k === 0 ? "off" : `k = ${entry.k}, ${formatNumber(entry.speedup, 2)} times`;
}

function tasks(measured) {
  const placements = [["colocated", 1], ["colocated", 8], ["apart", 1], ["apart", 8]];
  const columns = ["task type", "acceptance rate", "tokens per verification", ...placements.map(([placement, n]) => `${placement}, ${n} concurrent`)];
  const rows = measured.tasks.map((task) => [task.task, rateBar(task.acceptance_rate), number(task.acceptance_length, 2), ...placements.map((placement) => advice(task, ...placement))]);
  return table(`Best k and expected speedup by task type, measured with drafts of ${measured.num_draft_tokens} tokens`, columns, rows);
}

function positions(measured) {
  const lines = measured.acceptance.filter((line) => line.mode === "coupled" && line.task === "all");
  const maxLength = Math.max(0, ...lines.map((line) => line.acceptance_by_position.length));
  const columns = ["temperature", ...Array.from({ length: maxLength }, (_, i) => `position ${i + 1}`)];
  const rows = lines.map((line) => [number(line.temperature, 1), ...Array.from({ length: maxLength }, (_, i) => number(line.acceptance_by_position[i], 2))]);
  return table("Probability that a position is accepted if all earlier ones were", columns, rows);
}

function card(report) {
  const { measured, size, text } = report;
  if (!measured) {
    return el("article", { class: "card" }, el("h3", {}, report.draft),
      el("p", { class: "verdict bad" }, `Not measured: its token list and that of ${report.target} differ: ${text.first_difference}. A draft worker serves such a pair with --target-tokenizer.`));
  }
  const bestSpeedup = Math.max(...measured.tasks.filter((task) => task.task === "all").flatMap((task) => task.advice.map((entry) => entry.speedup)), 1);
  const verdict = bestSpeedup > 1.05 ? `Drafting gains: up to ${formatNumber(bestSpeedup, 2)} times as fast on this machine.` : "Drafting gains nothing on this machine.";
  const offTasks = measured.tasks.filter((task) => task.switch_off && task.task !== "all").map((task) => task.task);
  const leftOut = Object.entries(measured.left_out ?? {}).map(([task, count]) => `${task} (${plural(count, "prompt")})`);
  return el("article", { class: "card pair" },
    el("h3", {}, `${shortPath(report.draft)} for ${shortPath(report.target)}`),
    el("p", { class: bestSpeedup > 1.05 ? "verdict good" : "verdict" }, verdict),
    el("p", { class: "hint" }, `The target has ${formatNumber(size.ratio)} times the parameters; a draft step takes ${formatNumber(measured.cost.ratio_at_1_row ?? NaN, 2)} of the time of a target step with 1 row, ${formatNumber(measured.cost.ratio_at_8_rows ?? NaN, 2)} with 8.`,
      offTasks.length ? ` No draft length gains for: ${offTasks.join(", ")}.` : "",
      leftOut.length ? ` Left out, because no prompt fits the models' window: ${leftOut.join(", ")}.` : ""),
    tasks(measured), positions(measured));
}

function statusText(page) {
  switch (page.state) {
    case "not_configured": return "This router is not configured to check its pair. Run `outrider check-pair --target DIR --draft DIR` on the machine that has the models, or start the router with --pair-check (docs/operating.md).";
    case "not_run": return "Not checked yet.";
    case "running": return "Checking. Both models are loaded a second time, and some prompts of each task type are decoded. This takes about a minute and slows down requests.";
    case "failed": return `The check failed: ${page.message}`;
    default: return `Checked in ${formatNumber(page.seconds, 0)} s.`;
  }
}

function render(page) {
  byId("pair-check").disabled = ["not_configured", "running"].includes(page.state);
  const text = JSON.stringify(page);
  if (text === shownReport) return;
  shownReport = text;
  byId("pair-status").textContent = statusText(page);
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
