//! How many passes of served traffic are replayed as graphs, with padded passes and without, and what padding
//! costs: Llama 3 8B on a device that runs nothing.

use super::recorder::{CallLog, Calls, Recorder};
use super::{KV_BYTES, MAX_LEN, product_bytes};
use crate::cuda::gpu_check::decode::{LLAMA_8B, write_config};
use crate::cuda::graphs::{LaunchAction, LaunchRecorder};
use crate::cuda::ranks::{Ranks, load_on};
use crate::cuda::whole_model::options;
use crate::{DrawRequest, Engine, LoadOptions, SequenceRows, SlotId, TokenId, WeightFormat};

const STEPS: usize = 600;
/// Maximum number of sequences, of drafted tokens of one, of prompt rows of a step, and of tokens before them.
const SEQUENCES: usize = 24;
const DRAFTED: u64 = 6;
const PROMPT_ROWS: u64 = 200;
const CONTEXT: u64 = 2048;

/// A served sequence.
struct Sequence {
    slot: SlotId,
    /// Rows of the next step, of which the last `drawn` are drawn.
    rows: usize,
    drawn: usize,
    /// Tokens until it ends.
    left: u64,
}

/// Passes that were replayed whole, and what they asked for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Replays {
    steps: usize,
    whole: usize,
    /// The same of the second half of the steps: memory has grown by then, and lists are known.
    late_steps: usize,
    late_whole: usize,
    launches: usize,
    replayed_launches: usize,
    /// Lists of launches that occurred for the first time.
    new_lists: usize,
    /// Blocks of all launches, and of them those of attention; bytes that those of products read.
    blocks: u64,
    attention_blocks: u64,
    product_bytes: u64,
}

/// Sequences that begin with a prompt, grow by what is accepted, and end: always the same ones.
struct Mix {
    engine: Engine,
    log: CallLog,
    graphs: LaunchRecorder<()>,
    sequences: Vec<Sequence>,
    random: u64,
}

impl Mix {
    fn new(pads_passes: bool) -> Self {
        let mut config: serde_json::Value = serde_json::from_str(LLAMA_8B).unwrap();
        config["max_position_embeddings"] = MAX_LEN.into();
        let file = write_config(&config.to_string(), &format!("replays-{pads_passes}")).unwrap();
        let options = LoadOptions { kv_memory_bytes: KV_BYTES, ..options(file.clone(), WeightFormat::Bf16) };
        let log = CallLog::default();
        let recorder = Recorder::new(log.clone(), pads_passes);
        let engine = Engine::random_by(&options, 1, |source, model| {
            load_on(Ranks::alone(recorder), &options, source, model)
        });
        std::fs::remove_file(file).unwrap();
        let (engine, graphs, sequences) = (engine.unwrap(), LaunchRecorder::default(), Vec::new());
        Self { engine, log, graphs, sequences, random: 1 }
    }

    /// A number below `end`.
    fn random(&mut self, end: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    /// A sequence may join with the last rows of its prompt; the others draft one token more or less, or as
    /// many as before.
    fn plan(&mut self) {
        for i in 0..self.sequences.len() {
            let change = self.random(6);
            let Sequence { rows, drawn, .. } = &mut self.sequences[i];
            *drawn = match change {
                0 => (*drawn - 1).max(1),
                1 => (*drawn + 1).min(DRAFTED as usize + 1),
                _ => *drawn,
            };
            *rows = *drawn;
        }
        if self.sequences.len() < SEQUENCES && self.random(4) == 0 {
            let context = self.random(CONTEXT) as u32;
            let slot = self.engine.open_unwritten(context).unwrap();
            let (rows, left) = (1 + self.random(PROMPT_ROWS) as usize, 20 + self.random(200));
            self.sequences.push(Sequence { slot, rows, drawn: 1, left });
        }
    }

    /// Runs a step. Returns whether it has rows of a prompt.
    fn step(&mut self) -> bool {
        self.plan();
        let has_prompt = self.sequences.iter().any(|sequence| sequence.rows > sequence.drawn);
        let ids: Vec<TokenId> = vec![7; MAX_LEN as usize];
        let spec = speculation::SequenceSpec { max_len: u32::MAX, ..Default::default() };
        let vocab_size = self.engine.info().vocab_size;
        let rows = |sequence: &Sequence| {
            let Sequence { slot, rows, drawn, .. } = *sequence;
            SequenceRows { slot, token_ids: &ids[..rows], num_logits: drawn }
        };
        let request = |sequence: &Sequence| {
            let Sequence { slot, rows, drawn, .. } = *sequence;
            let prefix = &ids[..self.engine.len(slot) as usize + rows - drawn + 1];
            let (suffix, logprobs, prompt, candidate_rows) = (&ids[..drawn - 1], None, None, 0);
            Some(DrawRequest { spec: &spec, prefix, suffix, vocab_size, logprobs, prompt, candidate_rows })
        };
        let batch: Vec<SequenceRows<'_>> = self.sequences.iter().map(rows).collect();
        let requests: Vec<_> = self.sequences.iter().map(request).collect();
        self.engine.forward_and_draw(&batch, &requests).unwrap();
        self.accept();
        has_prompt
    }

    /// Keeps some of the drafted tokens, and closes sequences that end.
    fn accept(&mut self) {
        for i in 0..self.sequences.len() {
            let Sequence { slot, drawn, .. } = self.sequences[i];
            let rejected = self.random(drawn as u64);
            self.engine.truncate(slot, self.engine.len(slot) - rejected as u32);
            let left = &mut self.sequences[i].left;
            *left = left.saturating_sub(drawn as u64 - rejected);
        }
        for ended in self.sequences.extract_if(.., |sequence| sequence.left == 0) {
            self.engine.close(ended.slot);
        }
    }

    /// Adds the launches since the last call to `replays`.
    fn count(&mut self, replays: &mut Replays, is_late: bool) {
        let calls = self.log.take();
        let mut is_whole = true;
        let mut first = 0;
        for &end in calls.cuts.iter().chain([&calls.launches.len()]) {
            let list = &calls.launches[std::mem::replace(&mut first, end)..end];
            list.iter().for_each(|launch| self.graphs.push(launch.clone()));
            match self.graphs.next() {
                LaunchAction::Empty => continue,
                LaunchAction::LaunchEach(_) => replays.new_lists += 1,
                LaunchAction::Capture(launches) => self.graphs.insert_graph(&launches, ()),
                LaunchAction::Replay(_) => {
                    replays.replayed_launches += list.len();
                    continue;
                }
            }
            is_whole = false;
        }
        replays.add(&calls, (is_whole, is_late));
    }
}

impl Replays {
    fn add(&mut self, calls: &Calls, (is_whole, is_late): (bool, bool)) {
        self.steps += 1;
        self.whole += usize::from(is_whole);
        self.late_steps += usize::from(is_late);
        self.late_whole += usize::from(is_whole && is_late);
        self.launches += calls.launches.len();
        for launch in &calls.launches {
            let blocks = launch.grid.iter().map(|&size| u64::from(size)).product::<u64>();
            let is_attention =
                launch.kernel.starts_with("attention") && !launch.kernel.starts_with("attention_merge");
            self.blocks += blocks;
            self.attention_blocks += if is_attention { blocks } else { 0 };
        }
        self.product_bytes += product_bytes(calls);
    }
}

/// Steps without and with rows of a prompt.
fn replays_of_mix(pads_passes: bool) -> [Replays; 2] {
    let mut mix = Mix::new(pads_passes);
    mix.log.take();
    let mut found = [Replays::default(); 2];
    for step in 0..STEPS {
        let has_prompt = mix.step();
        mix.count(&mut found[usize::from(has_prompt)], step >= STEPS / 2);
    }
    found
}

#[test]
fn a_served_mix_is_mostly_replayed() {
    let [plain, padded] = [false, true].map(replays_of_mix);
    println!("without padding {plain:#?}\nwith padding {padded:#?}");
    let [decode, prompts] = padded;
    assert_eq!(decode.steps, plain[0].steps);
    let alike = |counts: Replays| Replays { replayed_launches: 0, new_lists: 0, ..counts };
    assert_eq!(alike(prompts), alike(plain[1]), "passes with rows of prompts are not padded");
    assert_eq!(decode.product_bytes, plain[0].product_bytes, "padding adds no tiles");
    assert!(decode.whole * 10 >= decode.steps * 7, "{decode:?}");
    assert!(decode.late_whole * 10 >= decode.late_steps * 8, "{decode:?}");
}
