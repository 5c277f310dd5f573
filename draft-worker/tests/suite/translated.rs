//! Translation between two equal tokenizers changes no bit of proposals, trees or agreement. Between
//! different tokenizers, the KV of draft ids that change is never used. Other differences between tokenizers
//! are tested in `text::translation` and tests/tests/suite/foreign_tokenizer.rs.

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use draft_worker::config::DraftConfig;
use draft_worker::propose::Propose;
use draft_worker::translated::TranslatedExecutor;
use serde_json::Value;
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::prefix::Prefix;
use speculation::{
    Draft, Proposal, ReplyBody, Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, Work,
};
use text::{Framing, ModelText};
use worker::Task;
use worker::executor::StepExecutor;
use worker::table::{RouterId, SequenceKey};
use worker::task::Slot;

use crate::bundled_draft;

const PROMPT: &str = "<|user|>\nWrite a story about a garden, 3 lines.<|end|>\n<|assistant|>\n";

fn target_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target")
}

/// The bundled draft, configured for a target with this tokenizer.
fn config(tokenizer: &Path, more: &[&str]) -> DraftConfig {
    bundled_draft::config(&[&["--target-tokenizer", &tokenizer.to_string_lossy()][..], more].concat())
}

fn ids(tokenizer_json: &[u8], text: &str) -> Vec<TokenId> {
    let tokenizer = ModelText::from_assets(|name| (name == "tokenizer.json").then_some(tokenizer_json));
    tokenizer.expect("it is a tokenizer").encode(text, Framing::AsIs).expect("it is text")
}

/// The bundled tokenizer without those merges that produce an even id and that no other merge builds on: it
/// splits words where the bundled one does not.
fn shorter_tokens() -> Vec<u8> {
    let bundled = std::fs::read(target_dir().join("tokenizer.json")).expect("it is bundled");
    let mut json: Value = serde_json::from_slice(&bundled).expect("it is JSON");
    let vocabulary = json["model"]["vocab"].clone();
    let merges = json["model"]["merges"].as_array_mut().expect("it has merges");
    let parts = merges.iter().flat_map(|merge| [merge[0].clone(), merge[1].clone()]);
    let inner: BTreeSet<String> = parts.filter_map(|part| Some(part.as_str()?.to_owned())).collect();
    let is_left_out = |merge: &Value| {
        let token = [0, 1].map(|side| merge[side].as_str().unwrap_or_default()).concat();
        !inner.contains(&token) && vocabulary[&token].as_u64().is_some_and(|id| id.is_multiple_of(2))
    };
    merges.retain(|merge| !is_left_out(merge));
    json.to_string().into_bytes()
}

/// One sequence at one executor.
struct Sequence<M> {
    executor: M,
    slot: Slot,
    cached: CachedSequence,
}

impl<M: StepExecutor> Sequence<M> {
    fn new(mut executor: M) -> Self {
        let slot = executor.open();
        Self { executor, slot, cached: CachedSequence::default() }
    }

    /// Closes the sequence and opens a new one.
    fn begin_anew(&mut self) {
        self.executor.close(self.slot);
        (self.slot, self.cached) = (self.executor.open(), CachedSequence::default());
    }

    /// Runs a step; returns the reply and its agreement bits.
    fn run(&mut self, step: &Step) -> (ReplyBody, Vec<bool>) {
        let key = SequenceKey { router: RouterId(1), sequence: SequenceId(1) };
        let mut cached = std::mem::take(&mut self.cached);
        assert_eq!(cached.admit(step, &self.executor.limits()), Admission::Run);
        self.executor.truncate(self.slot, step.base_len);
        let mut tasks = VecDeque::from([Task::new(key, self.slot, step.clone(), cached, Instant::now())]);
        let (task, body) = loop {
            if let Some(done) = self.executor.advance(&mut tasks, u32::MAX).expect("there is room").pop() {
                break done;
            }
        };
        let agreed = task.reply(ReplyBody::Fed { cached_len: 0, prompt_logprobs: None }).agreed;
        self.cached = task.cached;
        (body, agreed)
    }
}

#[test]
fn between_equal_tokenizers_translation_changes_no_bit() {
    let config = config(&target_dir(), &[]);
    let bundled = std::fs::read(target_dir().join("tokenizer.json")).expect("it is bundled");
    for (temperature, num_tree_tokens) in [(0.0, 0), (1.0, 0), (0.7, 9)] {
        let decide = || Propose { keeps_candidates: num_tree_tokens > 0 };
        let native =
            worker::serve::load(&config.worker, Role::Draft, decide(), None).expect("the draft loads");
        let tokenizer = config.target_tokenizer.as_deref().expect("it was given");
        let translated =
            draft_worker::translated::load(&config.worker, tokenizer, decide()).expect("so it does");
        assert_eq!(native.facts.vocab_size, translated.facts.vocab_size);
        assert_eq!(native.facts.eos_token_ids, translated.facts.eos_token_ids);
        let (mut native, mut translated) =
            (Sequence::new(native.executor), Sequence::new(translated.executor));

        let mut ids = ids(&bundled, PROMPT);
        let sampling = SamplingParams { temperature, top_p: 0.95, ..SamplingParams::default() };
        let prompt_len = ids.len() as u32;
        let spec =
            Arc::new(SequenceSpec { seed: 7, prompt_len, max_len: 200, sampling, ..SequenceSpec::default() });
        let (mut base, mut num_agreed, mut num_compared) = (0, 0, 0);
        for step_seq in 1..24 {
            let work = match step_seq % 4 {
                // Feed committed ids only; some of them are the draft's own guesses.
                3 => Work::Feed,
                _ => Work::Propose { num_draft_tokens: 4, num_tree_tokens },
            };
            let step = step((step_seq, &spec), (&ids, base, ids.len()), work);
            let (expected, found) = (native.run(&step), translated.run(&step));
            assert_eq!(found, expected, "step {step_seq} at T = {temperature}");
            num_compared += found.1.len();
            num_agreed += found.1.iter().filter(|agreed| **agreed).count();
            match &found.0 {
                ReplyBody::Proposal(proposal) => {
                    // Some of the guesses are accepted, then the target draws a different id.
                    let accepted = step_seq as usize % 4;
                    let chain: Vec<TokenId> = match proposal.draft.is_tree() {
                        true => proposal.draft.token_ids[..1].to_vec(),
                        false => proposal.draft.token_ids.clone(),
                    };
                    let accepted = accepted.min(chain.len());
                    base = ids.len() + accepted.min(chain.len() - 1);
                    ids.extend(&chain[..accepted]);
                    ids.push(300 + step_seq as TokenId);
                    if step_seq % 4 == 2 {
                        // Simulates a draft that was not asked for some rounds.
                        base = ids.len() - accepted - 1;
                    }
                }
                ReplyBody::Fed { cached_len, .. } => {
                    base = *cached_len as usize;
                    ids.extend([400, 401]);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(num_compared > 10 && num_agreed < num_compared, "{num_agreed} of {num_compared}");
        assert!(num_tree_tokens > 0 || num_agreed > 0, "nothing that was compared agreed");
    }
}

/// The bundled draft, translated between equal tokenizers.
fn executor() -> TranslatedExecutor {
    let config = config(&target_dir(), &[]);
    let tokenizer = config.target_tokenizer.as_deref().expect("it was given");
    let decide = Propose { keeps_candidates: false };
    draft_worker::translated::load(&config.worker, tokenizer, decide).expect("the draft loads").executor
}

/// A step that feeds `ids` into a new sequence.
fn feed(executor: &mut TranslatedExecutor, sequence_id: u64, spec: &SequenceSpec, ids: &[TokenId]) -> Task {
    let sequence_id = SequenceId(sequence_id);
    let step = step((1, &Arc::new(spec.clone())), (ids, 0, ids.len()), Work::Feed);
    let step = Step { sequence_id, ..step };
    let mut cached = CachedSequence::default();
    assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
    let key = SequenceKey { router: RouterId(1), sequence: sequence_id };
    Task::new(key, executor.open(), step, cached, Instant::now())
}

/// Ids of a prompt whose last block of 16 lacks a few ids.
fn prompt_ids() -> Vec<TokenId> {
    const TEXT: &str = "Nevertheless everybody understood that the government would probably reconsider the recommendation of the \
        committee, because its members had considered the interesting arguments carefully.";
    let bundled = std::fs::read(target_dir().join("tokenizer.json")).expect("it is bundled");
    let first_words = |num: usize| TEXT.split_inclusive(' ').take(num).collect::<String>();
    let mut prompts = (1..20).map(|num| ids(&bundled, &first_words(num)));
    prompts.find(|ids| ids.len() > 20 && ids.len() % 16 > 4).expect("a word has few ids")
}

/// Context ids from the prefix cache counted as run in the step's next forward, which had computed others.
#[test]
fn ids_from_the_prefix_cache_are_done_before_any_row_runs() {
    let mut executor = executor();
    let (ids, spec) = (prompt_ids(), SequenceSpec::default());
    let mut tasks = VecDeque::from([feed(&mut executor, 1, &spec, &ids)]);
    while executor.advance(&mut tasks, u32::MAX).expect("there is room").is_empty() {}
    let mut tasks = VecDeque::from([2, 3].map(|sequence| feed(&mut executor, sequence, &spec, &ids)));
    // One row of a prompt: it belongs to the first.
    assert!(executor.advance(&mut tasks, 1).expect("there is room").is_empty());
    assert_eq!(tasks.iter().map(|task| task.has_run).collect::<Vec<_>>(), [true, false]);
    let waiting = &tasks[1];
    assert!(waiting.num_cached >= 16, "{} ids", waiting.num_cached);
    assert_eq!(waiting.context_done, waiting.num_cached as usize);
}

/// The step whose grammar compiles claimed the blocks of the prefix, and the other step waited for it.
#[test]
fn nobody_waits_for_the_prefix_of_a_step_that_waits_for_its_grammar() {
    let mut executor = executor();
    let (ids, plain) = (prompt_ids(), SequenceSpec::default());
    let grammar = serde_json::json!({ "kind": "regex", "text": "[a-c]{3}" }).to_string();
    let masked = SequenceSpec { grammar: Some(grammar), ..plain.clone() };
    let mut tasks =
        VecDeque::from([feed(&mut executor, 1, &masked, &ids), feed(&mut executor, 2, &plain, &ids)]);
    let finished = executor.advance(&mut tasks, u32::MAX).expect("there is room");
    let finished: Vec<SequenceId> = finished.iter().map(|(task, _)| task.key.sequence).collect();
    assert_eq!(finished, [SequenceId(2)]);
}

/// With another tokenizer than the target's, a draft may have none of the allowed tokens. One with the same
/// tokenizer ends its proposal there as well.
#[test]
fn a_proposal_ends_where_no_token_is_allowed() {
    let config = config(&target_dir(), &[]);
    let decide = Propose { keeps_candidates: false };
    let native = worker::serve::load(&config.worker, Role::Draft, decide, None).expect("the draft loads");
    check_ends_of_proposals(native.executor);
    check_ends_of_proposals(executor());
}

fn check_ends_of_proposals(executor: impl StepExecutor) {
    let mut sequence = Sequence::new(executor);
    let ids = prompt_ids();
    let prompt_len = ids.len() as u32;
    for (allowed, bad_words, expected) in [
        (1_000_000, vec![], vec![]),
        (300, vec![vec![300]], vec![]),
        (300, vec![vec![300, 300, 300]], vec![300, 300]),
        (300, vec![], vec![300; 4]),
    ] {
        sequence.begin_anew();
        let sampling =
            SamplingParams { allowed_token_ids: vec![allowed], bad_words, ..SamplingParams::default() };
        let spec = SequenceSpec { prompt_len, max_len: 200, sampling, ..SequenceSpec::default() };
        let work = Work::Propose { num_draft_tokens: 4, num_tree_tokens: 0 };
        let (body, _) = sequence.run(&step((1, &Arc::new(spec)), (&ids, 0, ids.len()), work));
        let num_kept = (expected.len() as u32).saturating_sub(1);
        let proposal = Proposal { start: prompt_len, draft: Draft::chain(expected) };
        assert_eq!(body, ReplyBody::Proposal(proposal), "{allowed}");
        assert_eq!(sequence.cached.len(), prompt_len + num_kept, "{allowed}");
    }
}

/// A step with the context `ids[base..end]`.
fn step(
    (step_seq, spec): (u64, &Arc<SequenceSpec>),
    (ids, base, end): (&[TokenId], usize, usize),
    work: Work,
) -> Step {
    Step {
        sequence_id: SequenceId(1),
        epoch: 1,
        step_seq,
        spec: (step_seq == 1).then(|| Arc::clone(spec)),
        base_len: base as u32,
        prefix_hash: Prefix::new(&ids[..base]).hash_at(base as u32).expect("the sequence has base ids"),
        append_ids: ids[base..end].to_vec(),
        work,
    }
}

/// A text that is fed in two parts is tokenized like the whole text, and the changed end of the first part is
/// recomputed: the proposal equals, bit for bit, that of a sequence fed at once.
#[test]
fn what_is_tokenized_again_is_computed_again() {
    const TEXT: &str = "The committee has considered the recommendation of the international organisation carefully, and its members \
        were surprised by the interesting arguments. Nevertheless everybody understood that the government would probably reconsider.";
    let tokenizer = shorter_tokens();
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("target.json");
    std::fs::write(&file, &tokenizer).expect("a file can be written");
    let decide = Propose { keeps_candidates: false };
    let loaded = draft_worker::translated::load(&config(&file, &[]).worker, &file, decide).expect("it loads");
    let mut sequence = Sequence::new(loaded.executor);
    let ids = ids(&tokenizer, TEXT);
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let spec = |isolation_key| {
        let sampling = sampling.clone();
        let max_len = 200;
        Arc::new(SequenceSpec {
            seed: 3,
            prompt_len: 1,
            max_len,
            sampling,
            isolation_key,
            ..SequenceSpec::default()
        })
    };
    let mut num_computed_again = 0;
    for cut in 4..ids.len() - 12 {
        let propose = Work::Propose { num_draft_tokens: 4, num_tree_tokens: 0 };
        // Different isolation keys, so that neither run reuses the other's KV.
        let [whole, parts] = [0, 1].map(|part| spec(2 * cut as u64 + part));
        let mut run = |steps: &[Step]| {
            sequence.begin_anew();
            let rows = sequence.executor.stats().rows;
            let answers: Vec<ReplyBody> = steps.iter().map(|step| sequence.run(step).0).collect();
            (answers, sequence.executor.stats().rows - rows)
        };
        let end = cut + 12;
        let (whole, rows_of_whole) = run(&[step((1, &whole), (&ids, 0, end), propose.clone())]);
        let first = step((1, &parts), (&ids, 0, cut), Work::Feed);
        let (parts, rows_of_parts) = run(&[first, step((2, &parts), (&ids, cut, end), propose)]);
        assert_eq!(parts[1], whole[0], "cut at {cut}");
        num_computed_again += rows_of_parts - rows_of_whole;
    }
    assert!(num_computed_again > 5, "only {num_computed_again} rows were computed again: this shows little");
}

/// The draft's window counts draft tokens. If a target token takes many of them, the draft's window ends
/// before the target's. From there on proposals are empty, and the sequence continues.
#[test]
fn past_the_drafts_window_proposals_are_empty() {
    const LONG: &str = "considering the international organisation";
    let bundled = std::fs::read(target_dir().join("tokenizer.json")).expect("it is bundled");
    let mut json: Value = serde_json::from_slice(&bundled).expect("it is JSON");
    json["added_tokens"].as_array_mut().expect("it has some").push(serde_json::json!({
        "id": 4_096, "content": LONG, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false
    }));
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("target.json");
    std::fs::write(&file, json.to_string()).expect("a file can be written");
    let (window, decide) = (["--max-model-len", "64"], Propose { keeps_candidates: false });
    let loaded = draft_worker::translated::load(&config(&file, &window).worker, &file, decide);
    let loaded = loaded.expect("it loads");
    assert_eq!(loaded.facts.vocab_size, 4_097);
    let mut sequence = Sequence::new(loaded.executor);
    let ids: Vec<TokenId> = [300, 4_096].into_iter().cycle().take(40).collect();
    let spec = Arc::new(SequenceSpec { prompt_len: 1, max_len: 64, ..SequenceSpec::default() });
    let mut len_of = |ids: &[TokenId], step_seq, (base, end): (usize, usize), work| match sequence
        .run(&step((step_seq, &spec), (ids, base, end), work))
        .0
    {
        ReplyBody::Proposal(proposal) => {
            assert_eq!(proposal.start as usize, end);
            Some(proposal.draft.token_ids.len())
        }
        ReplyBody::Fed { cached_len, .. } => {
            assert_eq!(cached_len as usize, end);
            None
        }
        other => panic!("{other:?}"),
    };
    let propose = Work::Propose { num_draft_tokens: 4, num_tree_tokens: 0 };
    assert_eq!(len_of(&ids, 1, (0, 6), propose.clone()), Some(4));
    assert_eq!(len_of(&ids, 2, (6, 30), Work::Feed), None);
    assert_eq!(len_of(&ids, 3, (30, 31), propose.clone()), Some(0));
    assert_eq!(len_of(&ids, 4, (31, 40), Work::Feed), None);
    // After a cut there is space again; a proposal ends at the end of the window.
    let shorter = [&ids[..6], &[300; 50]].concat();
    let propose_behind = |end: usize| len_of(&shorter, end as u64, (end - 1, end), propose.clone());
    let mut lens: Vec<Option<usize>> = (7..56).map(propose_behind).collect();
    lens.dedup();
    assert_eq!(lens, [4, 3, 2, 1, 0].map(Some));
}
