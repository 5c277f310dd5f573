//! Measures tokens per verification by the shape of the draft and by the rule that accepts it: a pair of
//! models, both in this process, generates texts with chains and with token trees. Counts depend on no
//! machine; the cost of a proposal is the CPU time of its thread.
//!
//!     cargo run -p tests --example tree_shapes -- models/demo 3 64 chain:4:4,block:4:4,branches:4:4
//!
//! Every text of a coupled draft (chain, point, leaves, static, branches) is compared with the one that the
//! target generates alone, and so is every text at temperature 0. Texts of `rejection` and `block` at other
//! temperatures are not compared: they depend on the draft, and only their distribution is the target's.
//! `--help` explains the arguments and the kinds. Runs temperatures 0, 0.7 and 1.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

mod by_rank;
mod counts;
mod pair;
mod prompts;
mod shape;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use clap::Parser;
use speculation::{SamplingParams, SequenceSpec, TokenId};

use crate::pair::Pair;
use crate::prompts::Selection;
use crate::shape::Shape;

const TEMPERATURES: [f32; 3] = [0.0, 0.7, 1.0];

/// Prints tokens per verify step by the shape of the draft and the rule that accepts it
#[derive(Debug, Parser)]
#[command(name = "tree_shapes")]
struct Args {
    /// Directory with `target`, `draft` and `prompts`
    dir: PathBuf,
    /// Prompts per task type; `3+7`: seven after the first three; `10x4`: ten, with four texts of each above
    /// temperature 0
    #[arg(value_parser = Selection::parse)]
    prompts: Selection,
    /// Maximum tokens of a text
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Drafts to measure: KIND:POSITIONS:TOKENS[:ROWS],.. with at most ROWS rows in a forward of the draft
    ///
    /// At equal TOKENS all kinds have equally many rows at the target. Kinds:
    ///
    ///   chain      tokens drawn by the draft with the target's noise (coupled)
    ///   leaves     such a chain with the next best tokens beside it
    ///   static     a tree that is the same at every step, shaped for the texts of this run
    ///   branches   the tree of a draft worker
    ///   point      a chain of the draft's most likely tokens, with leaves, verified like the kinds above
    ///   rejection  a chain drawn from the draft, token-wise rejection sampling (Leviathan et al.)
    ///   block      the same chain, block verification (Sun et al., arXiv 2403.10444)
    ///
    /// For rejection and block POSITIONS equals TOKENS. As in served sequences, the draft of rejection and
    /// block draws from its 64 most likely tokens.
    ///
    /// "Outcome in draft" is the share of steps whose tokens up to the first one beside the chain are in the
    /// draft. Drafting ahead of a chain with one position less would have hit there, with a branch for the
    /// whole chain and one for each leaf.
    #[arg(value_delimiter = ',', value_parser = Shape::parse, required = true, verbatim_doc_comment)]
    shapes: Vec<Shape>,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut pair = Pair::load(&args.dir)?;
    let prompts = args.prompts.read(&args.dir)?;
    println!("{}", counts::HEAD);
    let mut all_equal = true;
    for temperature in TEMPERATURES {
        // Greedy texts of one prompt are equal whatever their seeds.
        let num_texts = if temperature == 0.0 { 1 } else { args.prompts.texts };
        let spec = |seed: usize, prompt: &Vec<TokenId>| SequenceSpec {
            seed: seed as u64,
            prompt_len: prompt.len() as u32,
            sampling: SamplingParams { temperature, ..SamplingParams::default() },
            stop_token_ids: pair.stop_token_ids(),
            max_len: prompt.len() as u32 + args.max_tokens,
            ..SequenceSpec::default()
        };
        let requests: Vec<(SequenceSpec, &Vec<TokenId>)> = (0..num_texts)
            .flat_map(|_| &prompts)
            .enumerate()
            .map(|(seed, prompt)| (spec(seed, prompt), prompt))
            .collect();
        let mut undrafted = Vec::new();
        for (spec, prompt) in &requests {
            undrafted.push(pair.write(spec, prompt, Shape::NONE)?.0);
        }
        let texts_of_target = requests.iter().zip(&undrafted);
        pair.measure_ranks(texts_of_target.map(|((spec, _), ids)| (spec, ids.as_slice())))?;
        for &shape in &args.shapes {
            let (mut texts, mut equal) = (Vec::new(), 0);
            for ((spec, prompt), undrafted) in requests.iter().zip(&undrafted) {
                let (ids, counts) = pair.write(spec, prompt, shape)?;
                texts.push(counts);
                equal += usize::from(ids == *undrafted);
            }
            ensure!(
                texts.iter().any(|text| text.drafted > 0),
                "{} drafted nothing: raise MAX_TOKENS",
                shape.name()
            );
            let is_compared = temperature == 0.0 || shape.kind.keeps_text();
            let equal_texts = match is_compared {
                true => format!("{equal} of {}", texts.len()),
                false => "not compared".to_owned(),
            };
            println!("| {temperature} {} {equal_texts} |", counts::row(&texts, shape));
            all_equal &= !is_compared || equal == texts.len();
        }
    }
    Ok(if all_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
