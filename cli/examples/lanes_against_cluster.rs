//! Compares five points of the lanes map, run with real processes (a router and synthetic workers, with k
//! chosen by the router), with the simulator at the same points. `make measure-lanes-cluster`.
//!
//! Workers take a profile's times, stretched so that the overhead of the processes on this machine becomes
//! small; a point at which the machine was more than 60% busy is void. All streams of a point are sent at
//! once and continue past the end of the window in which tokens are counted. The simulator's requests arrive
//! in the same way, with prompts of the same length, because the arrival order decides which sequences share
//! a forward from then on. The overhead of processes and wires in a plain round is measured first, on one
//! sequence of a separate lane, and added to the simulator's wire time. Tokens per second are in the
//! profile's time. The workers are simulated, so the results say nothing about GPUs. Arguments select points
//! by number, as in `-- 1 3`.

#![forbid(unsafe_code)]

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use outrider_cli::cluster::usage::CpuSnapshot;
use outrider_cli::cluster::{Binaries, ClusterSpec, DraftKind, NoLogs, ProcessCluster, TargetKind};
use outrider_cli::load::answer::Answer;
use outrider_cli::load::prompts::Content;
use outrider_cli::load::{Access, Client, Endpoint, Prompt, Schedule, Settings};
use scheduling::profile::{ForwardRows, Profile};
use simulator::{Policy, RequestKind, RunOutcome, Setup, Traffic, run};

/// A point of the map.
struct Point {
    profile: &'static str,
    acceptance: f64,
    sequences: u32,
    /// Factor by which all times are stretched.
    time_scale: f64,
    /// Counted window and warm-up before it, seconds of the profile's time.
    seconds: f64,
    warm_up: f64,
}

/// From 1 sequence to 256, from low to high acceptance, with one draft worker and with eight. The router
/// takes some tens of microseconds per sequence and round, which no profile contains: the more sequences, the
/// larger the stretch.
const POINTS: [Point; 5] = [
    point("8b-h100", (0.95, 1), 3.0, (10.0, 3.0)),
    point("70b-8xh100-l4", (0.8, 4), 4.0, (5.0, 3.0)),
    point("8b-h100", (0.5, 16), 8.0, (4.0, 2.0)),
    point("70b-8xh100-l4", (0.65, 64), 16.0, (2.5, 2.5)),
    point("8b-h100", (0.8, 256), 16.0, (1.5, 1.5)),
];

const MAX_K: u32 = 10;
const SEEDS: u64 = 3;
/// Above this the run measures the operating system's scheduler.
const MAX_BUSY: f64 = 0.6;
/// Factor on the expected output length, so that no stream ends within the window.
const TOKENS_MARGIN: f64 = 1.2;
/// Arrival rate of the simulated burst, requests per second.
const BURST_PER_SECOND: f64 = 20_000.0;
/// Prompt length, in tokens, that is assumed before a request was sent.
const PROMPT_GUESS: u32 = 16;
/// Longer than any window.
const ENDLESS_TOKENS: u32 = 1 << 20;
/// Plain rounds of one sequence, to measure the overhead of processes and wires.
const PLAIN_ROUNDS: u32 = 48;
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

const fn point(
    profile: &'static str,
    (acceptance, sequences): (f64, u32),
    time_scale: f64,
    (seconds, warm_up): (f64, f64),
) -> Point {
    Point { profile, acceptance, sequences, time_scale, seconds, warm_up }
}

/// Result of the simulator or the cluster.
struct Found {
    tokens_per_second: f64,
    mean_k: f64,
}

/// Result of the cluster and its conditions.
struct Served {
    found: Found,
    /// Mean per request, rounded up.
    prompt_tokens: u32,
    busy: f64,
    /// Overhead between router and worker beyond the profile's wire, one way, in the profile's time.
    wire_us: f64,
}

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "the table is this program's output")]
async fn main() -> Result<(), Box<dyn Error>> {
    let picked: Vec<usize> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    println!(
        "profile         acceptance  sequences  stretched   tokens/s served  simulated  ratio   mean k served  simulated  wire of processes us  machine busy"
    );
    let (mut worst, mut valid) = (1.0_f64, 0);
    for (i, point) in POINTS.iter().enumerate() {
        if !picked.is_empty() && !picked.contains(&i) {
            continue;
        }
        let (file, profile) = point.profile()?;
        let expected = point.simulate(&profile, PROMPT_GUESS);
        let served = point.serve(file.path(), &profile, &expected).await?;
        let longer = Profile { wire_us: profile.wire_us + served.wire_us, ..profile };
        let simulated = point.simulate(&longer, served.prompt_tokens);
        let ratio = served.found.tokens_per_second / simulated.tokens_per_second;
        let is_void = served.busy > MAX_BUSY;
        let verdict = if is_void { "  VOID" } else { "" };
        valid += u32::from(!is_void);
        println!(
            "{:<15} {:>10} {:>10} {:>10} {:>17.0} {:>10.0} {ratio:>6.3} {:>15.2} {:>10.2} {:>21.0} {:>13.2}{verdict}",
            point.profile,
            point.acceptance,
            point.sequences,
            point.time_scale,
            served.found.tokens_per_second,
            simulated.tokens_per_second,
            served.found.mean_k,
            simulated.mean_k,
            served.wire_us,
            served.busy
        );
        worst = worst.max(ratio).max(1.0 / ratio);
    }
    if valid == 0 {
        return Err("every point is VOID: the machine was too busy for a measurement".into());
    }
    println!("worst_factor={worst:.3}");
    Ok(())
}

impl Point {
    /// The profile with this point's acceptance, as a file for the workers and as a value.
    fn profile(&self) -> Result<(tempfile::NamedTempFile, Profile), Box<dyn Error>> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../deploy/profiles")
            .join(self.profile)
            .with_extension("toml");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let mut table: toml::Table = text.parse()?;
        let rates = toml::Table::from_iter([("by_position".to_owned(), vec![self.acceptance].into())]);
        table.insert("acceptance".to_owned(), vec![rates].into());
        let text = table.to_string();
        let file = tempfile::Builder::new().suffix(".toml").tempfile()?;
        std::fs::write(file.path(), &text)?;
        Ok((file, Profile::parse(&text)?))
    }

    fn simulate(&self, profile: &Profile, prompt_tokens: u32) -> Found {
        let kind = RequestKind {
            task_type: String::new(),
            share: 1.0,
            prompt_tokens,
            output_tokens: ENDLESS_TOKENS,
        };
        let outcome = |seed: u64| -> RunOutcome {
            run(&Setup {
                profile,
                traffic: Traffic::Open {
                    per_second: BURST_PER_SECOND,
                    kinds: vec![kind.clone()],
                    sequences_max: self.sequences,
                },
                policy: Policy::Lanes { max_k: MAX_K },
                seed,
                duration: Duration::from_secs_f64(self.warm_up + self.seconds),
                warm_up: Duration::from_secs_f64(self.warm_up),
            })
        };
        let outcomes: Vec<RunOutcome> = (1..=SEEDS).map(outcome).collect();
        let mean = |of: &dyn Fn(&RunOutcome) -> f64| outcomes.iter().map(of).sum::<f64>() / SEEDS as f64;
        Found {
            tokens_per_second: mean(&RunOutcome::tokens_per_second),
            mean_k: mean(&|outcome| outcome.lanes[0].mean_k),
        }
    }

    async fn serve(
        &self,
        file: &Path,
        profile: &Profile,
        expected: &Found,
    ) -> Result<Served, Box<dyn Error>> {
        let cluster = self.start(file, profile).await?;
        let endpoint = Endpoint::connect(&cluster.http_url(), Access::default()).await?;
        let client = Client::new(endpoint);
        let wire_us = self.own_wire_us(&client, profile).await?;
        let each = expected.tokens_per_second / f64::from(self.sequences);
        let max_tokens = (each * (self.warm_up + self.seconds) * TOKENS_MARGIN) as u32;
        let fields = [("ignore_eos".to_owned(), true.into())].into_iter().collect();
        let settings = Settings { max_tokens, fields, ..Settings::default() };
        let requests: Vec<_> = (0..self.sequences)
            .map(|i| {
                let content = Content::Prompt(format!("stream number {i} of many"));
                let seed = Some(i64::from(i));
                let settings = Settings { seed, ..settings.clone() };
                settings.request(client.endpoint(), &Prompt { task: "any".to_owned(), content })
            })
            .collect();
        let before = CpuSnapshot::at(std::process::id())?;
        let schedule = Schedule::Closed { concurrency: requests.len() };
        let run = client.drive(&requests, &schedule, |_| ()).await;
        let busy = before.usage_until(&CpuSnapshot::at(std::process::id())?).busy;
        cluster.stop().await;
        let answers: Vec<Answer> = run.exchanges.iter().map(Answer::of).collect();
        for sample in run.samples(&requests) {
            if !sample.is_completed() {
                return Err(format!("a request was not answered: {}", sample.outcome.explain()).into());
            }
        }
        let inputs: u64 = answers.iter().filter_map(|answer| Some(answer.usage?.0)).sum();
        let prompt_tokens = inputs.div_ceil(u64::from(self.sequences)) as u32;
        Ok(Served { found: self.count(&answers)?, prompt_tokens, busy, wire_us })
    }

    /// Time of a plain round of one sequence beyond its profile, one way, in the profile's time.
    async fn own_wire_us(&self, client: &Client, profile: &Profile) -> Result<f64, Box<dyn Error>> {
        let fields = [("ignore_eos".to_owned(), true.into())];
        let settings = Settings {
            max_tokens: PLAIN_ROUNDS,
            num_draft_tokens: Some(0),
            fields: fields.into_iter().collect(),
            ..Settings::default()
        };
        let content = Content::Prompt("one stream alone".to_owned());
        let request = settings.request(client.endpoint(), &Prompt { task: "plain".to_owned(), content });
        let run = client.drive(&[request], &Schedule::Closed { concurrency: 1 }, |_| ()).await;
        let answer = run.exchanges.first().map(Answer::of).ok_or("no answer came")?;
        let arrived: Vec<_> = answer.token_chunks.iter().map(|piece| piece.arrived).collect();
        let mut gaps: Vec<Duration> = arrived.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort_unstable();
        let round_us =
            gaps.get(gaps.len() / 2).ok_or("no tokens came")?.as_secs_f64() * 1e6 / self.time_scale;
        let row = ForwardRows::even(1, 1, answer.usage.map_or(PROMPT_GUESS, |usage| usage.0 as u32));
        let known_us = profile.target.curve.micros(row) + 2.0 * profile.wire_us;
        Ok(((round_us - known_us) / 2.0).max(0.0))
    }

    async fn start(&self, file: &Path, profile: &Profile) -> Result<ProcessCluster, Box<dyn Error>> {
        let own = std::env::current_exe()?;
        let directory = own.parent().and_then(Path::parent).ok_or("the program has no directory")?;
        let target = TargetKind::Synthetic { profile: file.to_owned(), time_scale: self.time_scale };
        let mut spec = ClusterSpec::new(Binaries::in_directory(directory)?, target, DraftKind::Synthetic);
        spec.threads = Some(NonZeroUsize::MIN);
        spec.log = Some("error".to_owned());
        spec.target_workers = profile.target.workers as usize;
        spec.draft_workers = profile.draft.workers as usize;
        spec.router_args =
            ["--max-sequences", "4096", "--max-draft-tokens", &MAX_K.to_string()].map(str::to_owned).to_vec();
        Ok(ProcessCluster::start(spec, Arc::new(NoLogs), WAIT_TIMEOUT).await?)
    }

    /// Counts tokens in the window, which begins `warm_up` after the first token of the last stream.
    fn count(&self, answers: &[Answer]) -> Result<Found, Box<dyn Error>> {
        let token_chunks = || answers.iter().flat_map(|answer| &answer.token_chunks);
        let first = answers.iter().filter_map(|answer| Some(answer.token_chunks.first()?.arrived)).max();
        let stretched = |seconds: f64| Duration::from_secs_f64(seconds * self.time_scale);
        let from = first.ok_or("no token came")? + stretched(self.warm_up);
        let until = from + stretched(self.seconds);
        let ended = answers.iter().filter_map(|answer| Some(answer.token_chunks.last()?.arrived)).min();
        if ended.is_none_or(|ended| ended < until) {
            return Err("a stream ended within the window: raise TOKENS_MARGIN".into());
        }
        let within = token_chunks().filter(|piece| piece.arrived >= from && piece.arrived < until);
        let tokens: f64 = within.map(|piece| f64::from(piece.num_tokens.unwrap_or(1))).sum();
        let counts = || answers.iter().filter_map(|answer| answer.speculation);
        let drafted: u64 = counts().map(|counts| counts.draft_tokens).sum();
        let rounds: u64 = counts().map(|counts| counts.rounds).sum();
        Ok(Found { tokens_per_second: tokens / self.seconds, mean_k: drafted as f64 / rounds.max(1) as f64 })
    }
}
