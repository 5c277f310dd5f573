//! Writes log lines to stderr without blocking the caller: a dedicated thread writes, and if it cannot keep
//! up, lines are dropped and counted, and the count is logged. So an unread pipe cannot stop the scheduler or
//! a device thread. (The log of tracing-appender's writer does not show that lines are missing.) An event is
//! one line, whatever its values contain: they may come from other machines.

use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use tracing::Level;
use tracing_subscriber::fmt::MakeWriter;

use super::LogFormat;

/// Maximum number of queued lines; further ones are dropped.
const LINES_MAX: usize = 4_096;

/// Timeout for the last lines when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

enum Message {
    Line(Vec<u8>),
    /// Dropped once everything before it is written.
    Flush(SyncSender<Infallible>),
}

/// Handle to the writer. Clones write to the same output.
#[derive(Clone, Debug)]
pub(super) struct LogWriter {
    messages: SyncSender<Message>,
    format: LogFormat,
    /// Whether lines have the colours of terminals.
    has_colours: bool,
    num_dropped: Arc<AtomicU64>,
}

impl LogWriter {
    /// Starts a thread that writes to `out`.
    pub(super) fn start(out: impl Write + Send + 'static, format: LogFormat) -> io::Result<Self> {
        let (messages, received) = sync_channel(LINES_MAX);
        let writer = Self { messages, format, has_colours: false, num_dropped: Arc::default() };
        let num_dropped = Arc::clone(&writer.num_dropped);
        let thread = std::thread::Builder::new().name("log".to_owned());
        thread.spawn(move || write_all(&received, &num_dropped, out, format))?;
        Ok(writer)
    }

    /// Sets whether lines have the colours of terminals.
    pub(super) fn with_colours(self, has_colours: bool) -> Self {
        Self { has_colours, ..self }
    }

    /// Whether lines have the colours of terminals.
    pub(super) fn has_colours(&self) -> bool {
        self.has_colours
    }

    /// Logs a line about the log itself.
    pub(super) fn note(&self, text: &str) {
        self.send(formatted(self.format, (Level::WARN, module_path!()), text));
    }

    /// Logs a panic and waits until it is written, because the process may be about to abort.
    pub(super) fn panicked(&self, text: &str) {
        self.send(formatted(self.format, (Level::ERROR, "panic"), text));
        self.flush();
    }

    /// Writes a line without a level, whatever the format.
    pub(super) fn line(&self, text: &str) {
        self.send(one_line(format!("{text}\n").as_bytes(), LogFormat::Text, false));
    }

    /// Waits until all queued lines are written, but not long: an unread pipe must not keep the process
    /// alive. Returns whether they are.
    pub(super) fn flush(&self) -> bool {
        let (written, wait) = sync_channel(0);
        let sent = self.messages.try_send(Message::Flush(written)).is_ok();
        sent && wait.recv_timeout(FLUSH_TIMEOUT) == Err(RecvTimeoutError::Disconnected)
    }

    fn send(&self, line: Vec<u8>) {
        if let Err(TrySendError::Full(_)) = self.messages.try_send(Message::Line(line)) {
            self.num_dropped.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Write errors are ignored, because there is nowhere to report them.
fn write_all(received: &Receiver<Message>, num_dropped: &AtomicU64, mut out: impl Write, format: LogFormat) {
    while let Ok(message) = received.recv() {
        match message {
            Message::Line(line) => drop(out.write_all(&line)),
            Message::Flush(written) => {
                drop(out.flush());
                drop(written);
            }
        }
        let dropped = num_dropped.swap(0, Ordering::AcqRel);
        if dropped > 0 {
            let text = format!("{dropped} log lines were dropped: stderr is not read fast enough");
            drop(out.write_all(&formatted(format, (Level::WARN, module_path!()), &text)));
        }
    }
}

fn formatted(format: LogFormat, (level, target): (Level, &str), text: &str) -> Vec<u8> {
    let mut line = match format {
        LogFormat::Text => format!("{level} {target}: {text}"),
        LogFormat::Json => {
            serde_json::json!({ "level": level.as_str(), "target": target, "message": text }).to_string()
        }
    };
    line.push('\n');
    line.into_bytes()
}

/// Escapes the control characters in a line: a value must not look like a line of this process, and must not
/// control a terminal that shows the log. The subscriber escapes them only in messages.
fn one_line(line: &[u8], format: LogFormat, has_colours: bool) -> Vec<u8> {
    use std::fmt::Write as _;
    let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line));
    let mut escaped = String::with_capacity(line.len());
    for (at, c) in text.char_indices() {
        if !c.is_control() || c == '\t' || (has_colours && begins_with_colour(&text[at..])) {
            escaped.push(c);
        } else if format == LogFormat::Json {
            // Its serializer leaves these (U+007F to U+009F) as they are.
            write!(escaped, "\\u{:04x}", u32::from(c)).expect("writing to a string cannot fail");
        } else {
            escaped.extend(c.escape_default());
        }
    }
    if line.ends_with(b"\n") {
        escaped.push('\n');
    }
    escaped.into_bytes()
}

/// Whether the text begins with a sequence of the subscriber's kind: a style or a colour of characters.
fn begins_with_colour(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("\x1b[") else { return false };
    let after = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
    let mut codes = rest[..rest.len() - after.len()].split(';');
    // Not 8, which hides all that follows.
    after.starts_with('m') && codes.all(|code| matches!(code.parse(), Ok(0_u8..=4 | 31..=36)))
}

impl Write for LogWriter {
    /// The subscriber writes each event with a single call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.send(one_line(line, self.format, self.has_colours));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Stderr whose reader takes a line only on request.
    struct Pipe {
        may_write: Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.may_write.recv().map_err(io::Error::other)?;
            self.written.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A log, what lets its reader take a line, and what the reader has taken.
    fn piped(format: LogFormat) -> (LogWriter, Sender<()>, Arc<Mutex<Vec<u8>>>) {
        let (read, may_write) = channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let pipe = Pipe { may_write, written: Arc::clone(&written) };
        (LogWriter::start(pipe, format).unwrap(), read, written)
    }

    #[test]
    fn a_pipe_that_nobody_reads_holds_up_nobody_and_the_log_says_what_is_missing() {
        let (mut writer, read, written) = piped(LogFormat::Text);
        // The thread may already hold one line, the others are queued; nothing waits for the reader.
        for idx in 0..LINES_MAX + 11 {
            writer.write_all(format!("line {idx}\n").as_bytes()).unwrap();
        }
        for _ in 0..2 * LINES_MAX {
            read.send(()).unwrap();
        }
        // The flush fails while the queue is full.
        while !writer.flush() {}
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        assert!(text.starts_with("line 0\n"), "{text}");
        let lost = |count: usize| text.contains(&format!("{count} log lines were dropped"));
        assert!(lost(10) || lost(11), "{}", &text[text.len() - 200..]);
    }

    #[test]
    fn a_value_can_neither_forge_a_line_nor_control_a_terminal() {
        let (log, read, written) = piped(LogFormat::Text);
        read.send(()).unwrap();
        let lines = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).without_time();
        tracing::subscriber::with_default(lines.finish(), || {
            tracing::warn!(reason = %"gone\r\nERROR router: \x1b[31mforged\u{9b}2J\n", "a worker left");
        });
        assert!(log.flush());
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        let expected = r"a worker left reason=gone\r\nERROR router: \u{1b}[31mforged\u{9b}2J\n";
        assert!(text.ends_with(&format!("{expected}\n")) && text.lines().count() == 1, "{text:?}");
    }

    #[test]
    fn only_colours_are_left_to_a_terminal() {
        let line = b"\x1b[33m WARN\x1b[0m a\tb\x1b[1;2mc\x1b[2J\x1b]0;title\x07\n";
        let shown = |has_colours| String::from_utf8(one_line(line, LogFormat::Text, has_colours)).unwrap();
        let rest = "\\u{1b}[2J\\u{1b}]0;title\\u{7}\n";
        assert_eq!(shown(true), format!("\x1b[33m WARN\x1b[0m a\tb\x1b[1;2mc{rest}"));
        assert_eq!(shown(false), format!("\\u{{1b}}[33m WARN\\u{{1b}}[0m a\tb\\u{{1b}}[1;2mc{rest}"));
        assert_eq!(one_line(b"\x1b[8mx\n", LogFormat::Text, true), b"\\u{1b}[8mx\n");
    }

    #[test]
    fn a_line_of_json_stays_json() {
        let value = "a\u{7f}b\u{9b}2J\u{85}\u{1b}[31m";
        let line = format!("{}\n", serde_json::json!({ "message": value }));
        let written = String::from_utf8(one_line(line.as_bytes(), LogFormat::Json, false)).unwrap();
        assert!(!written.trim_end_matches('\n').contains(char::is_control), "{written:?}");
        let read: serde_json::Value = serde_json::from_str(&written).unwrap();
        assert_eq!(read["message"], value);
    }

    #[test]
    fn a_panic_is_written_before_its_thread_goes_on() {
        let (log, read, written) = piped(LogFormat::Text);
        read.send(()).unwrap();
        log.panicked("thread 'device' panicked");
        assert_eq!(*written.lock().unwrap(), b"ERROR panic: thread 'device' panicked\n");
    }

    #[test]
    fn what_was_logged_is_written_when_the_process_ends() {
        let (writer, read, written) = piped(LogFormat::Json);
        (0..2).for_each(|_| read.send(()).unwrap());
        writer.note("the \"last\" words");
        assert!(writer.flush());
        let line: serde_json::Value = serde_json::from_slice(&written.lock().unwrap()).unwrap();
        assert_eq!((&line["level"], &line["message"]), (&"WARN".into(), &"the \"last\" words".into()));
    }
}
