//! Measures acceptance: every prompt at every temperature in every acceptance mode, by task type and by
//! position in the draft.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use speculation::{AcceptanceMode, SamplingParams, SequenceSpec, TokenId};

use super::error::CheckPairError;
use super::local::{LocalPair, VerifiedRound};

/// A tokenized prompt.
#[derive(Debug, Clone)]
pub struct EvalPrompt {
    /// Its task type.
    pub task: String,
    /// Its ids.
    pub prompt_ids: Vec<TokenId>,
    /// Seed of its sampling noise.
    pub seed: u64,
}

/// Settings shared by all prompts.
#[derive(Debug, Clone)]
pub struct EvalOptions {
    /// k in every round.
    pub num_draft_tokens: u32,
    /// Maximum number of output tokens per sequence.
    pub max_tokens: u32,
    /// Ids that end a sequence.
    pub stop_token_ids: Vec<TokenId>,
}

/// Acceptance counters.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Sequences.
    pub sequences: u64,
    /// Output tokens.
    pub tokens: u64,
    /// Verifications.
    pub rounds: u64,
    /// Drafted tokens that were verified.
    pub draft_tokens: u64,
    /// Accepted of these.
    pub accepted_tokens: u64,
    /// By position in the draft: how often it was judged, that is, drafted and reached.
    pub judged_by_position: Vec<u64>,
    /// By position in the draft: how often it was accepted.
    pub accepted_by_position: Vec<u64>,
    /// One verdict per round.
    #[serde(skip)]
    pub verified_rounds: Vec<VerifiedRound>,
}

impl Counts {
    /// Adds one sequence.
    pub fn add(&mut self, tokens: usize, verified_rounds: &[VerifiedRound]) {
        self.sequences += 1;
        self.tokens += tokens as u64;
        self.rounds += verified_rounds.len() as u64;
        for round in verified_rounds {
            self.draft_tokens += u64::from(round.drafted);
            self.accepted_tokens += u64::from(round.accepted);
            let judged = round.drafted.min(round.accepted + 1) as usize;
            if self.judged_by_position.len() < judged {
                self.judged_by_position.resize(judged, 0);
                self.accepted_by_position.resize(judged, 0);
            }
            for position in 0..judged {
                self.judged_by_position[position] += 1;
                self.accepted_by_position[position] += u64::from((position as u32) < round.accepted);
            }
        }
        self.verified_rounds.extend_from_slice(verified_rounds);
    }

    /// Sum of several measurements.
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        all.into_iter().fold(Self::default(), |mut sum, counts| {
            let sequences = sum.sequences + counts.sequences;
            sum.add(counts.tokens as usize, &counts.verified_rounds);
            sum.sequences = sequences;
            sum
        })
    }

    /// Accepted / drafted; `None` if nothing was drafted.
    pub fn acceptance_rate(&self) -> Option<f64> {
        (self.draft_tokens > 0).then(|| self.accepted_tokens as f64 / self.draft_tokens as f64)
    }

    /// Tokens per verification.
    pub fn acceptance_length(&self) -> f64 {
        1.0 + self.accepted_tokens as f64 / self.rounds.max(1) as f64
    }

    /// By position: the probability of acceptance given that all earlier positions were accepted.
    pub fn rates(&self) -> Vec<f64> {
        let both = self.accepted_by_position.iter().zip(&self.judged_by_position);
        both.map(|(&accepted, &judged)| accepted as f64 / judged as f64).collect()
    }
}

/// A measured combination of temperature and acceptance mode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// Sampling temperature.
    pub temperature: f32,
    /// How drafts are verified.
    pub mode: AcceptanceMode,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "temperature {}, {}", self.temperature, self.mode.as_str())
    }
}

/// All counters, by setting and task type.
#[derive(Debug, Clone, Default)]
pub struct AcceptanceCounts {
    /// In the order of the settings.
    pub by_setting: Vec<(Setting, BTreeMap<String, Counts>)>,
}

impl AcceptanceCounts {
    /// Counters by task type in one mode, over all temperatures. Temperature 0 is the same in every mode and
    /// counts for each.
    pub fn by_task(&self, mode: AcceptanceMode) -> BTreeMap<String, Counts> {
        let mut tasks: BTreeMap<String, Vec<&Counts>> = BTreeMap::new();
        for (setting, counts) in &self.by_setting {
            if setting.mode == mode || setting.temperature == 0.0 {
                for (task, counts) in counts {
                    tasks.entry(task.clone()).or_default().push(counts);
                }
            }
        }
        tasks.into_iter().map(|(task, counts)| (task, Counts::sum(counts))).collect()
    }
}

/// All distinct combinations: greedy sampling is the same in every mode, so temperature 0 appears only once.
pub fn settings(temperatures: &[f32], modes: &[AcceptanceMode]) -> Vec<Setting> {
    let of = |&temperature: &f32| {
        let modes = if temperature == 0.0 { &[AcceptanceMode::Coupled] } else { modes };
        modes.iter().map(move |&mode| Setting { temperature, mode }).collect::<Vec<_>>()
    };
    temperatures.iter().flat_map(of).collect()
}

/// Decodes every prompt in every setting. Calls `on_task` before the first sequence of each task type in a
/// setting, and `on_sequence` after every sequence.
pub fn measure(
    pair: &mut LocalPair<'_>,
    eval_prompts: &[EvalPrompt],
    (settings, eval_options): (&[Setting], &EvalOptions),
    (mut on_task, mut on_sequence): (impl FnMut(&Setting, &str), impl FnMut()),
) -> Result<AcceptanceCounts, CheckPairError> {
    let mut measured = AcceptanceCounts::default();
    for setting in settings {
        let mut by_task: BTreeMap<String, Counts> = BTreeMap::new();
        for eval_prompt in eval_prompts {
            if !by_task.contains_key(&eval_prompt.task) {
                on_task(setting, &eval_prompt.task);
            }
            let decoded = pair.decode(
                sequence_spec(eval_prompt, setting, eval_options),
                &eval_prompt.prompt_ids,
                eval_options.num_draft_tokens,
            )?;
            by_task
                .entry(eval_prompt.task.clone())
                .or_default()
                .add(decoded.token_ids.len(), &decoded.verified_rounds);
            on_sequence();
        }
        measured.by_setting.push((*setting, by_task));
    }
    Ok(measured)
}

/// The sequence that a router would create for the prompt.
pub fn sequence_spec(
    eval_prompt: &EvalPrompt,
    setting: &Setting,
    eval_options: &EvalOptions,
) -> SequenceSpec {
    let prompt_len = eval_prompt.prompt_ids.len() as u32;
    SequenceSpec {
        seed: eval_prompt.seed,
        prompt_len,
        sampling: SamplingParams { temperature: setting.temperature, ..SamplingParams::default() },
        stop_token_ids: eval_options.stop_token_ids.clone(),
        max_len: prompt_len + eval_options.max_tokens,
        acceptance: setting.mode,
        ..SequenceSpec::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_behind_the_first_rejection_were_not_judged() {
        let mut counts = Counts::default();
        counts.add(
            9,
            &[(4, 4), (4, 1), (2, 0), (0, 0)].map(|(drafted, accepted)| VerifiedRound { drafted, accepted }),
        );
        assert_eq!((counts.rounds, counts.draft_tokens, counts.accepted_tokens), (4, 10, 5));
        assert_eq!(counts.judged_by_position, [3, 2, 1, 1]);
        assert_eq!(counts.accepted_by_position, [2, 1, 1, 1]);
        assert_eq!(counts.acceptance_rate(), Some(0.5));
        assert_eq!(counts.acceptance_length(), 2.25);
        let twice = Counts::sum([&counts, &counts]);
        assert_eq!((twice.sequences, twice.tokens, twice.judged_by_position[0]), (2, 18, 6));
    }

    #[test]
    fn greedy_draws_are_measured_once() {
        let modes = [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical];
        let all = settings(&[0.0, 1.0], &modes);
        assert_eq!(all.len(), 4);
        assert_eq!(all.iter().filter(|setting| setting.temperature == 0.0).count(), 1);
    }
}
