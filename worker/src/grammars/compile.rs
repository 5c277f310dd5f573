//! [`CompileThread`]: compiles the grammars of a device's sequences, one at a time.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use grammar::{Compiler, Grammar, GrammarError, Matcher, STACK_BYTES, TimedCompiler, Vocabulary};

/// A compiled grammar, or why there is none.
pub(super) type Compiled = Result<Matcher, GrammarError>;

/// The thread, and the queue of its grammars. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct CompileThread {
    jobs: Sender<CompileJob>,
}

struct CompileJob {
    /// The wire document; gone once its sequence is closed.
    document: Weak<String>,
    reply: Sender<Compiled>,
}

/// Compiles for a tokenizer.json, which is parsed when the first grammar arrives.
pub(super) fn for_tokenizer(tokenizer_json: String) -> impl Fn(&Grammar) -> Compiled + Send + 'static {
    let compiler: OnceLock<Result<Compiler, GrammarError>> = OnceLock::new();
    let timed = TimedCompiler::new(move |grammar: &Grammar| {
        let compiler = compiler.get_or_init(|| {
            Vocabulary::from_tokenizer_json(&tokenizer_json).and_then(|vocabulary| Compiler::new(&vocabulary))
        });
        compiler.as_ref().map_err(GrammarError::clone)?.compile(grammar).map(Arc::new)
    });
    move |grammar: &Grammar| timed.compile(grammar).map(|matcher| matcher.fork())
}

impl CompileThread {
    pub(super) fn start(compile: impl Fn(&Grammar) -> Compiled + Send + 'static) -> io::Result<Self> {
        let (jobs, queue) = channel();
        let thread = thread::Builder::new().name("grammars".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || compile_all(&queue, compile))?;
        Ok(Self { jobs })
    }

    /// Nothing is ever compiled while the other value exists.
    #[cfg(test)]
    pub(super) fn that_never_compiles() -> (Self, impl Sized) {
        let (jobs, queue) = channel();
        (Self { jobs }, queue)
    }

    /// Queues a grammar. The receiver gets the result; it disconnects without one if the thread panicked.
    pub(super) fn compile(&self, document: &Arc<String>) -> Receiver<Compiled> {
        let (reply, compiled) = channel();
        // If the thread is gone, the receiver disconnects.
        drop(self.jobs.send(CompileJob { document: Arc::downgrade(document), reply }));
        compiled
    }
}

/// Body of the thread. A panic fails only one grammar.
fn compile_all(queue: &Receiver<CompileJob>, compile: impl Fn(&Grammar) -> Compiled) {
    while let Ok(CompileJob { document, reply }) = queue.recv() {
        // Work for clients that have left would delay all others.
        let Some(document) = document.upgrade() else { continue };
        let compiled = catch_unwind(AssertUnwindSafe(|| compile(&Grammar::from_wire(&document)?)));
        // If no reply is sent, the sequence's grammar counts as failed. The receiver may be dropped.
        if let Ok(compiled) = compiled {
            drop(reply.send(compiled));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammars_of_clients_that_left_are_not_compiled() {
        let ((begin, begun), (release, released)) = (channel(), channel::<()>());
        let compile = move |grammar: &Grammar| -> Compiled {
            begin.send(grammar.clone()).unwrap_or_default();
            // An error: the sender is gone.
            released.recv().unwrap_or_default();
            Err(GrammarError::Compile("done".to_owned()))
        };
        let thread = CompileThread::start(compile).unwrap();
        let grammars = ["slow", "left", "wanted"].map(|text| Grammar::choice(&[text]));
        let [slow, left, wanted] = [0, 1, 2].map(|idx: usize| Arc::new(grammars[idx].to_wire()));
        let [of_slow, _, of_wanted] = [&slow, &left, &wanted].map(|document| thread.compile(document));
        assert_eq!(begun.recv().as_ref(), Ok(&grammars[0]));
        drop(left);
        drop(release);
        for compiled in [of_slow, of_wanted] {
            assert_eq!(compiled.recv().unwrap().unwrap_err(), GrammarError::Compile("done".to_owned()));
        }
        assert_eq!(begun.try_iter().collect::<Vec<_>>(), [grammars[2].clone()]);
    }
}
