// The page Pools: every worker with its health, KV, load and a button to drain it.

import { getJson, send } from "./api.js";
import { byId, el, formatNumber, number, plural, render, table } from "./dom.js";

function state(worker) {
  const bad = (text) => el("span", { class: "state bad" }, text);
  if (worker.draining) return bad(`draining: ${worker.draining}`);
  if (worker.is_on_trial) return el("span", { class: "state good" }, "on trial");
  const { health, target_health: target } = worker;
  if (health?.is_silent) return bad(`silent for ${formatNumber(health.silent_ms / 1e3)} s`);
  if (target?.is_silent) return bad("silent");
  if (target?.is_open) return bad("avoided after failures");
  return el("span", { class: "state good" }, "healthy");
}

function kvUsage(worker) {
  const { reserved_blocks: reserved, credit_blocks: credit } = worker;
  if (!credit) return "none";
  const share = `${formatNumber((100 * reserved) / credit, 0)}% of ${credit} blocks`;
  return el("span", {}, el("meter", { min: 0, max: credit, value: reserved, high: 0.9 * credit, "aria-label": `KV reserved: ${share}` }), ` ${share}`);
}

/** The button that drains the worker at an address, or undoes that. */
function drainButton(address, isDrained) {
  const text = isDrained ? "Undo" : "Drain";
  const toggle = async () => {
    const status = byId("pools-status");
    try {
      await send(isDrained ? "DELETE" : "POST", `/admin/workers/${encodeURIComponent(address)}/drain`);
      status.textContent = isDrained ? `${address} is no longer drained.` : `${address} gets no new sequences.`;
      await show();
    } catch (error) {
      status.textContent = `${text} ${address}: ${error.message}`;
    }
  };
  return el("button", { type: "button", click: toggle, "data-key": address, "aria-label": `${text} ${address}` }, text);
}

/** Drained addresses at which no worker is connected, for example after it has stopped. */
function absent({ drained, workers }) {
  const addresses = drained.filter((address) => workers.every((worker) => worker.address !== address));
  if (addresses.length === 0) return [];
  return table("Drained and not connected: a worker that starts there gets no sequences", ["Address", "Drain"], addresses.map((address) => [address, drainButton(address, true)]));
}

// The drafts on trial, compared with the serving drafts.
function trialTables({ shadows, rollout }) {
  if (!shadows?.drafts.length) return [];
  const columns = ["Draft", "Text", "Drafts compared", "Accepted tokens per draft", "By the serving draft", "Step, ms"];
  const rows = shadows.drafts.flatMap((draft) => [
    [draft.draft, "all, at the same positions", draft.paired.drafts, number(draft.paired.shadow_accepted, 2), number(draft.paired.serving_accepted, 2), number(draft.step_us == null ? NaN : draft.step_us / 1e3, 2)],
    ...draft.task_types.map((task) => [draft.draft, task.task_type, task.shadow.drafts, number(task.shadow_accepted, 2), number(task.serving_accepted, 2), ""]),
  ]);
  const rolloutStage = rollout ? [el("p", {}, `Rollout of ${rollout.draft}: ${rollout.stage.replaceAll("_", " ")}, share ${formatNumber(100 * rollout.share, 0)}%, evidence: ${rollout.verdict.replaceAll("_", " ")}.`)] : [];
  return [...rolloutStage, table("Drafts on trial", columns, rows)];
}

export async function show() {
  const report = await getJson("/debug/lanes");
  const { workers, waiting_for_target: waiting } = report;
  const columns = ["State", "Address", "Serves", "Numerics id", "Sequences", "KV reserved", "Network, ms", "Outages", "Missed deadlines", "Drain"];
  const row = (worker) => {
    const faults = worker.health ?? worker.target_health;
    const serves = worker.task_types.length ? `${worker.model} (${worker.task_types.join(", ")})` : worker.model;
    return [state(worker), worker.address, serves, worker.numerics_id, worker.sequences, kvUsage(worker),
      number(worker.wire_us / 1e3, 2), faults?.outages ?? 0, worker.health?.missed_deadlines ?? 0, drainButton(worker.address, worker.draining === "operator")];
  };
  const pool = (role) => {
    const rows = workers.filter((worker) => worker.role === role).map(row);
    const name = role === "target" ? "Target" : "Draft";
    return rows.length ? table(`${name} workers`, columns, rows) : el("p", {}, `No ${role} worker is connected.`);
  };
  render(byId("pools"), el("p", {}, `${plural(waiting, "sequence")} waiting for a target.`), pool("target"), pool("draft"), absent(report), trialTables(report));
}
