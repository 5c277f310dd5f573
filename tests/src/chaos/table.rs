//! Renders the results of a run as Markdown. Pure.

use std::time::Duration;

use super::impact::{FaultRecord, Impact, impacts, last_before, median_step, quantile};
use super::streams::{End, StreamRecord};
use super::{ChaosReport, footprint::Footprint};

/// Largest number of lost or different streams that are listed.
const SHOWN_FAILURES: usize = 24;

/// Progress line of one fault.
pub fn fault_line(fault: &FaultRecord) -> String {
    let elapsed = fault.recovered - fault.start;
    let mut line =
        format!("{}. {}: {}; recovered after {elapsed:.1?}", fault.number, fault.kind, fault.description);
    if !fault.interventions.is_empty() {
        line += &format!("; RESTARTED: {}", fault.interventions.join("; "));
    }
    line
}

/// Renders the whole report.
pub fn page(report: &ChaosReport) -> String {
    let mut page = faults(report);
    page += "\n";
    page += &footprint_table(&report.footprints);
    page += "\n";
    for stream in report.failures().take(SHOWN_FAILURES) {
        page += &failure_line(report, stream);
    }
    let more = report.failures().count().saturating_sub(SHOWN_FAILURES);
    if more > 0 {
        page += &format!("- and {more} more\n");
    }
    if let Some(error) = &report.aborted {
        page += &format!("- ABORTED: {error:#}\n");
    }
    page + &verdict(report)
}

fn faults(report: &ChaosReport) -> String {
    let step = median_step(&report.faults, &report.streams);
    let mut table = String::from(
        "| fault | count | streams in flight | stall P50, ms | P99, ms | P50, steps | P99, steps | lost | ids differ | ended with their router (of these begun) | faults with manual restarts |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for impact in impacts(&report.faults, &report.streams) {
        let Impact { kind, count, interventions, stalls, lost, differ, with_router, begun_with_router } =
            impact;
        let stall = |share| quantile(&stalls, share);
        table += &format!(
            "| {kind} | {count} | {} | {} | {} | {} | {} | {lost} | {differ} | {with_router} ({begun_with_router}) | {interventions} |\n",
            stalls.len(),
            millis(stall(0.5)),
            millis(stall(0.99)),
            steps(stall(0.5), step),
            steps(stall(0.99), step),
        );
    }
    table += &format!(
        "\nmedian step (interval between two messages of a stream without a fault): {} ms\n",
        millis(step)
    );
    table
}

fn footprint_table(footprints: &[(Footprint, Footprint)]) -> String {
    let mut table = String::from(
        "| process | sequences | KV blocks | descriptors before, after | MiB without cached KV before, after | back at the baseline |\n|---|---|---|---|---|---|\n",
    );
    for (before, after) in footprints {
        let excess = after.excess(before);
        let back = if excess.is_empty() { "yes".to_owned() } else { format!("no: {}", excess.join(", ")) };
        table += &format!(
            "| {} | {} | {} | {}, {} | {:.0}, {:.0} | {back} |\n",
            after.name,
            after.sequences,
            after.kv_blocks,
            before.descriptors,
            after.descriptors,
            before.memory_mib,
            after.memory_mib,
        );
    }
    table
}

fn failure_line(report: &ChaosReport, stream: &StreamRecord) -> String {
    let fault = last_before(&report.faults, stream.ended);
    let fault = fault.map_or_else(
        || "before any fault".to_owned(),
        |fault| format!("after fault {} ({})", fault.number, fault.kind),
    );
    let outcome = match &stream.end {
        End::Lost(why) => format!("lost after {} tokens: {}", stream.tokens, why.replace(&stream.name, "it")),
        End::Differs(at) => format!("differs at token {at} of {}", stream.tokens),
        end => format!("{end:?}"),
    };
    format!(
        "- stream {} through router {}, {fault}, {}: {outcome}\n",
        stream.number, stream.router, stream.name
    )
}

fn verdict(report: &ChaosReport) -> String {
    let count = |is_end: fn(&End) -> bool| report.streams.iter().filter(|stream| is_end(&stream.end)).count();
    let (drafted, accepted) = report.drafted();
    let tokens: u64 = report.streams.iter().map(|stream| stream.tokens).sum();
    format!(
        "{} faults, {} streams, {tokens} tokens: {} equal, {} lost, {} with other ids, {} ended with their router; {accepted} of {drafted} drafted tokens accepted; {}\n",
        report.faults.len(),
        report.streams.len(),
        count(|end| *end == End::Complete),
        count(|end| matches!(end, End::Lost(_))),
        count(|end| matches!(end, End::Differs(_))),
        count(|end| *end == End::RouterDown),
        match report.leaks().as_slice() {
            [] if report.footprints.is_empty() => "resources of the processes were not checked".to_owned(),
            [] => "every process is back at its baseline".to_owned(),
            leaks => format!("not back at the baseline: {}", leaks.join("; ")),
        },
    )
}

fn millis(time: Option<Duration>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{:.1}", time.as_secs_f64() * 1e3))
}

fn steps(time: Option<Duration>, step: Option<Duration>) -> String {
    match (time, step) {
        (Some(time), Some(step)) if !step.is_zero() => {
            format!("{:.0}", time.as_secs_f64() / step.as_secs_f64())
        }
        _ => "-".to_owned(),
    }
}
