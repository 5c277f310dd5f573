//! The command line of `outrider bench`, and parsers for its values.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde_json::{Map, Value};

use super::arm::{ArmSpec, parse_fields};
use super::plan::LoadLevel;
use crate::count::count;
use crate::load::{Access, Slo, Trust};

const AFTER_HELP: &str = "\
How to read it:
  TTFT, TPOT,   milliseconds to the first token, per output token after it, and to the last one;
  E2EL          tok/s: output tokens per second of all requests; accept: accepted / drafted tokens;
                length: tokens per round
  speedup       time per output token of the second arm / that of the first, compared in pairs of
                blocks. The verdict depends on its confidence interval: ship if all of it is above
                --threshold, do not if it is below, undecided (run longer) otherwise
  goodput       responses per second that met every limit of --slo
  acceptance    accepted / drafted tokens, by request (P10, P50, P90) and by position
  failed        failed requests by kind, without latency; `fault:` at the end quotes some. If over
                2% of an arm's requests at one load and temperature failed, its figures claim
                nothing: there is no verdict, and the exit code is 4; with fewer it is 0
  With several loads, the report names the load at which speculation stops paying.

Examples:
  # The local router, speculation on and off.
  outrider bench
  outrider bench --prompts prompts.jsonl --concurrency 1,8,32 --slo ttft:500ms,tpot:30ms \\
      --html report.html
  # Two servers, alternating.
  outrider bench --url http://a:8000 --arm new:url=http://b:8000 --arm old
  # Open loop, Poisson arrivals.
  outrider bench --rate 0.5,2,8 --temperatures 0,0.8 --save-json run.json";

/// Arguments of `outrider bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct BenchArgs {
    /// URL of the endpoint: http://HOST:PORT or https://HOST, with or without /v1
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,

    /// API key, sent as a bearer token; other users of this machine can see a flag, and not the variable
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,

    /// URL of the server's metrics, if not /metrics of the endpoint: for an outrider router its --admin,
    /// http://HOST:8002
    #[arg(long, value_name = "URL")]
    pub metrics_url: Option<String>,

    /// PEM file of CA certificates to trust instead of this machine's, for https
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    pub ca_cert: Option<PathBuf>,

    /// Accept any certificate (test machines only: the server's identity is not verified)
    #[arg(long)]
    pub insecure: bool,

    /// Model to request [default: the first that the endpoint lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,

    /// File of lines {"task", "prompt" | "messages"}, or a directory of such files [default: a small built-in
    /// set]
    #[arg(long, value_name = "FILE|DIR")]
    pub prompts: Option<PathBuf>,

    /// Task types to run [default: all]
    #[arg(long, value_name = "TASK,..", value_delimiter = ',')]
    pub tasks: Vec<String>,

    /// Arm to compare, at most two: NAME[:KEY=VALUE,..]; the first is judged against the second. Keys: url,
    /// model, speculation (on, off or a k), and any field of the request's body [default: on and off if the
    /// endpoint is an outrider router, else one arm]
    #[arg(long = "arm", value_name = "SPEC")]
    pub arms: Vec<ArmSpec>,

    /// Additional fields of every request's body, such as top_p=0.9,ignore_eos=true [default: none]
    #[arg(long, value_name = "KEY=VALUE,..", value_parser = parse_fields, default_value = "")]
    #[arg(hide_default_value = true)]
    pub body: Map<String, Value>,

    /// Send prompts as chat completions instead of text completions; `messages` are always sent as chat
    #[arg(long)]
    pub chat: bool,

    /// Closed loop: requests in flight [default: 1,4,16 unless --rate is given]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = count)]
    pub concurrency: Vec<NonZeroUsize>,

    /// Open loop: requests per second, with Poisson arrivals
    #[arg(long, value_name = "R,..", value_delimiter = ',', value_parser = rate)]
    pub rate: Vec<f64>,

    /// Temperatures, each measured separately
    #[arg(long, value_name = "T,..", value_delimiter = ',', default_value = "0", value_parser = temperature)]
    pub temperatures: Vec<f64>,

    /// Blocks of requests per arm, load and temperature; arms alternate block by block
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub blocks: u32,

    /// Requests per block, rounded up to a multiple of the task types [default: twice the concurrency, or 10
    /// s of the rate]
    #[arg(long, value_name = "N", value_parser = count)]
    pub block_requests: Option<NonZeroUsize>,

    /// Warm-up requests per arm before each load; not counted
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub warmup: usize,

    /// Maximum output length, tokens
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    pub max_tokens: NonZeroUsize,

    /// Seed for sampling, arrivals, order and bootstrap
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u32,

    /// Latency limits that a good request keeps, such as ttft:500ms,tpot:30ms,e2el:10s; a number without a
    /// unit is milliseconds [default: none, no goodput]
    #[arg(long, value_name = "LIMITS", value_parser = slo, default_value = "", hide_default_value = true)]
    pub slo: Slo,

    /// Speedup above which the first arm is worth shipping, as a factor: 1.3 is 30% faster
    #[arg(long, value_name = "X", default_value_t = 1.3, value_parser = threshold)]
    pub threshold: f64,

    /// Confidence level of the speedups' intervals
    #[arg(long, value_name = "SHARE", default_value_t = 0.99, value_parser = confidence)]
    pub confidence: f64,

    /// Timeout of one request, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = timeout())]
    pub timeout_s: u64,

    /// End with exit code 3 unless the verdict over all task types is ship at every load and temperature, for
    /// continuous integration; needs two arms
    #[arg(long)]
    pub fail_unless_ship: bool,

    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,

    /// Also write the JSON to a file
    #[arg(long, value_name = "FILE")]
    pub save_json: Option<PathBuf>,

    /// Write the report as one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl BenchArgs {
    /// The access settings that all arms share.
    pub(super) fn access(&self) -> Access {
        let trust = Trust { ca_cert: self.ca_cert.clone(), insecure: self.insecure };
        Access {
            api_key: self.api_key.clone(),
            model: self.model.clone(),
            trust,
            metrics_url: self.metrics_url.clone(),
        }
    }

    /// The loads to measure, closed loops first, each ascending.
    pub(super) fn levels(&self) -> Vec<LoadLevel> {
        let mut concurrency: Vec<usize> = self.concurrency.iter().map(|count| count.get()).collect();
        if concurrency.is_empty() && self.rate.is_empty() {
            concurrency = vec![1, 4, 16];
        }
        let mut rates = self.rate.clone();
        concurrency.sort_unstable();
        rates.sort_by(f64::total_cmp);
        let closed = concurrency.into_iter().map(LoadLevel::Concurrency);
        closed.chain(rates.into_iter().map(LoadLevel::Rate)).collect()
    }
}

fn number(text: &str, fits: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let value = f64::from_str(text).ok().filter(|value| fits(*value));
    value.ok_or_else(|| format!("expected {expected}"))
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, |rate| (1e-3..=1e5).contains(&rate), "requests a second, 0.001 to 100000")
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |temperature| (0.0..=2.0).contains(&temperature), "0 to 2")
}

fn threshold(text: &str) -> Result<f64, String> {
    number(text, |threshold| threshold > 0.0 && threshold.is_finite(), "a factor above 0")
}

fn confidence(text: &str) -> Result<f64, String> {
    number(text, |share| (0.5..1.0).contains(&share), "a share from 0.5 to below 1")
}

/// At most a day, to catch typing errors.
fn timeout() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=86_400)
}

fn slo(text: &str) -> Result<Slo, String> {
    let mut slo = Slo::default();
    for limit in text.split(',').filter(|limit| !limit.is_empty()) {
        let (name, time) = limit.split_once(':').ok_or("expected NAME:TIME, as in ttft:500ms")?;
        let time = Some(duration(time)?);
        match name {
            "ttft" => slo.ttft = time,
            "tpot" => slo.tpot = time,
            "e2el" => slo.e2el = time,
            _ => return Err(format!("no latency `{name}`: expected ttft, tpot or e2el")),
        }
    }
    Ok(slo)
}

/// Parses a number with `ms` or `s`; a bare number is milliseconds, as in vLLM.
fn duration(text: &str) -> Result<Duration, String> {
    let (digits, scale) = match text {
        _ if text.ends_with("ms") => (&text[..text.len() - 2], 1e-3),
        _ if text.ends_with('s') => (&text[..text.len() - 1], 1.0),
        _ => (text, 1e-3),
    };
    let value = number(digits, |value| value > 0.0 && value <= 1e9, "a time such as 500ms or 2s")?;
    Ok(Duration::from_secs_f64(value * scale))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn parse(line: &str) -> Result<BenchArgs, String> {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn loads_are_ordered_and_have_a_default() {
        assert_eq!(parse("").unwrap().levels(), [1, 4, 16].map(LoadLevel::Concurrency));
        let levels = parse("--concurrency 8,2 --rate 4,0.5").unwrap().levels();
        let expected = [
            LoadLevel::Concurrency(2),
            LoadLevel::Concurrency(8),
            LoadLevel::Rate(0.5),
            LoadLevel::Rate(4.0),
        ];
        assert_eq!(levels, expected);
    }

    #[test]
    fn limits_are_read_with_their_units() {
        let slo = parse("--slo ttft:500ms,tpot:30,e2el:2.5s").unwrap().slo;
        let ms = |count| Some(Duration::from_millis(count));
        assert_eq!(slo, Slo { ttft: ms(500), tpot: ms(30), e2el: ms(2500) });
        for (line, fault) in [
            ("--slo itl:3ms", "no latency `itl`"),
            ("--slo ttft", "expected NAME:TIME"),
            ("--slo ttft:-3ms", "a time such as"),
            ("--rate 0", "0.001 to 100000"),
            ("--rate 1e-300", "0.001 to 100000"),
            ("--temperatures 0,3", "0 to 2"),
            ("--confidence 1", "below 1"),
            ("--concurrency 4,0", "1 or more"),
            ("--block-requests 0", "1 or more"),
            ("--max-tokens 0", "1 or more"),
            ("--blocks 0", "0 is not in 1..=10000"),
            ("--timeout-s 0", "0 is not in 1..=86400"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(fault), "{line}: {error}");
        }
    }
}
