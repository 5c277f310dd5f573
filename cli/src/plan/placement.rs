//! The plan itself: for each way to place the draft, what fits, how fast it is at each load, what it costs, what breaks first.
//! Pure: [`Inputs`] in, [`Plan`] out.

use engine::ModelShape;
use scheduling::cost::StepTimes;
use serde::Serialize;

use super::gpu::GpuSet;
use super::limits::{Limit, limits, longest_wire_ms, wanted_draft_workers};
use super::round::{Drafting, Outcome, Rounds};
use super::step_time::{Assumptions, Forward, Roofline, StepCost, as_profiled};
use super::weights::{Format, KvFormat, Weights, kv_bytes_per_token};

/// A model, and where it runs.
#[derive(Debug, Clone)]
pub struct Site {
    /// The model.
    pub shape: ModelShape,
    /// Its weights.
    pub format: Format,
    /// The GPUs that split it.
    pub gpus: GpuSet,
}

/// What is asked of the models.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// Tokens that a sequence holds.
    pub context: u32,
    /// Of these, those that are generated.
    pub output_tokens: u32,
    /// Acceptance by position.
    pub acceptance: Vec<f64>,
    /// Requests per second.
    pub rate: Option<f64>,
    /// Loads to show, sequences at one target.
    pub loads: Vec<u32>,
}

/// Prices per GPU and hour.
#[derive(Debug, Clone, Copy)]
pub struct Prices {
    /// Of a target's.
    pub gpu: Option<f64>,
    /// Of a draft worker's.
    pub draft_gpu: Option<f64>,
}

/// Everything that a plan follows from.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// One target.
    pub target: Site,
    /// How many of it.
    pub targets: u32,
    /// The draft and its weights.
    pub draft: Option<(ModelShape, Format)>,
    /// GPUs that only draft.
    pub draft_gpus: Option<GpuSet>,
    /// Keys and values of both.
    pub kv: KvFormat,
    /// What is asked.
    pub traffic: Traffic,
    /// What it may cost.
    pub prices: Prices,
    /// What no data sheet says.
    pub assumed: Assumptions,
}

/// Gigabytes of weights, every parameter at its format's width.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WeightsGb {
    /// One target's.
    pub target: f64,
    /// One draft's; 0 without one.
    pub draft: f64,
    /// Both.
    pub total: f64,
}

/// A plan.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Weights at a glance.
    pub weights_gb: WeightsGb,
    /// The target's memory.
    pub target: Weights,
    /// The draft's.
    pub draft: Option<Weights>,
    /// The GPUs of one target.
    pub target_gpus: String,
    /// How many targets.
    pub targets: u32,
    /// GPUs that only draft.
    pub draft_gpus: Option<String>,
    /// Bytes of keys and values of a token at one target, all its GPUs together.
    pub kv_bytes_per_token: f64,
    /// The same of the draft, on one GPU.
    pub draft_kv_bytes_per_token: Option<f64>,
    /// Tokens that a sequence holds.
    pub context: u32,
    /// Of these, generated.
    pub output_tokens: u32,
    /// Acceptance by position.
    pub acceptance: Vec<f64>,
    /// The time of one prompt on an idle target, milliseconds.
    pub prompt_ms: f64,
    /// The ways to place the draft.
    pub placements: Vec<Placement>,
    /// What was assumed.
    pub assumed: Assumptions,
}

/// One way to place the draft.
#[derive(Debug, Clone, Serialize)]
pub struct Placement {
    /// `plain`, `colocated` or `apart`.
    pub name: &'static str,
    /// Memory left for keys and values at one target, GB; less than nothing: the weights do not fit.
    pub kv_budget_gb: f64,
    /// The same of one draft worker, where it has GPUs of its own.
    pub draft_kv_budget_gb: Option<f64>,
    /// Sequences of `context` tokens that one target, and its part of the draft workers, can hold.
    pub concurrency: u64,
    /// By load.
    pub loads: Vec<LoadLine>,
    /// What was asked for by `--rate`.
    pub rate: Option<RateAnswer>,
    /// What runs out, soonest first.
    pub limits: Vec<Limit>,
    /// Draft GPUs wanted for each target at its full load.
    pub wanted_draft_gpus_per_target: Option<u64>,
    /// The longest way to the draft and back over which drafting pays for one sequence, milliseconds.
    pub longest_wire_ms: Option<f64>,
}

/// One load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LoadLine {
    /// Sequences at one target.
    pub sequences: u64,
    /// With the best k.
    pub best: Outcome,
    /// Of the same machines at k = 0.
    pub speedup: f64,
    /// Of all targets and draft GPUs, per million output tokens, where prices are known.
    pub cost_per_million: Option<f64>,
}

/// Whether a rate of requests is served.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RateAnswer {
    /// Requests per second that all targets together can do.
    pub most: f64,
    /// Sequences at each target where the wanted rate is reached, and the time per token there; nothing where it is not.
    pub at: Option<LoadLine>,
    /// Targets, each with its draft GPUs, that the wanted rate needs.
    pub targets_needed: u64,
}

impl Plan {
    /// Works everything out.
    pub fn new(inputs: &Inputs) -> Self {
        let target = Weights::of(&inputs.target.shape, inputs.target.format);
        let draft = inputs.draft.as_ref().map(|(shape, format)| Weights::of(shape, *format));
        let draft_gb = draft.map_or(0.0, |draft| draft.weights_gb);
        let roofline = inputs.target_roofline();
        let site = Planned { roofline: &roofline, known: &as_profiled(&roofline) };
        let mut placements = vec![inputs.plain(site)];
        placements.extend(inputs.colocated(site));
        placements.extend(inputs.apart(site));
        Self {
            weights_gb: WeightsGb {
                target: target.weights_gb,
                draft: draft_gb,
                total: target.weights_gb + draft_gb,
            },
            target,
            draft,
            target_gpus: inputs.target.gpus.to_string(),
            targets: inputs.targets,
            draft_gpus: inputs.draft_gpus.map(|gpus| gpus.to_string()),
            kv_bytes_per_token: kv_bytes_per_token(&inputs.target.shape, inputs.kv, inputs.target.gpus.count),
            draft_kv_bytes_per_token: inputs
                .draft
                .as_ref()
                .map(|(shape, _)| kv_bytes_per_token(shape, inputs.kv, 1)),
            context: inputs.traffic.context,
            output_tokens: inputs.traffic.output_tokens,
            acceptance: inputs.traffic.acceptance.clone(),
            prompt_ms: inputs.prompt_us(&roofline) / 1e3,
            placements,
            assumed: inputs.assumed,
        }
    }
}

/// A target as it is and as its worker knows it.
#[derive(Clone, Copy)]
struct Planned<'a> {
    roofline: &'a Roofline,
    known: &'a StepTimes,
}

/// What memory allows.
struct Room {
    kv_budget_gb: f64,
    draft_kv_budget_gb: Option<f64>,
    concurrency: u64,
}

impl Inputs {
    fn target_roofline(&self) -> Roofline {
        let Site { shape, format, gpus } = &self.target;
        Roofline::new(shape, (*format, self.kv), *gpus, self.assumed)
    }

    fn plain(&self, target: Planned<'_>) -> Placement {
        let kv_budget_gb = self.memory_gb(self.target.gpus)
            - Weights::of(&self.target.shape, self.target.format).resident_gb;
        let per_token = kv_bytes_per_token(&self.target.shape, self.kv, self.target.gpus.count);
        let room = Room {
            kv_budget_gb,
            draft_kv_budget_gb: None,
            concurrency: self.sequences(kv_budget_gb, per_token),
        };
        let rounds =
            Rounds { acceptance: &[0.0], ..self.rounds(target, Drafting::Colocated(target.roofline)) };
        self.placement("plain", (&rounds, target.roofline), room)
    }

    /// The draft is split over the target's GPUs as the target is.
    fn colocated(&self, target: Planned<'_>) -> Option<Placement> {
        let (shape, format) = self.draft.as_ref()?;
        let gpus = self.target.gpus;
        let draft = Roofline::new(shape, (*format, self.kv), gpus, self.assumed);
        let weights_gb = Weights::of(&self.target.shape, self.target.format).resident_gb
            + Weights::of(shape, *format).resident_gb;
        let kv_budget_gb = self.memory_gb(gpus) - weights_gb;
        let per_token = kv_bytes_per_token(&self.target.shape, self.kv, gpus.count)
            + kv_bytes_per_token(shape, self.kv, gpus.count);
        let room = Room {
            kv_budget_gb,
            draft_kv_budget_gb: None,
            concurrency: self.sequences(kv_budget_gb, per_token),
        };
        let rounds = self.rounds(target, Drafting::Colocated(&draft));
        Some(self.placement("colocated", (&rounds, target.roofline), room))
    }

    /// Each draft GPU holds the whole draft and drafts for its part of the sequences.
    fn apart(&self, target: Planned<'_>) -> Option<Placement> {
        let ((shape, format), gpus) = (self.draft.as_ref()?, self.draft_gpus?);
        let one = GpuSet { count: 1, ..gpus };
        let draft = Roofline::new(shape, (*format, self.kv), one, self.assumed);
        let workers = f64::from(gpus.count) / f64::from(self.targets);
        let wire_us = self.assumed.wire_us;
        let rounds = Rounds {
            target_wire_us: wire_us,
            ..self.rounds(target, Drafting::Apart { draft: &draft, workers, wire_us })
        };
        let kv_budget_gb = self.memory_gb(self.target.gpus)
            - Weights::of(&self.target.shape, self.target.format).resident_gb;
        let draft_budget_gb = self.memory_gb(one) - Weights::of(shape, *format).resident_gb;
        let per_token = kv_bytes_per_token(&self.target.shape, self.kv, self.target.gpus.count);
        let drafted = self.sequences(draft_budget_gb, kv_bytes_per_token(shape, self.kv, 1)) as f64 * workers;
        let room = Room {
            kv_budget_gb,
            draft_kv_budget_gb: Some(draft_budget_gb),
            concurrency: self.sequences(kv_budget_gb, per_token).min(drafted as u64),
        };
        Some(self.placement("apart", (&rounds, target.roofline), room))
    }

    fn rounds<'a>(&'a self, target: Planned<'a>, drafting: Drafting<'a>) -> Rounds<'a> {
        Rounds {
            target: target.roofline,
            known: target.known,
            target_wire_us: 0.0,
            router_us: self.assumed.router_us,
            target_rows_max: f64::from(self.assumed.rows_max),
            drafting,
            acceptance: &self.traffic.acceptance,
            context: f64::from(self.traffic.context),
            prompt_us_per_token: self.prompt_us(target.roofline) / f64::from(self.traffic.output_tokens),
        }
    }

    fn placement(
        &self,
        name: &'static str,
        (rounds, target): (&Rounds<'_>, &Roofline),
        room: Room,
    ) -> Placement {
        let fits = room.concurrency > 0;
        let draft_gpus = if name == "apart" { self.draft_gpus } else { None };
        let line = |sequences: u64| self.load_line(rounds, sequences, draft_gpus);
        let mut loads: Vec<u64> = self.traffic.loads.iter().map(|&load| u64::from(load)).collect();
        loads.push(room.concurrency);
        loads.retain(|&load| load > 0 && load <= room.concurrency);
        loads.sort_unstable();
        loads.dedup();
        let full = room.concurrency as f64;
        let mut limits = if fits { limits(rounds, target, room.concurrency) } else { Vec::new() };
        if name == "plain" {
            limits.retain(|limit| !matches!(limit.what, "draft" | "speculation"));
        }
        Placement {
            name,
            kv_budget_gb: room.kv_budget_gb,
            draft_kv_budget_gb: room.draft_kv_budget_gb,
            concurrency: room.concurrency,
            loads: loads.into_iter().map(line).collect(),
            rate: self
                .traffic
                .rate
                .filter(|_| fits)
                .map(|rate| self.answer(rate, rounds, room.concurrency, line)),
            limits,
            wanted_draft_gpus_per_target: if fits { wanted_draft_workers(rounds, full) } else { None },
            longest_wire_ms: if fits { longest_wire_ms(rounds, 1.0) } else { None },
        }
    }

    fn load_line(&self, rounds: &Rounds<'_>, sequences: u64, draft_gpus: Option<GpuSet>) -> LoadLine {
        let best = rounds.best(sequences as f64);
        let hourly = self.prices.gpu.and_then(|price| {
            let own = price * f64::from(self.target.gpus.count * self.targets);
            match draft_gpus {
                None => Some(own),
                Some(gpus) => self.prices.draft_gpu.map(|price| own + price * f64::from(gpus.count)),
            }
        });
        let all_tokens_per_second = best.tokens_per_second * f64::from(self.targets);
        let cost_per_million = hourly.map(|hourly| hourly / 3600.0 / all_tokens_per_second * 1e6);
        LoadLine { sequences, best, speedup: rounds.speedup(sequences as f64), cost_per_million }
    }

    fn answer(
        &self,
        rate: f64,
        rounds: &Rounds<'_>,
        concurrency: u64,
        line: impl Fn(u64) -> LoadLine,
    ) -> RateAnswer {
        let targets = f64::from(self.targets);
        let requests = |n: u64| {
            rounds.best(n as f64).tokens_per_second * targets / f64::from(self.traffic.output_tokens)
        };
        let most = (1..=concurrency).map(requests).fold(0.0, f64::max);
        let at = (1..=concurrency).find(|&n| requests(n) >= rate).map(line);
        RateAnswer { most, at, targets_needed: (rate / (most / targets)).ceil() as u64 }
    }

    /// Memory that weights and KV may take.
    fn memory_gb(&self, gpus: GpuSet) -> f64 {
        f64::from(gpus.count) * gpus.gpu.memory_gb * self.assumed.memory_share
    }

    /// Whole sequences that a KV budget holds.
    fn sequences(&self, budget_gb: f64, bytes_per_token: f64) -> u64 {
        // A negative budget saturates at 0.
        (budget_gb * 1e9 / (bytes_per_token * f64::from(self.traffic.context))) as u64
    }

    /// The time of one prompt.
    fn prompt_us(&self, target: &Roofline) -> f64 {
        let rows = f64::from(self.traffic.context - self.traffic.output_tokens);
        if rows == 0.0 {
            return 0.0;
        }
        target.micros(Forward { sequences: 1.0, rows_each: rows, context: rows / 2.0 })
    }
}
