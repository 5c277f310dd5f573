//! [`Grammars`]: grammar masks, computed beside the device thread while it runs forwards.
//!
//! One thread compiles grammars ([`compile`]) and another computes masks, so neither blocks a forward or the
//! other. A step waits for its grammar before its first forward. The masks for a forward's rows are requested
//! before the forward and collected after it. A mask depends only on the grammar and the output ids
//! ([`grammar::Matcher`]), so nothing here is state of the sequence.

mod compile;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use grammar::{GrammarError, Matcher, STACK_BYTES};
use speculation::logits::{DrawError, TokenMask};
use speculation::{SequenceSpec, TokenId};

use self::compile::{CompileThread, Compiled};
use crate::Task;
use crate::task::{PrefixLookup, Slot};

/// Maximum time that the device thread waits for a grammar before it looks for messages again.
const WAIT_MAX: Duration = Duration::from_millis(5);

/// Cost of masks since start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GrammarStats {
    /// Rows that masks were computed for.
    pub rows: u64,
    /// Time spent computing masks, in microseconds.
    pub mask_us: u64,
    /// Time that finished forwards waited for masks, in microseconds.
    pub wait_us: u64,
}

/// Grammars of a device's sequences. Owned by the device thread; its threads end when it is dropped.
#[derive(Debug)]
pub struct Grammars {
    compiles: CompileThread,
    masks: Sender<MaskJob>,
    sequences: HashMap<Slot, SequenceGrammar>,
    stats: GrammarStats,
}

/// The grammar of one sequence.
#[derive(Debug)]
struct SequenceGrammar {
    document: Arc<String>,
    state: GrammarState,
}

#[derive(Debug)]
enum GrammarState {
    Compiling(Receiver<Compiled>),
    Ready(Box<Matcher>),
    Masking(Receiver<MaskResult>),
    Failed(String),
}

/// A request for the masks after `output` and after each id of `drafted`.
struct MaskJob {
    matcher: Matcher,
    spec: Arc<SequenceSpec>,
    output: Vec<TokenId>,
    drafted: Vec<TokenId>,
    reply: Sender<MaskResult>,
}

#[derive(Debug)]
struct MaskResult {
    matcher: Matcher,
    masks: Result<Vec<TokenMask>, GrammarError>,
    took: Duration,
}

impl Grammars {
    /// Starts the threads for a tokenizer.json, which is parsed when the first grammar arrives.
    pub fn start(tokenizer_json: Bytes) -> io::Result<Self> {
        Self::with_compiles(CompileThread::start(compile::for_tokenizer(tokenizer_json))?)
    }

    fn with_compiles(compiles: CompileThread) -> io::Result<Self> {
        let (masks, mask_jobs) = channel();
        thread::Builder::new()
            .name("grammar-mask".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || mask_all(&mask_jobs))?;
        Ok(Self { compiles, masks, sequences: HashMap::new(), stats: GrammarStats::default() })
    }

    /// Cost of masks since start.
    pub fn stats(&self) -> GrammarStats {
        self.stats
    }

    /// Whether the step can run: it has no grammar, or its grammar is compiled or failed to compile, as one
    /// that takes too long does. Starts compiling a new grammar.
    pub fn is_ready(&mut self, task: &Task) -> bool {
        let Some(document) = &task.spec().grammar else { return true };
        if self.sequences.get(&task.slot).is_none_or(|sequence| *sequence.document != *document) {
            let document = Arc::new(document.clone());
            let state = GrammarState::Compiling(self.compiles.compile(&document));
            self.sequences.insert(task.slot, SequenceGrammar { document, state });
        }
        let sequence = self.sequences.get_mut(&task.slot).expect("it was put there above");
        if let GrammarState::Compiling(compiling) = &sequence.state {
            match compiling.try_recv() {
                Ok(compiled) => sequence.state = GrammarState::of(compiled),
                Err(TryRecvError::Disconnected) => sequence.state = GrammarState::lost(),
                Err(TryRecvError::Empty) => return false,
            }
        }
        true
    }

    /// Waits up to [`WAIT_MAX`] for the first grammar that one of `tasks` is still compiling. Returns false
    /// at once if there is none, or if one of `tasks` could run but for its KV: freeing KV must not wait.
    pub fn wait(&mut self, tasks: &VecDeque<Task>) -> bool {
        let is_compiling = |task: &Task| {
            let sequence = self.sequences.get(&task.slot);
            sequence.is_some_and(|sequence| matches!(sequence.state, GrammarState::Compiling(_)))
        };
        if tasks.iter().any(|task| task.prefix == PrefixLookup::Done && !is_compiling(task)) {
            return false;
        }
        for task in tasks {
            let Some(sequence) = self.sequences.get_mut(&task.slot) else { continue };
            if let GrammarState::Compiling(compiling) = &sequence.state {
                match compiling.recv_timeout(WAIT_MAX) {
                    Ok(compiled) => sequence.state = GrammarState::of(compiled),
                    Err(RecvTimeoutError::Disconnected) => sequence.state = GrammarState::lost(),
                    Err(RecvTimeoutError::Timeout) => {}
                }
                return true;
            }
        }
        false
    }

    /// Starts computing the masks of a step's rows: after the output so far including `guess`, and after each
    /// drafted id.
    pub fn request_masks(&mut self, task: &Task, guess: Option<TokenId>) {
        let Some(sequence) = self.sequences.get_mut(&task.slot) else { return };
        let Some(spec) = task.cached.spec().filter(|spec| spec.grammar.is_some()) else { return };
        let state = std::mem::replace(&mut sequence.state, GrammarState::lost());
        let matcher = match state {
            GrammarState::Ready(matcher) => *matcher,
            // Left over from a forward that failed.
            GrammarState::Masking(reply) => match reply.recv() {
                Ok(masked) => masked.matcher,
                Err(_) => return,
            },
            other => return sequence.state = other,
        };
        let ids = task.cached.ids();
        let mut output = ids.get(spec.prompt_len as usize..).unwrap_or_default().to_vec();
        output.extend(guess);
        let (reply, masked) = channel();
        let (spec, drafted) = (Arc::clone(spec), task.drafted().to_vec());
        let job = MaskJob { matcher, spec, output, drafted, reply };
        sequence.state =
            if self.masks.send(job).is_ok() { GrammarState::Masking(masked) } else { GrammarState::lost() };
    }

    /// Returns the masks requested by [`Self::request_masks`]; empty if the sequence has no grammar.
    pub fn take_masks(&mut self, task: &Task) -> Result<Vec<TokenMask>, DrawError> {
        if task.spec().grammar.is_none() {
            return Ok(Vec::new());
        }
        let no_mask = |reason| DrawError::NoMask { position: task.step.start(), reason };
        let Some(sequence) = self.sequences.get_mut(&task.slot) else {
            return Err(no_mask("the sequence's grammar is unknown".to_owned()));
        };
        let began = Instant::now();
        match std::mem::replace(&mut sequence.state, GrammarState::lost()) {
            GrammarState::Masking(reply) => {
                let Ok(MaskResult { matcher, masks, took }) = reply.recv() else {
                    return Err(no_mask(THREAD_FAILED.to_owned()));
                };
                sequence.state = GrammarState::Ready(Box::new(matcher));
                self.stats.wait_us += began.elapsed().as_micros() as u64;
                self.stats.mask_us += took.as_micros() as u64;
                self.stats.rows += masks.as_ref().map_or(0, Vec::len) as u64;
                masks.map_err(|error| no_mask(error.to_string()))
            }
            GrammarState::Failed(reason) => {
                sequence.state = GrammarState::Failed(reason.clone());
                Err(no_mask(reason))
            }
            other => {
                sequence.state = other;
                Err(no_mask("no mask was requested".to_owned()))
            }
        }
    }

    /// Drops the state of a sequence.
    pub fn close(&mut self, slot: Slot) {
        self.sequences.remove(&slot);
    }

    /// Without threads: nothing is ever compiled. For tests.
    #[cfg(test)]
    pub(crate) fn that_never_compile() -> (Self, impl Sized) {
        let (compiles, compile_jobs) = CompileThread::that_never_compiles();
        let (masks, mask_jobs) = channel();
        let (sequences, stats) = (HashMap::new(), GrammarStats::default());
        (Self { compiles, masks, sequences, stats }, (compile_jobs, mask_jobs))
    }
}

const THREAD_FAILED: &str = "the grammar thread panicked on this grammar";

impl GrammarState {
    fn of(compiled: Compiled) -> Self {
        match compiled {
            Ok(matcher) => Self::Ready(Box::new(matcher)),
            Err(error) => Self::Failed(error.to_string()),
        }
    }

    fn lost() -> Self {
        Self::Failed(THREAD_FAILED.to_owned())
    }
}

/// Thread that computes masks.
fn mask_all(jobs: &Receiver<MaskJob>) {
    while let Ok(MaskJob { mut matcher, spec, output, drafted, reply }) = jobs.recv() {
        let masked = catch_unwind(AssertUnwindSafe(|| {
            let began = Instant::now();
            let masks = matcher.masks(&output, &drafted, &spec.stop_token_ids);
            MaskResult { matcher, masks, took: began.elapsed() }
        }));
        if let Ok(masked) = masked {
            drop(reply.send(masked));
        }
    }
}

#[cfg(test)]
mod tests {
    use grammar::{Grammar, GrammarKind};
    use speculation::cached_sequence::{Admission, CachedSequence, WorkerLimits};
    use speculation::{Draft, Refusal, RefusalCause, Role, SequenceId, Step, Work};

    use super::*;
    use crate::table::{RouterId, SequenceKey};

    fn tokenizer_json() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/target/tokenizer.json");
        std::fs::read_to_string(path).unwrap()
    }

    /// The compile thread's answer to a grammar that no router checked.
    fn compiled(grammars: &Grammars, grammar: &Grammar) -> Result<Matcher, String> {
        let document = Arc::new(grammar.to_wire());
        let compiling = grammars.compiles.compile(&document);
        compiling.recv().expect("the thread did not panic").map_err(|error| error.to_string())
    }

    /// A step of a sequence with this grammar.
    fn task(slot: u64, grammar: &Grammar) -> Task {
        let spec = SequenceSpec { grammar: Some(grammar.to_wire()), ..SequenceSpec::default() };
        let step = Step {
            sequence_id: SequenceId(slot),
            epoch: 1,
            step_seq: 1,
            spec: Some(Arc::new(spec)),
            base_len: 0,
            prefix_hash: 0,
            append_ids: vec![1],
            work: Work::Verify { draft: Draft::default() },
        };
        let limits = WorkerLimits {
            role: Role::Target,
            vocab_size: 10,
            max_model_len: 10,
            max_tree_tokens: 0,
            grammars: true,
        };
        let mut cached = CachedSequence::default();
        assert_eq!(cached.admit(&step, &limits), Admission::Run);
        let key = SequenceKey { router: RouterId(1), sequence: step.sequence_id };
        Task::new(key, Slot(slot), step, cached, Instant::now())
    }

    #[test]
    fn a_step_whose_grammar_takes_too_long_is_refused_because_of_it() {
        let compiles = CompileThread::start(|_: &Grammar| Err(GrammarError::TakesTooLong));
        let mut grammars = Grammars::with_compiles(compiles.unwrap()).unwrap();
        let task = task(1, &Grammar::choice(&["a"]));
        while !grammars.is_ready(&task) {
            thread::yield_now();
        }
        grammars.request_masks(&task, None);
        let refusal = Refusal::from(grammars.take_masks(&task).unwrap_err());
        assert_eq!(refusal.cause, RefusalCause::Grammar);
        assert!(refusal.reason.contains(" s to compile"), "{}", refusal.reason);
    }

    #[test]
    fn a_grammar_that_nests_too_deeply_fails_and_the_next_one_compiles() {
        let grammars = Grammars::start(tokenizer_json().into()).unwrap();
        let rules: String = (0..5_000).map(|i| format!("r{i}: r{0} r{0} | \"a\"\n", i + 1)).collect();
        let text = format!("start: r0\n{rules}r5000: \"b\"");
        let deep = Grammar { kind: GrammarKind::Lark, text };
        let refused = compiled(&grammars, &deep).unwrap_err();
        assert!(refused.contains("levels deep"), "{refused}");
        let mut matcher = compiled(&grammars, &Grammar::choice(&["a"])).unwrap();
        assert_eq!(matcher.masks(&[], &[], &[0]).map(|masks| masks.len()), Ok(1));
    }
}
