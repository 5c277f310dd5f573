//! The plan: for each placement of the draft, what fits, its speed at each load, its cost, and the limit that
//! is reached first. Pure: [`Inputs`] in, [`Plan`] out.

use engine::ModelShape;
use scheduling::cost::StepTimes;
use serde::Serialize;

use super::gpu::GpuSet;
use super::limits::{Limit, SEQUENCES_MAX, desired_draft_workers, limits, longest_wire_ms};
use super::round::{Drafting, RoundEstimate, RoundModel};
use super::step_time::{Assumptions, ForwardBatch, Roofline, StepCost, as_profiled};
use super::weights::{Format, KvFormat, WeightMemory, kv_bytes_per_token};

/// A model and the GPUs on which it runs.
#[derive(Debug, Clone)]
pub struct ModelOnGpus {
    /// The model.
    pub shape: ModelShape,
    /// Weight format.
    pub format: Format,
    /// The GPUs over which it is split.
    pub gpus: GpuSet,
}

/// The load and its properties.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// Tokens per sequence.
    pub context: u32,
    /// Generated tokens of these.
    pub output_tokens: u32,
    /// Acceptance by position.
    pub acceptance: Vec<f64>,
    /// Requests per second.
    pub rate: Option<f64>,
    /// Loads to show, in sequences per target.
    pub loads: Vec<u32>,
}

/// Prices per GPU and hour.
#[derive(Debug, Clone, Copy)]
pub struct Prices {
    /// Price of a target's GPU.
    pub gpu: Option<f64>,
    /// Price of a draft worker's GPU.
    pub draft_gpu: Option<f64>,
}

/// All inputs of a plan.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The model and GPUs of one target.
    pub target: ModelOnGpus,
    /// Number of targets.
    pub targets: u32,
    /// The draft and its weight format.
    pub draft: Option<(ModelShape, Format)>,
    /// GPUs only for drafting.
    pub draft_gpus: Option<GpuSet>,
    /// Format of keys and values, for both models.
    pub kv: KvFormat,
    /// The load.
    pub traffic: Traffic,
    /// Prices, if given.
    pub prices: Prices,
    /// Assumptions that no data sheet states.
    pub assumed: Assumptions,
}

/// Weights in GB, with every parameter at its format's width.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WeightsGb {
    /// Weights of one target.
    pub target: f64,
    /// Weights of one draft; 0 without one.
    pub draft: f64,
    /// The sum of both.
    pub total: f64,
}

/// A plan.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Summary of the weights.
    pub weights_gb: WeightsGb,
    /// Memory of the target's weights.
    pub target: WeightMemory,
    /// Memory of the draft's weights.
    pub draft: Option<WeightMemory>,
    /// The GPUs of one target.
    pub target_gpus: String,
    /// Number of targets.
    pub targets: u32,
    /// GPUs only for drafting.
    pub draft_gpus: Option<String>,
    /// KV bytes per token at one target, summed over its GPUs.
    pub kv_bytes_per_token: f64,
    /// KV bytes per token of the draft on one GPU.
    pub draft_kv_bytes_per_token: Option<f64>,
    /// Tokens per sequence.
    pub context: u32,
    /// Generated tokens of these.
    pub output_tokens: u32,
    /// Acceptance by position.
    pub acceptance: Vec<f64>,
    /// Prefill time of one prompt on an idle target, milliseconds.
    pub prompt_ms: f64,
    /// The placements of the draft.
    pub placements: Vec<Placement>,
    /// The assumptions.
    pub assumed: Assumptions,
}

/// Where the draft runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlacementKind {
    /// Nowhere.
    Plain,
    /// On the target's GPUs.
    Colocated,
    /// On separate GPUs.
    Apart,
}

/// One placement of the draft.
#[derive(Debug, Clone, Serialize)]
pub struct Placement {
    /// Where the draft runs.
    pub name: PlacementKind,
    /// Memory left for KV at one target, GB; negative if the weights do not fit.
    pub kv_budget_gb: f64,
    /// Memory left for KV at one draft worker, GB, if it has separate GPUs.
    pub draft_kv_budget_gb: Option<f64>,
    /// Sequences of `context` tokens that fit into one target and its share of the draft workers.
    pub concurrency: u64,
    /// What is missing where not even one fits.
    pub shortage: Option<Shortage>,
    /// Results by load.
    pub loads: Vec<LoadLine>,
    /// Result for `--rate`, if given.
    pub rate: Option<RateAnswer>,
    /// Limits, lowest first.
    pub limits: Vec<Limit>,
    /// Draft GPUs wanted per target at its full load.
    pub wanted_draft_gpus_per_target: Option<u64>,
    /// The longest round-trip time to the draft at which drafting pays for one sequence, milliseconds.
    pub longest_wire_ms: Option<f64>,
}

/// Memory that is too small for a single sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Shortage {
    /// Whether a draft worker lacks it, else the target.
    pub at_draft: bool,
    /// Memory left for KV, GB; negative if the weights do not fit.
    pub left_gb: f64,
    /// KV of one sequence there, GB.
    pub sequence_gb: f64,
}

/// Results at one load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LoadLine {
    /// Sequences per target.
    pub sequences: u64,
    /// Results at the best k.
    pub best: RoundEstimate,
    /// Speedup over k = 0 on the same machines.
    pub speedup: f64,
    /// Cost of all targets and draft GPUs per million output tokens, if prices are known.
    pub cost_per_million: Option<f64>,
}

/// Whether a request rate can be served.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RateAnswer {
    /// Maximum requests per second of all targets together.
    pub most: f64,
    /// The smallest load per target that reaches the rate; `None` if none does.
    pub at: Option<LoadLine>,
    /// Number of targets, each with its draft GPUs, that the rate needs.
    pub targets_needed: u64,
}

impl Plan {
    /// Computes the plan.
    pub fn new(inputs: &Inputs) -> Self {
        let target = WeightMemory::of(&inputs.target.shape, inputs.target.format);
        let draft = inputs.draft.as_ref().map(|(shape, format)| WeightMemory::of(shape, *format));
        let draft_gb = draft.map_or(0.0, |draft| draft.weights_gb);
        let roofline = inputs.target_roofline();
        let target_times = TargetTimes { roofline: &roofline, known: &as_profiled(&roofline) };
        let mut placements = vec![inputs.plain(target_times)];
        placements.extend(inputs.colocated(target_times));
        placements.extend(inputs.apart(target_times));
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

/// A target's actual step times and those that its worker measures.
#[derive(Clone, Copy)]
struct TargetTimes<'a> {
    roofline: &'a Roofline,
    known: &'a StepTimes,
}

/// Memory limits of a placement.
struct MemoryLimits {
    kv_budget_gb: f64,
    draft_kv_budget_gb: Option<f64>,
    concurrency: u64,
    shortage: Option<Shortage>,
}

impl Inputs {
    fn target_roofline(&self) -> Roofline {
        let ModelOnGpus { shape, format, gpus } = &self.target;
        Roofline::new(shape, (*format, self.kv), *gpus, self.assumed)
    }

    fn plain(&self, target: TargetTimes<'_>) -> Placement {
        let kv_budget_gb = self.memory_gb(self.target.gpus)
            - WeightMemory::of(&self.target.shape, self.target.format).resident_gb;
        let per_token = kv_bytes_per_token(&self.target.shape, self.kv, self.target.gpus.count);
        let memory = MemoryLimits {
            kv_budget_gb,
            draft_kv_budget_gb: None,
            concurrency: self.sequences(kv_budget_gb, per_token),
            shortage: self.shortage(false, kv_budget_gb, per_token),
        };
        let rounds = self.rounds(target, Drafting::Nowhere);
        self.placement(PlacementKind::Plain, (&rounds, target.roofline), memory)
    }

    /// The draft is split over the target's GPUs in the same way as the target.
    fn colocated(&self, target: TargetTimes<'_>) -> Option<Placement> {
        let (shape, format) = self.draft.as_ref()?;
        let gpus = self.target.gpus;
        let draft = Roofline::new(shape, (*format, self.kv), gpus, self.assumed);
        let weights_gb = WeightMemory::of(&self.target.shape, self.target.format).resident_gb
            + WeightMemory::of(shape, *format).resident_gb;
        let kv_budget_gb = self.memory_gb(gpus) - weights_gb;
        let per_token = kv_bytes_per_token(&self.target.shape, self.kv, gpus.count)
            + kv_bytes_per_token(shape, self.kv, gpus.count);
        let memory = MemoryLimits {
            kv_budget_gb,
            draft_kv_budget_gb: None,
            concurrency: self.sequences(kv_budget_gb, per_token),
            shortage: self.shortage(false, kv_budget_gb, per_token),
        };
        let rounds = self.rounds(target, Drafting::Colocated(&draft));
        Some(self.placement(PlacementKind::Colocated, (&rounds, target.roofline), memory))
    }

    /// Each draft GPU holds the whole draft and drafts for its share of the sequences.
    fn apart(&self, target: TargetTimes<'_>) -> Option<Placement> {
        let ((shape, format), gpus) = (self.draft.as_ref()?, self.draft_gpus?);
        let one = GpuSet { count: 1, ..gpus };
        let draft = Roofline::new(shape, (*format, self.kv), one, self.assumed);
        let workers = f64::from(gpus.count) / f64::from(self.targets);
        let wire_us = self.assumed.wire_us;
        let rounds = RoundModel {
            target_wire_us: wire_us,
            ..self.rounds(target, Drafting::Apart { draft: &draft, workers, wire_us })
        };
        let kv_budget_gb = self.memory_gb(self.target.gpus)
            - WeightMemory::of(&self.target.shape, self.target.format).resident_gb;
        let draft_budget_gb = self.memory_gb(one) - WeightMemory::of(shape, *format).resident_gb;
        let per_token = kv_bytes_per_token(&self.target.shape, self.kv, self.target.gpus.count);
        let draft_per_token = kv_bytes_per_token(shape, self.kv, 1);
        let at_one_worker = self.sequences(draft_budget_gb, draft_per_token) as f64;
        let drafted = at_one_worker * workers;
        // Where targets share a draft worker, each has a part of the sequences that fit there.
        let draft_left_gb = match at_one_worker {
            0.0 => draft_budget_gb,
            _ => drafted * self.sequence_gb(draft_per_token),
        };
        let memory = MemoryLimits {
            kv_budget_gb,
            draft_kv_budget_gb: Some(draft_budget_gb),
            concurrency: self.sequences(kv_budget_gb, per_token).min(drafted as u64),
            shortage: self
                .shortage(false, kv_budget_gb, per_token)
                .or_else(|| self.shortage(true, draft_left_gb, draft_per_token)),
        };
        Some(self.placement(PlacementKind::Apart, (&rounds, target.roofline), memory))
    }

    fn rounds<'a>(&'a self, target: TargetTimes<'a>, drafting: Drafting<'a>) -> RoundModel<'a> {
        RoundModel {
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
        name: PlacementKind,
        (rounds, target): (&RoundModel<'_>, &Roofline),
        memory: MemoryLimits,
    ) -> Placement {
        let fits = memory.concurrency > 0;
        let draft_gpus = if name == PlacementKind::Apart { self.draft_gpus } else { None };
        let line = |sequences: u64| self.load_line(rounds, sequences, draft_gpus);
        let mut loads: Vec<u64> = self.traffic.loads.iter().map(|&load| u64::from(load)).collect();
        loads.push(memory.concurrency);
        loads.retain(|&load| load > 0 && load <= memory.concurrency);
        loads.sort_unstable();
        loads.dedup();
        let full = memory.concurrency as f64;
        Placement {
            name,
            kv_budget_gb: memory.kv_budget_gb,
            draft_kv_budget_gb: memory.draft_kv_budget_gb,
            concurrency: memory.concurrency,
            shortage: memory.shortage,
            loads: loads.into_iter().map(line).collect(),
            rate: self
                .traffic
                .rate
                .filter(|_| fits)
                .map(|rate| self.rate_answer(rate, rounds, memory.concurrency, line)),
            limits: if fits { limits(rounds, target, memory.concurrency) } else { Vec::new() },
            wanted_draft_gpus_per_target: if fits { desired_draft_workers(rounds, full) } else { None },
            longest_wire_ms: if fits { longest_wire_ms(rounds, 1.0) } else { None },
        }
    }

    fn load_line(&self, rounds: &RoundModel<'_>, sequences: u64, draft_gpus: Option<GpuSet>) -> LoadLine {
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

    fn rate_answer(
        &self,
        rate: f64,
        rounds: &RoundModel<'_>,
        concurrency: u64,
        line: impl Fn(u64) -> LoadLine,
    ) -> RateAnswer {
        let targets = f64::from(self.targets);
        let requests = |n: u64| {
            rounds.best(n as f64).tokens_per_second * targets / f64::from(self.traffic.output_tokens)
        };
        // Up to a hundred million sequences of a tiny model fit; trying every number would take minutes.
        let mut loads = (1..=concurrency.min(SEQUENCES_MAX)).chain([concurrency]);
        let most = loads.clone().map(requests).fold(0.0, f64::max);
        let at = loads.find(|&n| requests(n) >= rate).map(line);
        RateAnswer { most, at, targets_needed: (rate / (most / targets)).ceil() as u64 }
    }

    /// Memory available for weights and KV, GB.
    fn memory_gb(&self, gpus: GpuSet) -> f64 {
        f64::from(gpus.count) * gpus.gpu.memory_gb * self.assumed.memory_share
    }

    /// The shortage of a KV budget into which no sequence fits.
    fn shortage(&self, at_draft: bool, left_gb: f64, bytes_per_token: f64) -> Option<Shortage> {
        let sequence_gb = self.sequence_gb(bytes_per_token);
        (left_gb < sequence_gb).then_some(Shortage { at_draft, left_gb, sequence_gb })
    }

    /// KV of one sequence, GB.
    fn sequence_gb(&self, bytes_per_token: f64) -> f64 {
        bytes_per_token * f64::from(self.traffic.context) / 1e9
    }

    /// Number of whole sequences that fit into a KV budget.
    fn sequences(&self, budget_gb: f64, bytes_per_token: f64) -> u64 {
        // A negative budget saturates at 0.
        (budget_gb / self.sequence_gb(bytes_per_token)) as u64
    }

    /// Prefill time of one prompt, microseconds.
    fn prompt_us(&self, target: &Roofline) -> f64 {
        let rows = f64::from(self.traffic.context - self.traffic.output_tokens);
        if rows == 0.0 {
            return 0.0;
        }
        target.micros(ForwardBatch { sequences: 1.0, rows_each: rows, context: rows / 2.0 })
    }
}
