//! One request in two forms that must be equivalent: the client's message, and the oracle's input.

use proto::sampling::{acceptance_to_wire, sampling_to_wire};
use proto::v1;
use speculation::{AcceptanceMode, SamplingParams, SequenceSpec, TokenId};

use crate::pair::{END_OF_TEXT, MODEL, PairText, TASK_TYPES};

/// One request for one choice.
#[derive(Debug, Clone)]
pub struct Case {
    /// Name for error messages.
    pub name: String,
    /// Task type.
    pub task_type: String,
    /// Ids of the prompt.
    pub prompt_ids: Vec<TokenId>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Sampling seed.
    pub seed: u64,
    /// Maximum output tokens.
    pub max_tokens: u32,
    /// k of every round; 0 is plain decoding.
    pub num_draft_tokens: u32,
    /// Tokens per round of a draft tree; at most k means a chain.
    pub num_tree_tokens: u32,
    /// Whether the lane chooses k.
    pub is_k_left_to_lane: bool,
    /// Priority; lower is more urgent.
    pub priority: u32,
    /// How drafts are verified.
    pub acceptance: AcceptanceMode,
    /// Number of most likely tokens to report with each drawn one.
    pub logprobs: Option<u32>,
    /// Whether the text continues past the model's end token.
    pub ignore_eos: bool,
    /// The grammar that the text must match, in its wire form.
    pub grammar: Option<String>,
}

impl Case {
    /// A request for 24 tokens with default sampling, four drafted per round.
    pub fn new(name: impl Into<String>, prompt_ids: Vec<TokenId>, temperature: f32) -> Self {
        Self {
            name: name.into(),
            task_type: String::new(),
            prompt_ids,
            sampling: SamplingParams { temperature, ..SamplingParams::default() },
            seed: 1,
            max_tokens: 24,
            num_draft_tokens: 4,
            num_tree_tokens: 0,
            is_k_left_to_lane: false,
            priority: 0,
            acceptance: AcceptanceMode::Coupled,
            logprobs: None,
            ignore_eos: false,
            grammar: None,
        }
    }

    /// A request for exactly `max_tokens` tokens, enough of them that it is in progress when a worker fails.
    pub fn long_text(temperature: f32, max_tokens: u32) -> anyhow::Result<Self> {
        let prompt = PairText::load()?.bundled("summarization")?.swap_remove(2);
        let case = Self::new(format!("a long text at T = {temperature}"), prompt, temperature);
        Ok(Self { max_tokens, ignore_eos: true, ..case })
    }

    /// The same request at another k.
    pub fn with_k(&self, num_draft_tokens: u32) -> Self {
        let name = format!("{}, k = {num_draft_tokens}", self.name);
        Self { name, num_draft_tokens, ..self.clone() }
    }

    /// The same request with draft trees of `num_tree_tokens` tokens and depth `k`.
    pub fn with_tree(&self, k: u32, num_tree_tokens: u32) -> Self {
        let name = format!("{}, k = {k}, {num_tree_tokens} tokens", self.name);
        Self { name, num_draft_tokens: k, num_tree_tokens, ..self.clone() }
    }

    /// The same request with only the last `len` ids of its prompt, for checks whose cost grows with the
    /// prompt.
    pub fn with_prompt_tail(&self, len: usize) -> Self {
        let skipped = self.prompt_ids.len().saturating_sub(len);
        Self { prompt_ids: self.prompt_ids[skipped..].to_vec(), ..self.clone() }
    }

    /// The client's message.
    pub fn to_wire(&self) -> v1::GenerateRequest {
        v1::GenerateRequest {
            model: MODEL.to_owned(),
            prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds {
                ids: self.prompt_ids.clone(),
            })),
            sampling: Some(sampling_to_wire(&self.sampling)),
            max_tokens: Some(self.max_tokens),
            ignore_eos: self.ignore_eos,
            seed: Some(self.seed as i64),
            logprobs: self.logprobs,
            task_type: self.task_type.clone(),
            grammar: self.grammar.clone(),
            priority: self.priority,
            speculation: Some(v1::Speculation {
                enabled: None,
                num_draft_tokens: (!self.is_k_left_to_lane).then_some(self.num_draft_tokens),
                acceptance: acceptance_to_wire(self.acceptance).into(),
                num_tree_tokens: (self.num_tree_tokens > 0).then_some(self.num_tree_tokens),
            }),
            ..v1::GenerateRequest::default()
        }
    }

    /// The sequence specification for the rules.
    pub fn spec(&self) -> SequenceSpec {
        let prompt_len = self.prompt_ids.len() as u32;
        SequenceSpec {
            seed: self.seed,
            prompt_len,
            sampling: self.sampling.clone(),
            stop_token_ids: if self.ignore_eos { Vec::new() } else { vec![END_OF_TEXT] },
            max_len: prompt_len + self.max_tokens,
            acceptance: self.acceptance,
            logprobs: self.logprobs,
            grammar: self.grammar.clone(),
            ..SequenceSpec::default()
        }
    }
}

/// A name, and the change that it makes to the sampling parameters.
type Variant = (&'static str, fn(&mut SamplingParams));

/// Sampling variants that involve every step of the pipeline, separately and together.
const VARIANTS: [Variant; 6] = [
    ("plain", |_| ()),
    ("penalties", penalties),
    ("bias", bias),
    ("filters", filters),
    ("early end", early_end),
    ("everything", |sampling| {
        penalties(sampling);
        bias(sampling);
        filters(sampling);
    }),
];

fn penalties(sampling: &mut SamplingParams) {
    sampling.repetition_penalty = 1.3;
    sampling.frequency_penalty = 0.4;
    sampling.presence_penalty = -0.3;
}

/// Some ids are banned, some favoured, and the text may not end at once.
fn bias(sampling: &mut SamplingParams) {
    let barred = (100..140).map(|id| (id, -100.0));
    let favoured = (300..320).map(|id| (id, 1.5));
    sampling.logit_bias = barred.chain(favoured).collect();
    sampling.min_tokens = 8;
}

/// The text ends almost as soon as it may, in the middle of drafted tokens.
fn early_end(sampling: &mut SamplingParams) {
    sampling.min_tokens = 9;
    sampling.logit_bias = vec![(END_OF_TEXT, 12.0)];
}

fn filters(sampling: &mut SamplingParams) {
    sampling.top_p = 0.9;
    sampling.min_p = 0.02;
    sampling.top_k = 40;
}

/// Every task type at temperatures 0, 0.7 and 1. Sampling variants, prompts, seeds and log probabilities vary
/// too, so that each variant occurs at each temperature. 33 cases.
pub fn covering_set(text: &PairText) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (task_idx, task_type) in TASK_TYPES.into_iter().enumerate() {
        let prompts = text.bundled(task_type)?;
        for (temperature_idx, temperature) in [0.0, 0.7, 1.0].into_iter().enumerate() {
            let (variant, change) = VARIANTS[(task_idx + 2 * temperature_idx) % VARIANTS.len()];
            let prompt_idx = (task_idx + 3 * temperature_idx) % prompts.len();
            let seed = (1 + cases.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let name =
                format!("{task_type}[{prompt_idx}] at T = {temperature}, {variant}, seed {}", seed as i64);
            let mut case = Case::new(name, prompts[prompt_idx].clone(), temperature);
            case.task_type = task_type.to_owned();
            case.seed = seed;
            // Not every third: those all have one temperature.
            case.logprobs = (cases.len() % 4 == 0).then_some(2);
            change(&mut case.sampling);
            cases.push(case);
        }
    }
    Ok(cases)
}
