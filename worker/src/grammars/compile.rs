//! [`CompileThread`]: compiles the grammars of a device's sequences, one at a time.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use bytes::Bytes;
use grammar::{Compiler, Grammar, GrammarError, Matcher, STACK_BYTES, TimedCompiler, Vocabulary};
use text::{ModelText, asset};

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
pub(super) fn for_tokenizer(tokenizer_json: Bytes) -> impl Fn(&Grammar) -> Compiled + Send + 'static {
    let compiler: OnceLock<Result<Compiler, GrammarError>> = OnceLock::new();
    let timed = TimedCompiler::new(move |grammar: &Grammar| {
        let compiler = compiler
            .get_or_init(|| Compiler::new(&vocabulary(&tokenizer_json).map_err(GrammarError::Tokenizer)?));
        compiler.as_ref().map_err(GrammarError::clone)?.compile(grammar).map(Arc::new)
    });
    move |grammar: &Grammar| timed.compile(grammar).map(|matcher| matcher.fork())
}

/// The tokens with the bytes that they add to the text; the error is the reason.
fn vocabulary(tokenizer_json: &[u8]) -> Result<Vocabulary, String> {
    let text = ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(tokenizer_json))
        .map_err(|error| error.to_string())?;
    let words = text.vocabulary().marked();
    let words =
        words.ok_or("the decoder of tokenizer.json is neither byte-level nor of SentencePiece's form")?;
    Ok(Vocabulary::from_words(words))
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
    use grammar::GrammarKind;
    use serde_json::{Value, json};

    use super::*;

    /// A tokenizer with the tokens `<unk>`, `a`, a line break, a space and, added, two spaces.
    fn tokenizer_json(decoders: &Value) -> Bytes {
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null,
            "added_tokens": [{ "id": 4, "content": "\u{2581}\u{2581}", "special": false, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false }],
            "decoder": { "type": "Sequence", "decoders": decoders },
            "model": { "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "merges": [],
                "vocab": { "<unk>": 0, "a": 1, "<0x0A>": 2, "\u{2581}": 3 } }
        });
        tokenizer.to_string().into()
    }

    #[test]
    fn a_grammar_sees_the_bytes_that_tokens_add_to_the_text() {
        let compile = for_tokenizer(tokenizer_json(&json!([
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" }
        ])));
        for (regex, expected) in [(r"\S+", [0, 1]), (" {2}", [3, 4])] {
            let mut matcher = compile(&Grammar { kind: GrammarKind::Regex, text: regex.to_owned() }).unwrap();
            let masks = matcher.masks(&[], &[], &[2]).unwrap();
            let allowed: Vec<_> = (0..5).filter(|&id| masks[0].allows(id)).collect();
            assert_eq!(allowed, expected, "{regex}");
        }
    }

    #[test]
    fn tokenizers_without_bytes_of_tokens_are_refused_with_the_reason() {
        let no_bytes = tokenizer_json(&json!([{ "type": "Fuse" }]));
        for (tokenizer, words) in [(no_bytes, "decoder of tokenizer.json"), ("{".into(), "tokenizer.json: ")]
        {
            let error = for_tokenizer(tokenizer)(&Grammar::choice(&["a"])).unwrap_err().to_string();
            assert!(error.starts_with("grammars require the bytes of all tokens: "), "{error}");
            assert!(error.contains(words), "{error}");
        }
    }

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
