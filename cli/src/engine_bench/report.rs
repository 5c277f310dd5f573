//! What a person or a program reads of a run: a table, or a JSON object for each format.

use serde::Serialize;

use super::BenchArgs;
use super::measure::{Case, Findings, Measured, Subject};

/// The JSON of one format.
#[derive(Serialize)]
struct Document<'a> {
    model: &'a str,
    weights: &'a str,
    threads: usize,
    parameters: u64,
    numerics_id: &'a str,
    load_s: f64,
    read_gb_s: f64,
    read_streams: usize,
    read_bytes: usize,
    weight_bytes: u64,
    kv_bytes_per_token: u64,
    /// Weights and KV that one row behind the first context reads.
    bytes_per_token: u64,
    rows: Vec<Row>,
    /// Cases that the model's window does not hold.
    left_out: Vec<LeftOut>,
}

#[derive(Serialize)]
struct Row {
    /// Of each sequence.
    rows: usize,
    sequences: usize,
    context: usize,
    ms: f64,
    tokens_per_s: f64,
    bandwidth_share: f64,
}

#[derive(Serialize)]
struct LeftOut {
    rows: usize,
    sequences: usize,
    context: usize,
}

impl Row {
    fn new(measured: &Measured) -> Self {
        let Case { context, rows, sequences } = measured.case;
        Self {
            rows,
            sequences,
            context,
            ms: measured.seconds * 1e3,
            tokens_per_s: (rows * sequences) as f64 / measured.seconds,
            bandwidth_share: measured.bandwidth_share,
        }
    }
}

/// Prints what was found to standard output.
#[expect(clippy::print_stdout, reason = "the report is the program's output")]
pub(super) fn print(args: &BenchArgs, findings: &Findings, left_out: &[Case]) {
    for subject in &findings.subjects {
        let document = document(args, findings, subject, left_out);
        match args.json {
            true => println!("{}", serde_json::json!(document)),
            false => print!("{}", table(&document)),
        }
    }
}

fn document<'a>(
    args: &'a BenchArgs,
    findings: &Findings,
    subject: &'a Subject,
    left_out: &[Case],
) -> Document<'a> {
    let info = subject.engine.info();
    let first = subject.measured.first().map_or(0, |measured| measured.case.context);
    Document {
        model: &args.model,
        weights: &subject.weights,
        threads: args.threads.get(),
        parameters: info.num_parameters,
        numerics_id: &info.numerics_id,
        load_s: subject.load.as_secs_f64(),
        read_gb_s: findings.read / 1e9,
        read_streams: findings.streams,
        read_bytes: findings.probe_bytes,
        weight_bytes: info.weight_bytes,
        kv_bytes_per_token: info.kv_bytes_per_token,
        bytes_per_token: subject.bytes_of(Case { context: first, rows: 1, sequences: 1 }),
        rows: subject.measured.iter().map(Row::new).collect(),
        left_out: left_out
            .iter()
            .map(|&Case { context, rows, sequences }| LeftOut { rows, sequences, context })
            .collect(),
    }
}

fn table(document: &Document<'_>) -> String {
    let mut text = format!(
        "{} {}: {} weights, {} threads, loaded in {:.2} s\n\
         memory reads at {:.1} GB/s ({} streams over {} MiB); one token reads {:.2} MB of weights and KV\n\
         {:>5} {:>9} {:>8} {:>10} {:>10} {:>16}\n",
        document.model,
        document.weights,
        document.parameters,
        document.threads,
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
    );
    for row in &document.rows {
        text.push_str(&format!(
            "{:>5} {:>9} {:>8} {:>10.3} {:>10.0} {:>16.3}\n",
            row.rows, row.sequences, row.context, row.ms, row.tokens_per_s, row.bandwidth_share
        ));
    }
    for LeftOut { rows, sequences, context } in &document.left_out {
        text.push_str(&format!(
            "{rows:>5} {sequences:>9} {context:>8}  left out: more than the model's window\n"
        ));
    }
    text.push('\n');
    text
}
