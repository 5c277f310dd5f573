//! Renders a plan as text.

use super::limits::Limit;
use super::placement::{LoadLine, Placement, PlacementKind, Plan, RateAnswer, Shortage};
use super::weights::WeightMemory;
use crate::output::line;

/// Renders the whole plan.
pub(super) fn text(plan: &Plan) -> String {
    let mut text = String::new();
    memory(&mut text, plan);
    for placement in &plan.placements {
        text.push('\n');
        write_placement(&mut text, plan, placement);
    }
    let assumed = &plan.assumed;
    line!(
        text,
        "\nassumed, not measured: {:.2} of bandwidth, {:.2} of compute, {:.2} of memory; {} us per forward, {} us per all-reduce, \
             {} us round trip, {} us of router time per sequence and round; at most {} rows per forward",
        assumed.bandwidth_share,
        assumed.compute_share,
        assumed.memory_share,
        assumed.step_overhead_us,
        assumed.all_reduce_us,
        assumed.wire_us,
        assumed.router_us,
        assumed.rows_max
    );
    if plan.draft.is_some() {
        line!(
            text,
            "next: acceptance matters most: measure it with `outrider check-pair` and give it by position, as in \
                 --acceptance 0.8,0.75,0.7"
        );
    }
    text
}

/// A count with its noun.
fn plural(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn memory(text: &mut String, plan: &Plan) {
    line!(
        text,
        "{:<8}{:>18}{:>14}{:>12}{:>16}{:>13}{:>16}",
        "",
        "parameters",
        "weights GB",
        "scales GB",
        "unquantized GB",
        "resident GB",
        "KV bytes/token"
    );
    let mut row = |name: &str, weights: &WeightMemory, kv: f64| {
        line!(
            text,
            "{name:<8}{:>18}{:>14.2}{:>12.2}{:>16.2}{:>13.2}{kv:>16}",
            grouped(weights.parameters),
            weights.weights_gb,
            weights.scales_gb,
            weights.unquantized_gb,
            weights.resident_gb
        );
    };
    row("target", &plan.target, plan.kv_bytes_per_token);
    if let (Some(draft), Some(kv)) = (&plan.draft, plan.draft_kv_bytes_per_token) {
        row("draft", draft, kv);
        let ratio = plan.target.parameters as f64 / draft.parameters as f64;
        let total = plan.weights_gb.total;
        line!(text, "{:<8}{:>18}{total:>14.2}", "both", format!("1 : {ratio:.1}"));
    }
    let gpus = &plan.target_gpus;
    let drafting = plan.draft_gpus.as_ref().map(|gpus| format!("; {gpus} draft")).unwrap_or_default();
    let acceptance: Vec<String> = plan.acceptance.iter().map(f64::to_string).collect();
    line!(
        text,
        "\n{} on {gpus} each{drafting}; sequences of {} tokens, {} of them generated; acceptance {}; a prompt takes \
             {:.0} ms on an idle target",
        plural(plan.targets.into(), "target"),
        plan.context,
        plan.output_tokens,
        acceptance.join(", "),
        plan.prompt_ms
    );
}

fn write_placement(text: &mut String, plan: &Plan, placement: &Placement) {
    let title = match placement.name {
        PlacementKind::Plain => "without a draft",
        PlacementKind::Colocated => "draft on the target's GPUs",
        PlacementKind::Apart => "draft on separate GPUs",
    };
    if let Some(Shortage { at_draft, left_gb, sequence_gb }) = placement.shortage {
        let place = if at_draft { " at a draft GPU for one target" } else { "" };
        return line!(
            text,
            "{title}: does not fit: {left_gb:.1} GB are left for KV{place}, and a sequence of {} tokens needs {sequence_gb:.1} GB \
                 there; breaks first: memory",
            plan.context
        );
    }
    let budget = placement.kv_budget_gb;
    line!(
        text,
        "{title}: KV budget {budget:.1} GB, {} at once at each target",
        plural(placement.concurrency, "sequence")
    );
    loads(text, &placement.loads);
    if let Some(rate) = &placement.rate {
        rates(text, rate);
    }
    if let Some(wanted) = placement.wanted_draft_gpus_per_target {
        let wanted = plural(wanted, "draft GPU");
        line!(text, "  wanted ratio: {wanted} for each target at its full load");
    }
    if let Some(longest) = placement.longest_wire_ms {
        line!(
            text,
            "  wire: for one sequence, drafting pays up to a round trip of {longest:.1} ms to the draft"
        );
    }
    write_limits(text, &placement.limits);
}

fn loads(text: &mut String, loads: &[LoadLine]) {
    line!(
        text,
        "{:>11}{:>4}{:>14}{:>10}{:>11}{:>10}{:>11}{:>9}{:>16}",
        "sequences",
        "k",
        "tokens/round",
        "draft ms",
        "verify ms",
        "TPOT ms",
        "tokens/s",
        "speedup",
        "cost/1M tokens"
    );
    for LoadLine { sequences, best, speedup, cost_per_million } in loads {
        let cost = cost_per_million.map_or_else(|| "-".to_owned(), |cost| format!("{cost:.2}"));
        line!(
            text,
            "{sequences:>11}{:>4}{:>14.2}{:>10.2}{:>11.2}{:>10.2}{:>11.0}{speedup:>9.2}{cost:>16}",
            best.k,
            best.expected_tokens,
            best.draft_ms,
            best.verify_ms,
            best.tpot_ms,
            best.tokens_per_second
        );
    }
}

fn rates(text: &mut String, rate: &RateAnswer) {
    match &rate.at {
        Some(at) => line!(
            text,
            "  rate: served with {} at each target, {:.2} ms per token; at most {:.2} requests/s",
            plural(at.sequences, "sequence"),
            at.best.tpot_ms,
            rate.most
        ),
        None => line!(
            text,
            "  rate: not served: at most {:.2} requests/s; needed: {}",
            rate.most,
            plural(rate.targets_needed, "target")
        ),
    }
}

fn write_limits(text: &mut String, limits: &[Limit]) {
    for (i, limit) in limits.iter().enumerate() {
        let at = limit.sequences.map_or_else(|| "never".to_owned(), |n| plural(n, "sequence"));
        let first = if i == 0 { "breaks first:" } else { "" };
        line!(text, "  {first:<14}{:<12}{at:>16}  {}", limit.what, limit.then);
    }
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
