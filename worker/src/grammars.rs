//! [`Grammars`]: grammar masks, computed beside the device thread while it runs forwards.
//!
//! One thread compiles grammars and another computes masks, so neither blocks a forward or the other. A step
//! waits for its grammar before its first forward. The masks for a forward's rows are requested before the
//! forward and collected after it. A mask depends only on the grammar and the output ids
//! ([`grammar::Matcher`]), so nothing here is state of the sequence.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use grammar::{Compiler, Grammar, GrammarError, Matcher, STACK_BYTES, Vocabulary};
use speculation::logits::{DrawError, TokenMask};
use speculation::{SequenceSpec, TokenId};

use crate::Task;
use crate::task::{PrefixLookup, Slot};

/// Maximum compiled grammars in the cache. Clients send few distinct grammars many times.
const COMPILED_MAX: usize = 64;

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
    compiles: Sender<CompileJob>,
    masks: Sender<MaskJob>,
    sequences: HashMap<Slot, SequenceGrammar>,
    stats: GrammarStats,
}

/// The grammar of one sequence.
#[derive(Debug)]
struct SequenceGrammar {
    document: String,
    state: GrammarState,
}

#[derive(Debug)]
enum GrammarState {
    Compiling(CompilingGrammar),
    Ready(Box<Matcher>),
    Masking(Receiver<MaskResult>),
    Failed(String),
}

#[derive(Debug)]
struct CompilingGrammar {
    reply: Receiver<Result<Matcher, GrammarError>>,
    /// See [`CompileJob::sequence`].
    _sequence: Arc<()>,
}

struct CompileJob {
    document: String,
    /// Gone once the sequence is closed.
    sequence: Weak<()>,
    reply: Sender<Result<Matcher, GrammarError>>,
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
    pub fn start(tokenizer_json: String) -> io::Result<Self> {
        let (compiles, compile_jobs) = channel();
        let (masks, mask_jobs) = channel();
        thread::Builder::new()
            .name("grammar-compile".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || compile_all(&tokenizer_json, &compile_jobs))?;
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

    /// Whether the step can run: it has no grammar, or its grammar is compiled or failed to compile. Starts
    /// compiling a new grammar.
    pub fn is_ready(&mut self, task: &Task) -> bool {
        let Some(document) = &task.spec().grammar else { return true };
        if self.sequences.get(&task.slot).is_none_or(|sequence| sequence.document != *document) {
            let state = self.compile(document.clone());
            self.sequences.insert(task.slot, SequenceGrammar { document: document.clone(), state });
        }
        let sequence = self.sequences.get_mut(&task.slot).expect("it was put there above");
        if let GrammarState::Compiling(compiling) = &sequence.state {
            match compiling.reply.try_recv() {
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
                match compiling.reply.recv_timeout(WAIT_MAX) {
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
        let ((compiles, jobs), (masks, mask_jobs)) = (channel(), channel());
        let (sequences, stats) = (HashMap::new(), GrammarStats::default());
        (Self { compiles, masks, sequences, stats }, (jobs, mask_jobs))
    }

    fn compile(&self, document: String) -> GrammarState {
        let (send, reply) = channel();
        let sequence = Arc::new(());
        let job = CompileJob { document, sequence: Arc::downgrade(&sequence), reply: send };
        match self.compiles.send(job) {
            Ok(()) => GrammarState::Compiling(CompilingGrammar { reply, _sequence: sequence }),
            Err(_) => GrammarState::lost(),
        }
    }
}

impl CompileJob {
    /// Whether a sequence still waits for the grammar. Work for clients that have left would delay all
    /// others.
    fn is_wanted(&self) -> bool {
        self.sequence.strong_count() > 0
    }
}

const THREAD_FAILED: &str = "the grammar thread panicked on this grammar";

impl GrammarState {
    fn of(compiled: Result<Matcher, GrammarError>) -> Self {
        match compiled {
            Ok(matcher) => Self::Ready(Box::new(matcher)),
            Err(error) => Self::Failed(error.to_string()),
        }
    }

    fn lost() -> Self {
        Self::Failed(THREAD_FAILED.to_owned())
    }
}

/// Thread that compiles grammars. A panic of the parser fails only one grammar.
fn compile_all(tokenizer_json: &str, jobs: &Receiver<CompileJob>) {
    let mut compiler = None;
    // Least recently used first.
    let mut compiled: VecDeque<(String, Matcher)> = VecDeque::new();
    for CompileJob { document, reply, .. } in jobs.iter().filter(CompileJob::is_wanted) {
        let matcher = catch_unwind(AssertUnwindSafe(|| {
            if let Some(known) = compiled.iter().position(|(known, _)| *known == document) {
                let entry = compiled.remove(known).expect("it was found there");
                let fork = entry.1.fork();
                compiled.push_back(entry);
                return Ok(fork);
            }
            let compiler = compiler.get_or_insert_with(|| {
                Vocabulary::from_tokenizer_json(tokenizer_json)
                    .and_then(|vocabulary| Compiler::new(&vocabulary))
            });
            let compiler = compiler.as_ref().map_err(GrammarError::clone)?;
            let matcher = compiler.compile(&Grammar::from_wire(&document)?)?;
            let fork = matcher.fork();
            compiled.push_back((document, matcher));
            if compiled.len() > COMPILED_MAX {
                compiled.pop_front();
            }
            Ok(fork)
        }));
        // If no reply is sent, the sequence's grammar counts as failed. The receiver may be dropped.
        if let Ok(matcher) = matcher {
            drop(reply.send(matcher));
        }
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
    use speculation::cached_sequence::{Admission, CachedSequence, WorkerLimits};
    use speculation::{Draft, Role, SequenceId, Step, Work};

    use super::*;
    use crate::table::{RouterId, SequenceKey};

    fn tokenizer_json() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/target/tokenizer.json");
        std::fs::read_to_string(path).unwrap()
    }

    /// The compile thread's answer to a grammar that no router checked.
    fn compiled(grammars: &Grammars, grammar: &Grammar) -> Result<Matcher, String> {
        let GrammarState::Compiling(compiling) = grammars.compile(grammar.to_wire()) else {
            panic!("the thread is gone")
        };
        compiling.reply.recv().expect("the thread did not panic").map_err(|error| error.to_string())
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
    fn grammars_of_clients_that_left_are_not_compiled() {
        let (compiles, jobs) = channel();
        let mut grammars = Grammars { compiles, ..Grammars::start(tokenizer_json()).unwrap() };
        let slow = ["a", "b", "c"].map(|text| Grammar::choice(&[text]));
        for (slot, grammar) in (0..).zip(&slow) {
            assert!(!grammars.is_ready(&task(slot, grammar)));
        }
        grammars.close(Slot(0));
        grammars.close(Slot(1));
        let wanted: Vec<String> =
            jobs.try_iter().filter(CompileJob::is_wanted).map(|job| job.document).collect();
        assert_eq!(wanted, [slow[2].to_wire()]);
    }

    #[test]
    fn a_grammar_that_nests_too_deeply_fails_and_the_next_one_compiles() {
        let grammars = Grammars::start(tokenizer_json()).unwrap();
        let rules: String = (0..5_000).map(|i| format!("r{i}: r{0} r{0} | \"a\"\n", i + 1)).collect();
        let text = format!("start: r0\n{rules}r5000: \"b\"");
        let deep = Grammar { kind: grammar::GrammarKind::Lark, text };
        let refused = compiled(&grammars, &deep).unwrap_err();
        assert!(refused.contains("levels deep"), "{refused}");
        let mut matcher = compiled(&grammars, &Grammar::choice(&["a"])).unwrap();
        assert_eq!(matcher.masks(&[], &[], &[0]).map(|masks| masks.len()), Ok(1));
    }
}
