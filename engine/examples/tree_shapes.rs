//! Measures tokens per verification by the shape of the draft: a pair of models generates texts with chains
//! and with token trees, and every text is compared with the one that the target generates alone. The cost of
//! a proposal is the CPU time of its thread, which depends least on the load of other programs.
//!
//!     cargo run -p outrider-engine --example tree_shapes -- models/demo 3 64 chain:4:4,leaves:3:4,branches:4:4
//!
//! Arguments: a directory with `target`, `draft` and `prompts`; the number of prompts per task type (`3+7`:
//! seven after the first three); the maximum tokens of a text; KIND:POSITIONS:TOKENS of the drafts,
//! optionally with `:ROWS`, the maximum rows of one of the draft's forwards. Runs temperatures 0, 0.7 and 1.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use engine::{Engine, LoadOptions, SequenceRows, SlotId, TokenId, TreeRows, WeightFormat};
use speculation::acceptance::{RawRows, guess_candidates, verify};
use speculation::logits::TokenCounts;
use speculation::tree::{Candidates, MAX_CANDIDATES, TreeGrowth, with_leaves};
use speculation::{Draft, SamplingParams, SequenceSpec};

const TEMPERATURES: [f32; 3] = [0.0, 0.7, 1.0];

/// Divisor of margins in `speculation::tree` when the draft's surprise is one nat.
const DEVIATION_AT_ONE_NAT: f64 = 0.95;

/// How often the bundled target draws the draft's candidate of each rank if all earlier positions were
/// accepted, per temperature: over 11,698 positions of the texts of prompts 3+7.
const DRAWN_BY_RANK: [[f64; MAX_CANDIDATES]; 3] = [
    [0.653, 0.104, 0.052, 0.036, 0.021, 0.013, 0.011, 0.012],
    [0.618, 0.121, 0.056, 0.034, 0.023, 0.016, 0.013, 0.009],
    [0.553, 0.154, 0.070, 0.042, 0.026, 0.019, 0.016, 0.010],
];

/// Kind of draft.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Chain,
    /// A chain with leaves: the next best tokens at each position.
    Leaves,
    /// Several rows per forward, as a draft worker runs them.
    Branches,
    /// Like `Branches` but by ranks only: each step has the same tree, the best one on average.
    Static,
}

/// A draft's kind, positions and tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shape {
    kind: Kind,
    depth: usize,
    tokens: usize,
    /// Maximum rows per forward, if different from a draft worker's.
    rows: Option<usize>,
}

type Failure = Box<dyn Error>;

fn main() -> Result<ExitCode, Failure> {
    let args: Vec<String> = std::env::args().collect();
    let [_, dir, which_prompts, max_tokens, shapes] = &args[..] else {
        println!("usage: tree_shapes DIR PROMPTS TOKENS KIND:POSITIONS:TOKENS,..");
        return Ok(ExitCode::from(64));
    };
    let dir = Path::new(dir);
    let (mut pair, max_tokens) = (Pair::load(dir)?, max_tokens.parse::<u32>()?);
    let prompts = prompts(dir, which_prompts)?;
    let shapes = shapes.split(',').map(shape).collect::<Result<Vec<Shape>, Failure>>()?;
    println!(
        "| T | tokens | draft | tokens per verify step | drafted | draft's forwards | draft's rows | CPU ms of a proposal | exact |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut all_exact = true;
    for temperature in TEMPERATURES {
        let spec = |(i, prompt): (usize, &Vec<TokenId>)| SequenceSpec {
            seed: i as u64,
            prompt_len: prompt.len() as u32,
            sampling: SamplingParams { temperature, ..SamplingParams::default() },
            stop_token_ids: pair.target.info().eos_token_ids.clone(),
            max_len: prompt.len() as u32 + max_tokens,
            ..SequenceSpec::default()
        };
        let specs: Vec<SequenceSpec> = prompts.iter().enumerate().map(spec).collect();
        let mut undrafted = Vec::new();
        for (spec, prompt) in specs.iter().zip(&prompts) {
            undrafted.push(
                pair.write(spec, prompt, Shape { kind: Kind::Chain, depth: 0, tokens: 0, rows: None })?.0,
            );
        }
        for &shape in &shapes {
            let (mut counts, mut exact) = (Counts::default(), 0);
            for ((spec, prompt), undrafted) in specs.iter().zip(&prompts).zip(&undrafted) {
                let (ids, of_text) = pair.write(spec, prompt, shape)?;
                counts.add(&of_text);
                exact += usize::from(ids == *undrafted);
            }
            println!("| {temperature} {} {exact} of {} |", counts.row(shape), prompts.len());
            all_exact &= exact == prompts.len();
        }
    }
    Ok(if all_exact { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sums over the verifications of some texts.
#[derive(Debug, Default)]
struct Counts {
    steps: usize,
    written: usize,
    drafted: usize,
    forwards: usize,
    rows: usize,
    proposing: Duration,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.written += other.written;
        self.drafted += other.drafted;
        self.forwards += other.forwards;
        self.rows += other.rows;
        self.proposing += other.proposing;
    }

    fn row(&self, Shape { kind, depth, tokens, rows: limit }: Shape) -> String {
        let per_step = |n: usize| n as f64 / self.steps as f64;
        let kind = format!("{kind:?}").to_lowercase();
        let limit = limit.map(|limit| format!(", {limit} rows a forward")).unwrap_or_default();
        let (per_verification, drafted) = (per_step(self.written), per_step(self.drafted));
        let (forwards, rows) = (per_step(self.forwards), per_step(self.rows));
        let millis = self.proposing.as_secs_f64() * 1e3 / self.steps as f64;
        format!(
            "| {tokens} | {kind}, {depth} positions{limit} | {per_verification:.3} | {drafted:.2} | {forwards:.2} | {rows:.2} | {millis:.3} |"
        )
    }
}

fn shape(text: &str) -> Result<Shape, Failure> {
    let parts: Vec<&str> = text.split(':').collect();
    let (kind, depth, tokens, rows) = match parts[..] {
        [kind, depth, tokens] => (kind, depth, tokens, None),
        [kind, depth, tokens, rows] => (kind, depth, tokens, Some(rows.parse()?)),
        _ => {
            return Err(format!("`{text}` is not KIND:POSITIONS:TOKENS or KIND:POSITIONS:TOKENS:ROWS").into());
        }
    };
    let kind = match kind {
        "chain" => Kind::Chain,
        "leaves" => Kind::Leaves,
        "branches" => Kind::Branches,
        "static" => Kind::Static,
        _ => return Err(format!("unknown kind `{kind}`, expected chain, leaves, branches or static").into()),
    };
    Ok(Shape { kind, depth: depth.parse()?, tokens: tokens.parse()?, rows })
}

/// CPU time of this thread, as Linux reports it.
fn cpu_time() -> Result<Duration, Failure> {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanos = schedstat.split_whitespace().next().ok_or("the system does not report thread times")?;
    Ok(Duration::from_nanos(nanos.parse()?))
}

/// The first prompts of each task type, or those after them, in the format that the bundled pair was trained
/// on.
fn prompts(dir: &Path, which: &str) -> Result<Vec<Vec<TokenId>>, Failure> {
    let (skipped, per_type) = which.split_once('+').unwrap_or(("0", which));
    let (skipped, per_type): (usize, usize) = (skipped.parse()?, per_type.parse()?);
    let tokenizer =
        tokenizers::Tokenizer::from_file(dir.join("target/tokenizer.json")).map_err(|e| e.to_string())?;
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir.join("prompts"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let mut prompts = Vec::new();
    for file in files {
        for line in std::fs::read_to_string(file)?.lines().skip(skipped).take(per_type) {
            let line: serde_json::Value = serde_json::from_str(line)?;
            let prompt = line["prompt"].as_str().ok_or("a line without a prompt")?;
            let framed = format!("<|user|>\n{prompt}<|end|>\n<|assistant|>\n");
            prompts.push(tokenizer.encode(framed, false).map_err(|e| e.to_string())?.get_ids().to_vec());
        }
    }
    Ok(prompts)
}

struct Pair {
    target: Engine,
    draft: Engine,
}

/// State of the draft model for a text.
struct DraftState {
    slot: SlotId,
    /// Ids whose KV the draft has.
    cached_ids: Vec<TokenId>,
    counts: Counts,
}

impl Pair {
    fn load(dir: &Path) -> Result<Self, Failure> {
        let load = |role: &str| {
            Engine::load(&LoadOptions {
                model_dir: dir.join(role),
                weights: WeightFormat::AsStored,
                threads: 1,
                tensor_parallel: 1,
                kv_memory_bytes: 256 << 20,
                max_model_len: None,
            })
        };
        Ok(Self { target: load("target")?, draft: load("draft")? })
    }

    fn write(
        &mut self,
        spec: &SequenceSpec,
        prompt: &[TokenId],
        shape: Shape,
    ) -> Result<(Vec<TokenId>, Counts), Failure> {
        let target = self.target.open();
        let mut state =
            DraftState { slot: self.draft.open(), cached_ids: Vec::new(), counts: Counts::default() };
        let mut ids = prompt.to_vec();
        loop {
            let remaining = spec.max_len as usize - ids.len() - 1;
            let same = state.cached_ids.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            state.cached_ids.truncate(same.min(ids.len() - 1));
            self.draft.truncate(state.slot, state.cached_ids.len() as u32);
            let shape =
                Shape { depth: shape.depth.min(remaining), tokens: shape.tokens.min(remaining), ..shape };
            // Prefill is not part of a proposal.
            if state.cached_ids.is_empty() {
                self.prefill(&mut state, &ids[..ids.len() - 1])?;
            }
            let started_at = cpu_time()?;
            let drafted = match (shape.depth, shape.kind) {
                (0, _) => Draft::default(),
                (_, Kind::Chain | Kind::Leaves) => self.propose_chain(&mut state, spec, &ids, shape)?,
                (_, Kind::Branches | Kind::Static) => self.propose_tree(&mut state, spec, &ids, shape)?,
            };
            let counts = &mut state.counts;
            counts.proposing += cpu_time()?.saturating_sub(started_at);
            (counts.steps, counts.drafted) = (counts.steps + 1, counts.drafted + drafted.token_ids.len());
            if self.verify(target, spec, (&mut ids, &drafted))? {
                self.target.close(target);
                self.draft.close(state.slot);
                state.counts.written = ids.len() - prompt.len();
                return Ok((ids, state.counts));
            }
        }
    }

    /// Prefills the draft before its first proposal.
    fn prefill(&mut self, state: &mut DraftState, ids: &[TokenId]) -> Result<(), Failure> {
        if !ids.is_empty() {
            self.draft.forward(&[SequenceRows { slot: state.slot, token_ids: ids, num_logits: 0 }])?;
        }
        state.cached_ids = ids.to_vec();
        Ok(())
    }

    /// Proposes a chain, with leaves if `tokens` allows any.
    fn propose_chain(
        &mut self,
        state: &mut DraftState,
        spec: &SequenceSpec,
        ids: &[TokenId],
        Shape { depth, tokens, .. }: Shape,
    ) -> Result<Draft, Failure> {
        let counts = TokenCounts::default();
        let mut positions = Vec::new();
        let mut context = ids.to_vec();
        while positions.len() < depth {
            let token_ids = &context[state.cached_ids.len()..];
            let rows = [SequenceRows { slot: state.slot, token_ids, num_logits: 1 }];
            let mut logits = self.draft.forward(&rows)?;
            state.counts.forwards += 1;
            state.counts.rows += token_ids.len();
            state.cached_ids.clone_from(&context);
            let limit = MAX_CANDIDATES.min(1 + tokens.saturating_sub(depth));
            let at = (context.len() as u32, limit);
            let candidates = guess_candidates(spec, &counts, at, logits.rows_mut(0..1))?;
            let first = candidates.token_ids[0];
            context.push(first);
            positions.push(candidates);
            if spec.stop_token_ids.contains(&first) {
                break;
            }
        }
        Ok(with_leaves(&positions, tokens))
    }

    /// Proposes a tree with branches, as `draft-worker/src/propose.rs` does.
    fn propose_tree(
        &mut self,
        state: &mut DraftState,
        spec: &SequenceSpec,
        ids: &[TokenId],
        Shape { kind, depth, tokens, rows }: Shape,
    ) -> Result<Draft, Failure> {
        let (slot, start) = (state.slot, ids.len() as u32);
        let mut tree = TreeGrowth::new(depth, tokens);
        if let Some(rows) = rows {
            tree = tree.with_max_rows(rows);
        }
        let mut token_ids = ids[state.cached_ids.len()..].to_vec();
        loop {
            let paths = tree.next_paths();
            let rows = [SequenceRows { slot, token_ids: &token_ids, num_logits: paths.len() }];
            let parents = tree.row_parents();
            let of_tree = [TreeRows { sequence: 0, num_stored: tree.num_stored(), parents: &parents }];
            let trees = if parents.is_empty() { &[][..] } else { &of_tree };
            let mut logits = self.draft.forward_with_trees(&rows, &[], trees)?.logits;
            state.counts.forwards += 1;
            state.counts.rows += token_ids.len();
            let mut found = Vec::new();
            for (i, path) in paths.iter().enumerate() {
                let at = (start + path.len() as u32, MAX_CANDIDATES);
                let counts = TokenCounts::default();
                let candidates = guess_candidates(spec, &counts, at, logits.rows_mut(i..i + 1))?;
                found.push(if kind == Kind::Static { by_rank(candidates, spec) } else { candidates });
            }
            tree.add_candidates(&found, |id| spec.stop_token_ids.contains(&id));
            if tree.num_next() == 0 {
                break;
            }
            token_ids = tree.next_ids();
        }
        let draft = tree.draft();
        let first = draft.first_path();
        let kept = &first[..first.len() - 1];
        self.draft.keep_path(slot, start, (&tree.rows_on_path(kept), kept))?;
        state.cached_ids = [ids, kept].concat();
        Ok(draft)
    }

    /// Appends the tokens that the target draws. Returns whether the text is finished.
    fn verify(
        &mut self,
        slot: SlotId,
        spec: &SequenceSpec,
        (ids, draft): (&mut Vec<TokenId>, &Draft),
    ) -> Result<bool, Failure> {
        let start = ids.len() as u32;
        let held = self.target.len(slot) as usize;
        let token_ids = [&ids[held..], &draft.token_ids].concat();
        let batch = [SequenceRows { slot, token_ids: &token_ids, num_logits: 1 + draft.token_ids.len() }];
        let tree = TreeRows { sequence: 0, num_stored: 0, parents: &draft.parents };
        let trees = if draft.is_tree() { vec![tree] } else { Vec::new() };
        let mut logits = self.target.forward_with_trees(&batch, &[], &trees)?.logits;
        let (rows, vocab_size) = (0..logits.rows(), logits.vocab_size());
        let mut counts = TokenCounts::default();
        let verdict =
            verify(spec, &mut counts, start, draft, RawRows::new(logits.rows_mut(rows), vocab_size))?;
        let accepted = &verdict.token_ids[..verdict.num_accepted as usize];
        if draft.is_tree() {
            let path: Vec<usize> = draft.rows_on_path(accepted).into_iter().map(|row| row - 1).collect();
            self.target.keep_path(slot, start, (&path, accepted))?;
        } else {
            self.target.truncate(slot, start + verdict.num_accepted);
        }
        ids.extend(verdict.token_ids);
        Ok(verdict.finish.is_some())
    }
}

/// Replaces the margins so that the candidates' probabilities are the average of their ranks.
fn by_rank(candidates: Candidates, spec: &SequenceSpec) -> Candidates {
    let temperature = TEMPERATURES.iter().position(|&t| t == spec.sampling.temperature).unwrap_or(0);
    let rates = DRAWN_BY_RANK[temperature];
    let margin = |rate: f64| ((rates[0] / rate).cbrt() - 1.0) * DEVIATION_AT_ONE_NAT;
    let margins = rates.iter().take(candidates.token_ids.len()).map(|&rate| margin(rate)).collect();
    // With a surprise of 1, draws that are not candidates weigh 0.05 + 0.1: about their rate of 0.1 divided
    // by the first candidate's 0.6.
    Candidates { margins, surprise: 1.0, ..candidates }
}
