//! [`TimedCompiler`]: compiles each grammar within a limited time, and keeps the results.
//!
//! The limits on a grammar bound the work that they know of. A grammar that takes too long nevertheless is
//! given up. A thread cannot be stopped, so each grammar gets its own, which finishes it in any case. Until
//! then the grammar is refused whenever it is sent again; its result is kept like any other.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Grammar, GrammarError, STACK_BYTES};

/// Time after which a grammar is given up. Those within the limits take seconds at most.
pub const COMPILE_MAX: Duration = Duration::from_secs(10);

/// Maximum results in the cache. Clients send few distinct grammars many times.
const COMPILED_MAX: usize = 64;

/// Maximum threads at work on grammars that were given up. With as many, grammars without a known result are
/// refused.
const GIVEN_UP_MAX: usize = 4;

type Compiled<T> = Result<T, GrammarError>;

type Compile<T> = dyn Fn(&Grammar) -> Compiled<T> + Send + Sync;

/// Compiles grammars to `T`. Clones share the results.
#[derive(Clone)]
pub struct TimedCompiler<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    compile: Box<Compile<T>>,
}

struct State<T> {
    /// Least recently used first.
    compiled: VecDeque<(Grammar, Compiled<T>)>,
    /// The grammars that threads are working on.
    running: Vec<RunningCompile<T>>,
}

struct RunningCompile<T> {
    grammar: Grammar,
    /// When it is given up.
    due: Instant,
    is_given_up: bool,
    /// The callers that get the result.
    waiting: Vec<Sender<Compiled<T>>>,
}

impl<T: Clone + Send + 'static> TimedCompiler<T> {
    /// `compile` runs on a thread with [`STACK_BYTES`] of stack.
    pub fn new(compile: impl Fn(&Grammar) -> Compiled<T> + Send + Sync + 'static) -> Self {
        let state = State { compiled: VecDeque::new(), running: Vec::new() };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), compile: Box::new(compile) }) }
    }

    /// Compiles a grammar or returns its known result. Blocks for at most [`COMPILE_MAX`]. As many grammars
    /// are compiled at once as there are callers, apart from those that were given up.
    pub fn compile(&self, grammar: &Grammar) -> Result<T, GrammarError> {
        self.compile_within(COMPILE_MAX, grammar)
    }

    fn compile_within(&self, limit: Duration, grammar: &Grammar) -> Compiled<T> {
        // What is kept must be bounded.
        grammar.check_size()?;
        let (reply, compiled) = channel();
        let due = {
            let mut state = self.shared.lock();
            if let Some(known) = state.known(grammar) {
                return known;
            }
            let running = state.running.iter().position(|running| running.grammar == *grammar);
            let idx = match running {
                Some(idx) if state.running[idx].is_given_up => return Err(GrammarError::TakesTooLong),
                Some(idx) => idx,
                None => self.start(&mut state, limit, grammar)?,
            };
            let running = &mut state.running[idx];
            running.waiting.push(reply);
            running.due
        };
        let compiled_in_time = compiled.recv_timeout(due.saturating_duration_since(Instant::now()));
        compiled_in_time.unwrap_or_else(|_| self.give_up(grammar, &compiled))
    }

    /// Starts a thread for a grammar; returns its index among the running ones.
    fn start(&self, state: &mut State<T>, limit: Duration, grammar: &Grammar) -> Result<usize, GrammarError> {
        if state.running.iter().filter(|running| running.is_given_up).count() >= GIVEN_UP_MAX {
            return Err(GrammarError::Busy);
        }
        let (shared, for_thread) = (Arc::clone(&self.shared), grammar.clone());
        let thread = thread::Builder::new().name("grammar-compile".to_owned()).stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(move || shared.run(&for_thread)) {
            tracing::warn!(%error, "cannot start a thread for a grammar: it is refused");
            return Err(GrammarError::Busy);
        }
        let (grammar, due) = (grammar.clone(), Instant::now() + limit);
        state.running.push(RunningCompile { grammar, due, is_given_up: false, waiting: Vec::new() });
        Ok(state.running.len() - 1)
    }

    /// Gives a grammar up, unless its result has arrived by now.
    fn give_up(&self, grammar: &Grammar, compiled: &Receiver<Compiled<T>>) -> Compiled<T> {
        let mut state = self.shared.lock();
        // Results are sent under the lock.
        if let Ok(compiled) = compiled.try_recv() {
            return compiled;
        }
        let running = state.running.iter_mut().find(|running| running.grammar == *grammar);
        if let Some(running) = running
            && !std::mem::replace(&mut running.is_given_up, true)
        {
            tracing::warn!("a grammar takes more than {COMPILE_MAX:?} to compile: it is refused");
        }
        Err(GrammarError::TakesTooLong)
    }
}

impl<T: Clone> Shared<T> {
    /// Compiles a grammar, keeps the result and sends it to all callers.
    fn run(&self, grammar: &Grammar) {
        let compiled = catch_unwind(AssertUnwindSafe(|| (self.compile)(grammar)));
        let compiled = compiled.unwrap_or(Err(GrammarError::Panicked));
        let mut state = self.lock();
        state.keep(grammar.clone(), compiled.clone());
        let idx = state.running.iter().position(|running| running.grammar == *grammar);
        let running = state.running.swap_remove(idx.expect("only its own thread removes it"));
        for caller in running.waiting {
            // A caller that gave up is gone.
            drop(caller.send(compiled.clone()));
        }
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No grammar is compiled under the lock, so nothing is half updated.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> State<T> {
    /// The result of a grammar, if it is in the cache.
    fn known(&mut self, grammar: &Grammar) -> Option<Compiled<T>> {
        let idx = self.compiled.iter().position(|(known, _)| known == grammar)?;
        let entry = self.compiled.remove(idx)?;
        let compiled = entry.1.clone();
        self.compiled.push_back(entry);
        Some(compiled)
    }

    fn keep(&mut self, grammar: Grammar, compiled: Compiled<T>) {
        self.compiled.push_back((grammar, compiled));
        if self.compiled.len() > COMPILED_MAX {
            self.compiled.pop_front();
        }
    }
}

impl<T> fmt::Debug for TimedCompiler<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimedCompiler").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GrammarKind;

    /// A limit that nothing in these tests reaches.
    const AMPLE: Duration = Duration::from_secs(3_600);

    fn grammar(text: &str) -> Grammar {
        Grammar { kind: GrammarKind::Regex, text: text.to_owned() }
    }

    /// Compiles a grammar to its text: `slow..` once the sender is dropped, and anything else at once. Each
    /// grammar that is begun is sent to the receiver.
    fn compiler() -> (TimedCompiler<String>, Receiver<String>, Sender<()>) {
        let ((begin, begun), (release, released)) = (channel(), channel());
        let released = Mutex::new(released);
        let compiler = TimedCompiler::new(move |grammar: &Grammar| {
            begin.send(grammar.text.clone()).unwrap_or_default();
            if grammar.text.starts_with("slow") {
                // An error: the sender is gone.
                released.lock().unwrap().recv().unwrap_or_default();
            }
            assert!(grammar.text != "panic", "on purpose, by a test");
            Ok(grammar.text.clone())
        });
        (compiler, begun, release)
    }

    /// The result of a grammar that was refused, once it is no longer.
    fn later(compiler: &TimedCompiler<String>, text: &str) -> Compiled<String> {
        loop {
            match compiler.compile_within(AMPLE, &grammar(text)) {
                Err(GrammarError::TakesTooLong | GrammarError::Busy) => thread::yield_now(),
                compiled => return compiled,
            }
        }
    }

    #[test]
    fn a_grammar_that_takes_too_long_is_refused_and_the_others_are_compiled() {
        let (compiler, begun, release) = compiler();
        let slow = grammar("slow");
        assert_eq!(compiler.compile_within(Duration::ZERO, &slow), Err(GrammarError::TakesTooLong));
        assert_eq!(compiler.compile_within(AMPLE, &grammar("a")), Ok("a".to_owned()));
        assert_eq!(compiler.compile_within(AMPLE, &slow), Err(GrammarError::TakesTooLong));
        // When it is compiled after all, the result is known.
        drop(release);
        assert_eq!(later(&compiler, "slow"), Ok("slow".to_owned()));
        let mut all_begun: Vec<String> = begun.try_iter().collect();
        all_begun.sort_unstable();
        assert_eq!(all_begun, ["a", "slow"], "each is compiled once");
    }

    #[test]
    fn few_threads_are_left_behind_and_then_only_known_results_are_returned() {
        let (compiler, _begun, release) = compiler();
        assert_eq!(compiler.compile_within(AMPLE, &grammar("known")), Ok("known".to_owned()));
        for i in 0..GIVEN_UP_MAX {
            let slow = grammar(&format!("slow {i}"));
            assert_eq!(compiler.compile_within(Duration::ZERO, &slow), Err(GrammarError::TakesTooLong));
        }
        assert_eq!(compiler.compile_within(AMPLE, &grammar("a")), Err(GrammarError::Busy));
        assert_eq!(compiler.compile_within(AMPLE, &grammar("known")), Ok("known".to_owned()));
        drop(release);
        assert_eq!(later(&compiler, "a"), Ok("a".to_owned()), "the threads have ended");
    }

    #[test]
    fn callers_with_the_same_grammar_share_one_thread() {
        let (compiler, begun, release) = compiler();
        let slow = grammar("slow");
        thread::scope(|scope| {
            let callers = [0, 1].map(|_| scope.spawn(|| compiler.compile_within(AMPLE, &slow)));
            let num_waiting =
                || compiler.shared.lock().running.first().map_or(0, |first| first.waiting.len());
            while num_waiting() < callers.len() {
                thread::yield_now();
            }
            drop(release);
            for caller in callers {
                assert_eq!(caller.join().unwrap(), Ok("slow".to_owned()));
            }
        });
        assert_eq!(begun.try_iter().count(), 1);
    }

    #[test]
    fn a_panic_refuses_one_grammar() {
        let (compiler, ..) = compiler();
        assert_eq!(compiler.compile(&grammar("panic")), Err(GrammarError::Panicked));
        assert_eq!(compiler.compile_within(AMPLE, &grammar("a")), Ok("a".to_owned()));
    }
}
