//! [`CompileThreads`]: compiles grammars one at a time, each for a limited time.
//!
//! The limits of [`grammar`] bound the work that they know of. A grammar that takes too long nevertheless is
//! given up: its sequences are refused, and another thread goes on with the next grammar. A thread cannot be
//! stopped, so the old one finishes its grammar and ends. Until then the grammar is refused whenever it is
//! sent again; its result is kept like any other.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use grammar::{Compiler, Grammar, GrammarError, Matcher, STACK_BYTES, Vocabulary};

/// Maximum results in the cache. Clients send few distinct grammars many times.
const COMPILED_MAX: usize = 64;

/// Time after which a grammar is given up. Those within the limits take seconds at most.
const COMPILE_MAX: Duration = Duration::from_secs(10);

/// Maximum threads that finish grammars that were given up. With as many, no thread takes the place of one
/// that takes too long, and all grammars behind it are refused.
const GIVEN_UP_MAX: usize = 3;

/// A compiled grammar, or why there is none.
pub(super) type Compiled = Result<Matcher, GrammarError>;

/// The compiling threads; they end when it is dropped.
pub(super) struct CompileThreads {
    shared: Arc<Shared>,
}

/// A grammar that a sequence waits for.
#[derive(Debug)]
pub(super) struct CompilingGrammar {
    /// Gets the result; disconnects without one if the parser panicked.
    pub(super) reply: Receiver<Compiled>,
    /// See [`CompileJob::sequence`].
    _sequence: Arc<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Signals a new job, a new active thread, or the end.
    changed: Condvar,
    compile: Box<dyn Fn(&str) -> Compiled + Send + Sync>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<CompileJob>,
    /// Least recently used first.
    compiled: VecDeque<(String, Compiled)>,
    /// The grammars that threads are working on.
    running: Vec<RunningCompile>,
    /// Number of the thread that takes jobs. Those before it were replaced: they end.
    active: usize,
    is_closed: bool,
}

struct CompileJob {
    document: String,
    /// Gone once the sequence is closed or refused.
    sequence: Weak<()>,
    reply: Sender<Compiled>,
}

struct RunningCompile {
    thread: usize,
    document: String,
    since: Instant,
}

/// Compiles for a tokenizer.json, which is parsed when the first grammar arrives.
pub(super) fn for_tokenizer(tokenizer_json: String) -> impl Fn(&str) -> Compiled + Send + Sync + 'static {
    let compiler: OnceLock<Result<Compiler, GrammarError>> = OnceLock::new();
    move |document: &str| -> Compiled {
        let compiler = compiler.get_or_init(|| {
            Vocabulary::from_tokenizer_json(&tokenizer_json).and_then(|vocabulary| Compiler::new(&vocabulary))
        });
        compiler.as_ref().map_err(GrammarError::clone)?.compile(&Grammar::from_wire(document)?)
    }
}

impl CompileThreads {
    /// Starts the first thread. `compile` compiles a wire document.
    pub(super) fn start(compile: impl Fn(&str) -> Compiled + Send + Sync + 'static) -> io::Result<Self> {
        let threads = Self::without_threads(compile);
        threads.spawn(0)?;
        Ok(threads)
    }

    /// Nothing is ever compiled.
    pub(super) fn without_threads(compile: impl Fn(&str) -> Compiled + Send + Sync + 'static) -> Self {
        let shared = Shared { state: Mutex::default(), changed: Condvar::new(), compile: Box::new(compile) };
        Self { shared: Arc::new(shared) }
    }

    /// Queues a grammar.
    pub(super) fn compile(&self, document: String) -> CompilingGrammar {
        let (reply, compiled) = channel();
        let sequence = Arc::new(());
        let job = CompileJob { document, sequence: Arc::downgrade(&sequence), reply };
        let mut state = self.shared.lock();
        // Jobs that nobody takes must not pile up.
        state.jobs.retain(CompileJob::is_wanted);
        state.jobs.push_back(job);
        self.shared.changed.notify_all();
        CompilingGrammar { reply: compiled, _sequence: sequence }
    }

    /// Why a grammar that has no result at `now` is not waited for any longer; `None`: it is. Replaces the
    /// active thread if that takes too long.
    pub(super) fn give_up(&self, document: &str, now: Instant) -> Option<GrammarError> {
        let is_overdue =
            |running: &RunningCompile| now.saturating_duration_since(running.since) > COMPILE_MAX;
        let mut state = self.shared.lock();
        let active = state.active;
        let is_stuck = state.running.iter().any(|running| running.thread == active && is_overdue(running));
        let is_replaced = is_stuck && state.running.len() <= GIVEN_UP_MAX && self.spawn(active + 1).is_ok();
        if is_replaced {
            state.active += 1;
            tracing::warn!("a grammar takes more than {COMPILE_MAX:?} to compile: it is refused");
        }
        if state.running.iter().any(|running| running.document == document && is_overdue(running)) {
            return Some(takes_too_long());
        }
        let busy = "all threads that compile grammars are at ones that take too long: retry later";
        (is_stuck && !is_replaced).then(|| GrammarError::Compile(busy.to_owned()))
    }

    fn spawn(&self, number: usize) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("grammar-compile".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || shared.run(number)).map(drop)
    }
}

impl Drop for CompileThreads {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for CompileThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompileThreads").finish_non_exhaustive()
    }
}

impl Shared {
    /// Compiles until the threads end or this one is replaced. A panic of the parser fails only one grammar.
    fn run(&self, thread: usize) {
        while let Some(CompileJob { document, reply, .. }) = self.next_job(thread) {
            let compiled = catch_unwind(AssertUnwindSafe(|| self.compiled(&document)));
            self.lock().running.retain(|running| running.thread != thread);
            // If no reply is sent, the sequence's grammar counts as failed. The receiver may be dropped.
            if let Ok(compiled) = compiled {
                drop(reply.send(compiled));
            }
        }
    }

    /// Waits for a grammar that a sequence still waits for: work for clients that have left would delay all
    /// others. `None` if the thread is to end.
    fn next_job(&self, thread: usize) -> Option<CompileJob> {
        let mut state = self.lock();
        while !state.is_closed && state.active == thread {
            match state.jobs.pop_front() {
                Some(job) if !job.is_wanted() => {}
                Some(job) if state.running.iter().any(|running| running.document == job.document) => {
                    // A thread before this one was replaced because of it.
                    drop(job.reply.send(Err(takes_too_long())));
                }
                Some(job) => {
                    let (document, since) = (job.document.clone(), Instant::now());
                    state.running.push(RunningCompile { thread, document, since });
                    return Some(job);
                }
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
        None
    }

    /// From the cache, or compiled now.
    fn compiled(&self, document: &str) -> Compiled {
        if let Some(known) = self.lock().cached(document) {
            return known;
        }
        let compiled = (self.compile)(document);
        let fork = forked(&compiled);
        self.lock().keep(document.to_owned(), compiled);
        fork
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Poisoned means that the parser panicked while a cached grammar was copied; the rest is valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn cached(&mut self, document: &str) -> Option<Compiled> {
        let known = self.compiled.iter().position(|(known, _)| known == document)?;
        let entry = self.compiled.remove(known).expect("it was found there");
        let fork = forked(&entry.1);
        self.compiled.push_back(entry);
        Some(fork)
    }

    fn keep(&mut self, document: String, compiled: Compiled) {
        self.compiled.push_back((document, compiled));
        if self.compiled.len() > COMPILED_MAX {
            self.compiled.pop_front();
        }
    }
}

impl CompileJob {
    fn is_wanted(&self) -> bool {
        self.sequence.strong_count() > 0
    }
}

fn forked(compiled: &Compiled) -> Compiled {
    compiled.as_ref().map(Matcher::fork).map_err(GrammarError::clone)
}

fn takes_too_long() -> GrammarError {
    let seconds = COMPILE_MAX.as_secs();
    GrammarError::Compile(format!("the grammar takes more than {seconds} s to compile: simplify it"))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use super::*;

    /// Threads that compile `slow..` for as long as the sender exists, and anything else at once, to an error
    /// that says `done`. Each grammar that is begun is sent to the receiver.
    fn threads() -> (CompileThreads, Receiver<String>, Sender<()>) {
        let ((begin, begun), (release, released)) = (channel(), channel());
        let released = Mutex::new(released);
        let compile = move |document: &str| -> Compiled {
            begin.send(document.to_owned()).unwrap_or_default();
            if document.starts_with("slow") {
                // An error: the sender is gone.
                released.lock().unwrap().recv().unwrap_or_default();
            }
            Err(GrammarError::Compile("done".to_owned()))
        };
        (CompileThreads::start(compile).unwrap(), begun, release)
    }

    /// A time at which everything that began during the test takes too long.
    fn late() -> Instant {
        Instant::now() + COMPILE_MAX + Duration::from_secs(3_600)
    }

    fn reason(compiling: &CompilingGrammar) -> String {
        compiling.reply.recv().expect("nothing panicked").unwrap_err().to_string()
    }

    #[test]
    fn a_grammar_that_takes_too_long_is_refused_and_the_others_are_compiled() {
        let (threads, begun, release) = threads();
        let early = Instant::now();
        let slow = threads.compile("slow".to_owned());
        assert_eq!(begun.recv().unwrap(), "slow");
        let (same, quick) = (threads.compile("slow".to_owned()), threads.compile("a".to_owned()));
        assert_eq!(threads.give_up("slow", early), None, "it has time");
        assert_eq!(threads.give_up("a", early), None);
        assert_eq!(threads.give_up("slow", late()), Some(takes_too_long()));
        // Another thread goes on. The same grammar, sent before and afterwards, is not compiled again.
        let again = threads.compile("slow".to_owned());
        assert_eq!((reason(&same), reason(&quick)), (takes_too_long().to_string(), "done".to_owned()));
        assert_eq!(reason(&again), takes_too_long().to_string());
        assert_eq!((begun.recv().unwrap(), begun.try_recv()), ("a".to_owned(), Err(TryRecvError::Empty)));
        // When it is compiled after all, the result is known.
        drop(release);
        assert_eq!(reason(&slow), "done");
        assert_eq!(reason(&threads.compile("slow".to_owned())), "done");
        assert_eq!(begun.try_recv(), Err(TryRecvError::Empty));
    }

    #[test]
    fn few_threads_compile_what_takes_too_long_and_then_all_grammars_are_refused() {
        let (threads, begun, release) = threads();
        let late = late();
        let mut slow = Vec::new();
        for i in 0..=GIVEN_UP_MAX {
            let document = format!("slow {i}");
            slow.push(threads.compile(document.clone()));
            assert_eq!(begun.recv().unwrap(), document);
            assert_eq!(threads.give_up(&document, late), Some(takes_too_long()));
        }
        let other = threads.compile("a".to_owned());
        let busy = threads.give_up("a", late).expect("no thread is left").to_string();
        assert!(busy.contains("retry later"), "{busy}");
        assert_eq!(begun.try_recv(), Err(TryRecvError::Empty));
        drop(release);
        assert_eq!(reason(&other), "done", "the last of them goes on");
    }

    #[test]
    fn grammars_of_clients_that_left_are_not_compiled() {
        let (threads, begun, release) = threads();
        let slow = threads.compile("slow".to_owned());
        let [left, wanted] = ["a", "b"].map(|document| threads.compile(document.to_owned()));
        drop(left);
        drop(release);
        assert_eq!([&slow, &wanted].map(reason), ["done", "done"]);
        assert_eq!(begun.try_iter().collect::<Vec<_>>(), ["slow", "b"]);
    }
}
