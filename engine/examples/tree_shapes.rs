//! Tokens of each verification by the shape of its draft: a pair of models writes texts with chains and with trees of candidates, and
//! every text is compared with the one that the target writes alone. Times are not measured.
//!
//!     cargo run -p outrider-engine --example tree_shapes -- models/demo 3 64 4:4,3:4,8:8,4:8
//!
//! A directory with `target`, `draft` and `prompts`, prompts of each task type, tokens of a text at most, POSITIONS:TOKENS of the
//! drafts; as many of both are a chain. Every temperature is run: 0, 0.7 and 1.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use engine::{Engine, LoadOptions, SequenceRows, SlotId, TokenId, TreeRows, WeightFormat};
use speculation::acceptance::{guess_several, verify};
use speculation::logits::TokenCounts;
use speculation::tree::with_leaves;
use speculation::{Draft, SamplingParams, SequenceSpec};

const TEMPERATURES: [f32; 3] = [0.0, 0.7, 1.0];
/// As a draft worker's.
const MAX_CANDIDATES: usize = 8;

/// Positions and tokens of a draft.
type Shape = (usize, usize);
type Failure = Box<dyn Error>;

fn main() -> Result<ExitCode, Failure> {
    let args: Vec<String> = std::env::args().collect();
    let [_, dir, num_prompts, max_tokens, shapes] = &args[..] else {
        println!("usage: tree_shapes DIR PROMPTS TOKENS POSITIONS:TOKENS,..");
        return Ok(ExitCode::from(64));
    };
    let dir = Path::new(dir);
    let (mut pair, max_tokens) = (Pair::load(dir)?, max_tokens.parse::<u32>()?);
    let prompts = prompts(dir, num_prompts.parse()?)?;
    let shapes = shapes.split(',').map(shape).collect::<Result<Vec<Shape>, Failure>>()?;
    println!("| T | tokens | positions | tokens per verify step | drafted per verify step | exact |");
    println!("|---|---|---|---|---|---|");
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
        let mut alone = Vec::new();
        for (spec, prompt) in specs.iter().zip(&prompts) {
            alone.push(pair.write(spec, prompt, (0, 0))?.ids);
        }
        for &(depth, tokens) in &shapes {
            let (mut steps, mut drafted, mut written, mut exact) = (0, 0, 0, 0);
            for ((spec, prompt), alone) in specs.iter().zip(&prompts).zip(&alone) {
                let text = pair.write(spec, prompt, (depth, tokens))?;
                (steps, drafted) = (steps + text.steps, drafted + text.drafted);
                written += text.ids.len() - prompt.len();
                exact += usize::from(text.ids == *alone);
            }
            let (per_step, rows) = (written as f64 / steps as f64, drafted as f64 / steps as f64);
            let chain = if depth == tokens { " (chain)" } else { "" };
            let texts = prompts.len();
            println!(
                "| {temperature} | {tokens} | {depth}{chain} | {per_step:.3} | {rows:.2} | {exact} of {texts} |"
            );
            all_exact &= exact == texts;
        }
    }
    Ok(if all_exact { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn shape(text: &str) -> Result<Shape, Failure> {
    let (depth, tokens) = text.split_once(':').ok_or_else(|| format!("`{text}` is not POSITIONS:TOKENS"))?;
    Ok((depth.parse()?, tokens.parse()?))
}

/// The first prompts of each task type, framed as the bundled pair was trained.
fn prompts(dir: &Path, of_each: usize) -> Result<Vec<Vec<TokenId>>, Failure> {
    let tokenizer =
        tokenizers::Tokenizer::from_file(dir.join("target/tokenizer.json")).map_err(|e| e.to_string())?;
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir.join("prompts"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let mut prompts = Vec::new();
    for file in files {
        for line in std::fs::read_to_string(file)?.lines().take(of_each) {
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

struct Text {
    ids: Vec<TokenId>,
    steps: usize,
    drafted: usize,
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

    fn write(&mut self, spec: &SequenceSpec, prompt: &[TokenId], shape: Shape) -> Result<Text, Failure> {
        let (target, draft) = (self.target.open(), self.draft.open());
        let mut text = Text { ids: prompt.to_vec(), steps: 0, drafted: 0 };
        // Ids that the draft ran.
        let mut ran: Vec<TokenId> = Vec::new();
        loop {
            let room = spec.max_len as usize - text.ids.len() - 1;
            let same = ran.iter().zip(&text.ids).take_while(|(a, b)| a == b).count();
            ran.truncate(same.min(text.ids.len() - 1));
            self.draft.truncate(draft, ran.len() as u32);
            let drafted = match shape.0.min(room) {
                0 => Draft::default(),
                depth => self.propose((draft, &mut ran), spec, &text.ids, (depth, shape.1.min(room)))?,
            };
            (text.steps, text.drafted) = (text.steps + 1, text.drafted + drafted.token_ids.len());
            if self.verify(target, spec, (&mut text.ids, &drafted))? {
                self.target.close(target);
                self.draft.close(draft);
                return Ok(text);
            }
        }
    }

    fn propose(
        &mut self,
        (slot, ran): (SlotId, &mut Vec<TokenId>),
        spec: &SequenceSpec,
        ids: &[TokenId],
        (depth, tokens): Shape,
    ) -> Result<Draft, Failure> {
        let counts = TokenCounts::default();
        let mut positions = Vec::new();
        let mut context = ids.to_vec();
        while positions.len() < depth {
            let rows = [SequenceRows { slot, token_ids: &context[ran.len()..], num_logits: 1 }];
            let mut logits = self.draft.forward(&rows)?;
            ran.clone_from(&context);
            let most = MAX_CANDIDATES.min(1 + tokens.saturating_sub(depth));
            let at = (context.len() as u32, most);
            let candidates = guess_several(spec, &counts, at, logits.rows_mut(0..1))?;
            let first = candidates.token_ids[0];
            context.push(first);
            positions.push(candidates);
            if spec.stop_token_ids.contains(&first) {
                break;
            }
        }
        Ok(with_leaves(&positions, tokens))
    }

    /// Appends what the target draws; whether the text is over.
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
        let verdict = verify(spec, &mut counts, start, draft, logits.rows_mut(rows), vocab_size)?;
        let accepted = &verdict.token_ids[..verdict.num_accepted as usize];
        if draft.is_tree() {
            let path: Vec<usize> = draft.rows_along(accepted).into_iter().map(|row| row - 1).collect();
            self.target.keep_path(slot, start, (&path, accepted))?;
        } else {
            self.target.truncate(slot, start + verdict.num_accepted);
        }
        ids.extend(verdict.token_ids);
        Ok(verdict.finish.is_some())
    }
}
