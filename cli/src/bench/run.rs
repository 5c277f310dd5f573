//! Runs a plan and keeps the results as numbers.
//!
//! Everything else happens between blocks, when nothing is measured: parsing responses, reading the
//! speculation counters, preparing the next request bodies.

use std::pin::pin;
use std::time::Duration;

use super::args::BenchArgs;
use super::arm::{Arm, ArmSpec};
use super::error::BenchError;
use super::plan::{Block, Plan, PlanInputs};
use crate::load::counters::SpeculationCounters;
use crate::load::cpu::{CpuMeter, GeneratorCost};
use crate::load::{Access, Client, Endpoint, Prompt, Request, Sample, Settings};
use crate::output::note;
use crate::progress::Progress;
use crate::usage::UsageError;

/// Largest number of arms: a verdict compares two.
const ARMS_MAX: usize = 2;

/// What is measured, and how.
pub(super) struct Experiment {
    pub(super) arms: Vec<Arm>,
    pub(super) prompts: Vec<Prompt>,
    pub(super) plan: Plan,
    shared: Settings,
    timeout: Duration,
    seed: i64,
    /// Random id that separates this run's prompts from those of another run at the same server.
    run: u64,
}

/// Results of a run: cells indexed by condition, then arm.
pub(super) struct Observations {
    pub(super) cells: Vec<Vec<Cell>>,
    pub(super) generator: GeneratorCost,
    /// Whether Ctrl-C ended the run. Blocks that had not ended are not in the results.
    pub(super) is_interrupted: bool,
}

/// Results of one arm under one condition.
#[derive(Debug, Default)]
pub(super) struct Cell {
    pub(super) samples: Vec<Sample>,
    /// Total time of the blocks, without the pauses between them.
    pub(super) duration: Duration,
    /// Change of the server's counters, if it exposes them.
    pub(super) counters: Option<SpeculationCounters>,
}

/// Reads the prompts, connects to the endpoints and makes the plan.
pub(super) async fn prepare(args: &BenchArgs) -> Result<Experiment, BenchError> {
    let prompts = prompts(args)?;
    let access = args.access();
    let arms = arms(args, &access).await?;
    let plan = Plan::new(&PlanInputs {
        prompts: &prompts,
        levels: args.levels(),
        temperatures: args.temperatures.clone(),
        arms: arms.len(),
        blocks: args.blocks as usize,
        block_requests: args.block_requests.map(std::num::NonZeroUsize::get),
        warmup: args.warmup,
        seed: args.seed.into(),
    });
    let shared = Settings {
        max_tokens: u32::try_from(args.max_tokens.get()).unwrap_or(u32::MAX),
        chat: args.chat,
        fields: args.body.clone(),
        ..Settings::default()
    };
    let timeout = Duration::from_secs(args.timeout_s);
    Ok(Experiment { arms, prompts, plan, shared, timeout, seed: args.seed.into(), run: rand::random() })
}

fn prompts(args: &BenchArgs) -> Result<Vec<Prompt>, BenchError> {
    let mut prompts = match &args.prompts {
        Some(path) => Prompt::read(path)?,
        None => Prompt::built_in(),
    };
    let mut known: Vec<String> = prompts.iter().map(|prompt| prompt.task.clone()).collect();
    known.sort();
    known.dedup();
    if let Some(missing) = args.tasks.iter().find(|task| !known.contains(task)) {
        let expected = format!("task types of the prompts: {}", known.join(", "));
        let value = format!("`{missing}`");
        return Err(UsageError { flag: "--tasks", value, expected }.into());
    }
    prompts.retain(|prompt| args.tasks.is_empty() || args.tasks.contains(&prompt.task));
    Ok(prompts)
}

async fn arms(args: &BenchArgs, access: &Access) -> Result<Vec<Arm>, BenchError> {
    let mut specs = args.arms.clone();
    if specs.is_empty() {
        let endpoint = Endpoint::connect(&args.url, access.clone()).await?;
        specs = ArmSpec::defaults(endpoint.dialect());
    }
    let usage = |name: &str, expected: &str| {
        let value = format!("`{name}`");
        Err(UsageError { flag: "--arm", value, expected: expected.to_owned() }.into())
    };
    if specs.len() > ARMS_MAX {
        return usage(&specs[ARMS_MAX].name, "at most two arms: compare others in a separate run");
    }
    if args.fail_unless_ship && specs.len() < ARMS_MAX {
        return usage(&specs[0].name, "two arms, because --fail-unless-ship needs a verdict");
    }
    if specs.len() == ARMS_MAX && specs[0].name == specs[1].name {
        return usage(&specs[0].name, "two different names");
    }
    let mut arms = Vec::new();
    for spec in specs {
        arms.push(Arm::connect(spec, &args.url, access.clone()).await?);
    }
    if let Some(url) = &args.metrics_url
        && arms[0].endpoint.speculation_counters().await.is_none()
    {
        note(&format!("outrider: --metrics-url {url} shows no speculation counters: check host and port"));
    }
    Ok(arms)
}

impl Experiment {
    /// Requests of a block. An item has the same seed in every arm.
    fn requests(&self, block: &Block) -> Vec<Request> {
        let arm = &self.arms[block.arm];
        let temperature = self.plan.conditions[block.condition].temperature;
        let request = |(item, prompt): (usize, &usize)| {
            let seed = Some((self.seed << 32) + ((block.pair as i64) << 16) + item as i64);
            let mut settings = Settings { temperature, seed, ..self.shared.clone() };
            if arm.endpoint.supports_cache_salt() {
                settings.fields.entry("cache_salt").or_insert_with(|| self.cache_salt(block).into());
            }
            let request = arm.settings(&settings).request(&arm.endpoint, &self.prompts[*prompt]);
            Request { item, block: block.pair, ..request }
        };
        block.prompts.iter().enumerate().map(request).collect()
    }

    /// Cache salt of a block's requests. Without it the second block of a pair would find the first block's
    /// prompts in the server's prefix cache, and only the arm that goes first would pay for prefill.
    fn cache_salt(&self, block: &Block) -> String {
        let Block { condition, pair, arm, is_warmup, .. } = block;
        format!("bench-{:x}-{condition}-{pair}-{arm}-{is_warmup}", self.run)
    }
}

/// Runs the plan, until its end or Ctrl-C.
pub(super) async fn run(experiment: &Experiment) -> Result<Observations, BenchError> {
    let Experiment { arms, plan, .. } = experiment;
    let client = |arm: &Arm| Client::new(arm.endpoint.clone()).with_timeout(experiment.timeout);
    let clients: Vec<Client> = arms.iter().map(client).collect();
    let empty = |_| arms.iter().map(|_| Cell::default()).collect();
    let mut observations = Observations {
        cells: plan.conditions.iter().map(empty).collect(),
        generator: GeneratorCost::default(),
        is_interrupted: false,
    };
    let mut interrupt = pin!(tokio::signal::ctrl_c());
    let progress = Progress::new(plan.num_requests(), "requests");
    let mut current = None;
    for block in &plan.blocks {
        if current.replace(block.condition) != Some(block.condition) {
            let condition = &plan.conditions[block.condition];
            progress.begin_part(format!("{}, temperature {}", condition.level.name(), condition.temperature));
        }
        let client = &clients[block.arm];
        let requests = experiment.requests(block);
        let before = match block.is_warmup {
            true => None,
            false => client.endpoint().speculation_counters().await,
        };
        let meter = CpuMeter::start();
        let schedule = plan.schedule(block);
        let run = tokio::select! {
            biased;
            // Requests in flight are ended with the program.
            _ = &mut interrupt => {
                observations.is_interrupted = true;
                break;
            }
            run = client.drive(&requests, &schedule, |_| progress.finish_unit()) => run,
        };
        let cost = meter.read();
        let samples = run.samples(&requests);
        if block.is_warmup {
            check_warmup(&arms[block.arm], &samples)?;
            continue;
        }
        observations.generator.add(&run, cost);
        let cell = &mut observations.cells[block.condition][block.arm];
        cell.samples.extend(samples);
        cell.duration += run.duration();
        let after = client.endpoint().speculation_counters().await;
        if let Some((before, after)) = before.zip(after) {
            cell.counters.get_or_insert_default().add_difference(&before, &after);
        }
    }
    progress.end();
    if observations.is_interrupted {
        if observations.cells.iter().flatten().all(|cell| cell.samples.is_empty()) {
            return Err(BenchError::Interrupted);
        }
        note("outrider: interrupted; this is what was measured until then");
    }
    Ok(observations)
}

/// Stops early if the server answers no request of the warm-up.
fn check_warmup(arm: &Arm, samples: &[Sample]) -> Result<(), BenchError> {
    match samples.first() {
        Some(first) if !samples.iter().any(Sample::is_completed) => {
            Err(BenchError::WarmupFailed { arm: arm.spec.name.clone(), first: first.outcome.explain() })
        }
        _ => Ok(()),
    }
}
