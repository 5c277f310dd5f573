//! The output of a run: a table, or a JSON object per format.

use serde::Serialize;

use super::EngineBenchArgs;
use super::measure::{BenchResults, Case, CaseResult, FormatBench};
use super::memory::{LoadMemory, resident_bytes};
use super::slower::{FormatTimes, SlowerThan, slower_than};
use crate::output::line;

/// JSON output for one format.
#[derive(Serialize)]
struct Document<'a> {
    model: &'a str,
    weights: &'a str,
    cpu: String,
    instruction_set: &'static str,
    threads: usize,
    parameters: u64,
    numerics_id: &'a str,
    load_s: f64,
    read_gb_s: f64,
    read_streams: usize,
    read_bytes: usize,
    weight_bytes: u64,
    kv_bytes_per_token: u64,
    /// Bytes of weights and KV cache read for one row after the first context.
    bytes_per_token: u64,
    /// Peak memory during loading, beyond the memory in use before.
    load_peak_bytes: Option<u64>,
    /// Peak relative to the memory that the model keeps: weights and the embedding table.
    load_peak_over_held: Option<f64>,
    /// Resident memory: all formats, their KV cache and the memory of the read probe.
    resident_bytes: Option<u64>,
    rows: Vec<Row>,
    knees: Vec<Knee>,
    /// Cases in which a format with more bytes took less time.
    slower_than: Vec<SlowerThan>,
    /// Cases that do not fit into the model's window.
    left_out: &'a [Case],
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    case: Case,
    ms: f64,
    tokens_per_s: f64,
    bandwidth_share: f64,
    /// Time of forward and draws together.
    step_ms: f64,
    attention_share: f64,
    vocabulary_share: f64,
    draw_share: f64,
    draw_ms: f64,
}

/// The largest number of rows of one sequence whose forward takes at most [`KNEE`] times as long as that of
/// one row.
#[derive(Serialize)]
struct Knee {
    context: usize,
    rows: usize,
}

/// See [`Knee`].
const KNEE: f64 = 1.5;

impl Row {
    fn new(measured: &CaseResult) -> Self {
        let Case { rows, sequences, .. } = measured.case;
        let parts = measured.parts;
        let draw_share = parts.draws / parts.steps;
        let step_ms = measured.seconds * 1e3 / (1.0 - draw_share);
        Self {
            case: measured.case,
            ms: measured.seconds * 1e3,
            tokens_per_s: (rows * sequences) as f64 / measured.seconds,
            bandwidth_share: measured.bandwidth_share,
            step_ms,
            attention_share: parts.attention / parts.steps,
            vocabulary_share: parts.vocabulary / parts.steps,
            draw_share,
            draw_ms: step_ms * draw_share,
        }
    }
}

/// One knee per context at which one row was measured.
fn knees(rows: &[Row]) -> Vec<Knee> {
    let of_one_sequence = || rows.iter().filter(|row| row.case.sequences == 1);
    let ones = of_one_sequence().filter(|row| row.case.rows == 1);
    ones.map(|one| {
        let context = one.case.context;
        let cheap = of_one_sequence().filter(|row| row.case.context == context && row.ms <= KNEE * one.ms);
        Knee { context, rows: cheap.map(|row| row.case.rows).max().unwrap_or(1) }
    })
    .collect()
}

/// The text to print.
pub(super) fn text(args: &EngineBenchArgs, results: &BenchResults, left_out: &[Case]) -> String {
    let of_format = |format: &FormatBench| {
        let document = document(args, results, format, left_out);
        match args.json {
            true => format!("{}\n", serde_json::json!(document)),
            false => table(&document),
        }
    };
    results.formats.iter().map(of_format).collect()
}

fn document<'a>(
    args: &'a EngineBenchArgs,
    results: &BenchResults,
    format: &'a FormatBench,
    left_out: &'a [Case],
) -> Document<'a> {
    let info = format.engine.info();
    let first = format.measured.first().map_or(0, |measured| measured.case.context);
    let rows: Vec<Row> = format.measured.iter().map(Row::new).collect();
    let load_peak = format.load_memory.map(LoadMemory::bytes);
    Document {
        model: &args.model,
        weights: &format.weights,
        cpu: engine::cpu_name(),
        instruction_set: results.instruction_set,
        threads: args.threads.get(),
        parameters: info.num_parameters,
        numerics_id: &info.numerics_id,
        load_s: format.load.as_secs_f64(),
        read_gb_s: results.read / 1e9,
        read_streams: results.streams,
        read_bytes: results.probe_bytes,
        weight_bytes: info.weight_bytes,
        kv_bytes_per_token: info.kv_bytes_per_token,
        bytes_per_token: format.bytes_of(Case { context: first, rows: 1, sequences: 1 }),
        load_peak_bytes: load_peak,
        load_peak_over_held: load_peak.map(|peak| peak as f64 / info.resident_bytes as f64),
        resident_bytes: resident_bytes(),
        knees: knees(&rows),
        slower_than: slower_than(FormatTimes::new(format), results.formats.iter().map(FormatTimes::new)),
        rows,
        left_out,
    }
}

fn table(document: &Document<'_>) -> String {
    let load_peak = document
        .load_peak_over_held
        .map_or_else(String::new, |times| format!(", taking at most {times:.2} times the memory that stays"));
    let mut text = format!(
        "{}, computing with {}\n\
         {}, weights in {}: {:.1} M parameters, {} {}, loaded in {:.2} s{load_peak}\n\
         memory reads at {:.1} GB/s ({} streams over {} MiB); one token reads {:.2} MB of weights and KV\n\
         {:>5} {:>9} {:>8} {:>10} {:>10} {:>16} {:>10} {:>11} {:>7} {:>8}\n",
        document.cpu,
        document.instruction_set,
        document.model,
        document.weights,
        document.parameters as f64 / 1e6,
        document.threads,
        if document.threads == 1 { "thread" } else { "threads" },
        document.load_s,
        document.read_gb_s,
        document.read_streams,
        document.read_bytes >> 20,
        document.bytes_per_token as f64 / 1e6,
        "rows",
        "sequences",
        "context",
        "ms",
        "tokens/s",
        "bandwidth share",
        "attention",
        "vocabulary",
        "draws",
        "draws ms",
    );
    for row in &document.rows {
        line!(
            text,
            "{:>5} {:>9} {:>8} {:>10.3} {:>10.0} {:>16.3} {:>10.3} {:>11.3} {:>7.3} {:>8.3}",
            row.case.rows,
            row.case.sequences,
            row.case.context,
            row.ms,
            row.tokens_per_s,
            row.bandwidth_share,
            row.attention_share,
            row.vocabulary_share,
            row.draw_share,
            row.draw_ms
        );
    }
    for Case { rows, sequences, context } in document.left_out {
        line!(text, "{rows:>5} {sequences:>9} {context:>8}  left out: more than the model's window");
    }
    for Knee { context, rows } in &document.knees {
        line!(
            text,
            "knee after a context of {context}: {rows} is the largest measured number of rows that costs at most {KNEE} times one row"
        );
    }
    for slower in &document.slower_than {
        let SlowerThan { case: Case { rows, sequences, context }, ms, other_weights, other_ms } = slower;
        line!(
            text,
            "warning: after a context of {context}, rows {rows}, sequences {sequences}: {ms:.3} ms with {}, {other_ms:.3} ms with \
             {other_weights}",
            document.weights
        );
    }
    text.push('\n');
    text
}
