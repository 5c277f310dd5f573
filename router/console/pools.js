// Pools: every worker with its health, KV and load, and a way to drain it.

import { getJson, send } from "/console/api.js";
import { byId, el, figure, table } from "/console/dom.js";

function state(worker) {
  const bad = (text) => el("span", { class: "state bad" }, text);
  if (worker.draining) return bad(`draining: ${worker.draining}`);
  if (worker.is_on_trial) return el("span", { class: "state good" }, "on trial");
  const { health, target_health: target } = worker;
  if (health?.is_out) return bad(`silent for ${figure(health.out_ms / 1e3)} s`);
  if (target?.is_silent) return bad("silent");
  if (target?.is_open) return bad("avoided after failures");
  return el("span", { class: "state good" }, "answers");
}

function kv(worker) {
  const { reserved_blocks: reserved, credit_blocks: credit } = worker;
  if (!credit) return "none";
  const share = `${figure((100 * reserved) / credit, 0)}% of ${credit} blocks`;
  return el("span", {}, el("meter", { min: 0, max: credit, value: reserved, high: 0.9 * credit, "aria-label": `KV reserved: ${share}` }), ` ${share}`);
}

// A router that can drain workers says of each whether it is.
function drainButton(worker) {
  if (!("draining" in worker)) return "–";
  const isDrained = worker.draining === "operator";
  const act = async () => {
    await send(isDrained ? "DELETE" : "POST", `/admin/workers/${encodeURIComponent(worker.address)}/drain`);
    await show();
  };
  const text = isDrained ? "Undo" : "Drain";
  return el("button", { type: "button", click: act, "aria-label": `${text} ${worker.role} worker ${worker.address}` }, text);
}

// Drafts on trial beside the drafts that serve, where there are some.
function trials({ shadows, rollout }) {
  if (!shadows?.drafts.length) return [];
  const head = ["Draft", "Text", "Drafts compared", "Accepted tokens of each", "Serving draft's", "Step, ms"];
  const rows = shadows.drafts.flatMap((draft) => [
    [draft.draft, "all, at the same places", draft.paired.drafts, figure(draft.paired.shadow_accepted, 2), figure(draft.paired.serving_accepted, 2), draft.step_us == null ? "–" : figure(draft.step_us / 1e3, 2)],
    ...draft.task_types.map((task) => [draft.draft, task.task_type, task.shadow.drafts, figure(task.shadow_accepted, 2), task.serving_accepted == null ? "–" : figure(task.serving_accepted, 2), ""]),
  ]);
  const stage = rollout ? [el("p", {}, `Rollout of ${rollout.draft}: ${rollout.stage.replace("_", " ")}, share ${figure(100 * rollout.share, 0)}%, evidence: ${rollout.verdict.replaceAll("_", " ")}.`)] : [];
  return [...stage, table("Drafts on trial", head, rows)];
}

export async function show() {
  const report = await getJson("/debug/lanes");
  const { workers, waiting_for_target: waiting } = report;
  const head = ["State", "Address", "Serves", "Sequences", "KV reserved", "Wire, ms", "Outages", "Missed deadlines", "Drain"];
  const row = (worker) => {
    const faults = worker.health ?? worker.target_health;
    const serves = worker.task_types.length ? `${worker.model} (${worker.task_types.join(", ")})` : worker.model;
    return [state(worker), worker.address, serves, worker.sequences, kv(worker),
      Number(figure(worker.wire_us / 1e3, 2)), faults?.outages ?? 0, worker.health?.missed_deadlines ?? 0, drainButton(worker)];
  };
  const pool = (role) => table(`${role === "target" ? "Target" : "Draft"} workers`, head, workers.filter((worker) => worker.role === role).map(row));
  byId("pools").replaceChildren(el("p", {}, `${waiting} sequences wait for a target.`), pool("target"), pool("draft"), ...trials(report));
}
