//! [`RequestLog`]: writes finished choices as lines of JSON to a file, if the operator enables it
//! (`--request-log`) and the client agrees. Used to distill drafts. A dedicated thread decodes and writes. A
//! request never waits for the log and never fails because of it: choices that do not fit the queue or cannot
//! be written are counted and dropped.

mod file;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use serde::Serialize;
use service::shutdown::Lifetime;
use service::unix_time::since_unix_epoch;
use speculation::{FinishReason, TokenId};
use text::ModelText;

use self::file::RotatingFile;
use crate::detokenize::{decode, decode_all};
use crate::metrics::RequestLogMetrics;

/// Maximum number of queued choices.
const QUEUE_MAX: usize = 1_024;

/// Maximum size of the queued ids, in bytes.
const QUEUED_BYTES_MAX: usize = 64 << 20;

/// A complete choice.
#[derive(Debug, Clone)]
pub struct LoggedChoice {
    /// The request's id.
    pub request_id: String,
    /// Name of the model at its targets.
    pub model: String,
    /// Decodes the ids.
    pub text: Arc<ModelText>,
    /// Task type.
    pub task_type: String,
    /// The ids sent to the target, including the chat template's.
    pub prompt_ids: Arc<[TokenId]>,
    /// Not empty.
    pub completion_ids: Vec<TokenId>,
    /// Finish reason.
    pub finish: FinishReason,
}

impl LoggedChoice {
    fn num_bytes(&self) -> usize {
        size_of::<TokenId>() * (self.prompt_ids.len() + self.completion_ids.len())
    }

    /// Creates the line for the choice, without the newline.
    fn line(&self, unix_seconds: u64) -> Line<'_> {
        Line {
            created: unix_seconds,
            id: &self.request_id,
            model: &self.model,
            task: &self.task_type,
            framed: true,
            prompt: decode_all(&self.text, &self.prompt_ids),
            completion: decode(&self.text, &self.completion_ids),
            finish: self.finish.as_str(),
            prompt_ids: &self.prompt_ids,
            completion_ids: &self.completion_ids,
        }
    }
}

/// One line of the file.
#[derive(Debug, Serialize)]
struct Line<'a> {
    created: u64,
    id: &'a str,
    model: &'a str,
    task: &'a str,
    /// The prompt includes the chat template's text.
    framed: bool,
    prompt: String,
    completion: String,
    finish: &'static str,
    prompt_ids: &'a [TokenId],
    completion_ids: &'a [TokenId],
}

/// Handle to the log. Clones write to the same file.
#[derive(Debug, Clone)]
pub struct RequestLog {
    queue: SyncSender<LoggedChoice>,
    queued_bytes: Arc<AtomicUsize>,
    metrics: RequestLogMetrics,
}

impl RequestLog {
    /// Opens or continues the file and starts the thread that writes it; the thread ends with the last
    /// handle. The file and the previous one (`FILE.1`) together take at most `bytes_max`.
    ///
    /// # Errors
    /// The file cannot be opened with access for its owner alone.
    pub fn start(
        path: &Path,
        bytes_max: u64,
        lifetime: &Lifetime,
        metrics: RequestLogMetrics,
    ) -> io::Result<Self> {
        let file = RotatingFile::open(path, bytes_max / 2)?;
        let (queue, receiver) = sync_channel(QUEUE_MAX);
        let log = Self { queue, queued_bytes: Arc::default(), metrics: metrics.clone() };
        let queued_bytes = Arc::clone(&log.queued_bytes);
        let guard = lifetime.thread("request log");
        std::thread::Builder::new().name("request-log".to_owned()).spawn(move || {
            let _guard = guard;
            write(&receiver, &queued_bytes, file, &metrics);
        })?;
        Ok(log)
    }

    /// Queues a choice, if there is capacity.
    pub fn offer(&self, choice: LoggedChoice) {
        let num_bytes = choice.num_bytes();
        let queued_before = self.queued_bytes.fetch_add(num_bytes, Ordering::AcqRel);
        if queued_before + num_bytes > QUEUED_BYTES_MAX || self.queue.try_send(choice).is_err() {
            self.queued_bytes.fetch_sub(num_bytes, Ordering::AcqRel);
            self.metrics.left_out.inc();
        }
    }
}

/// Writes choices until all handles are dropped.
fn write(
    receiver: &Receiver<LoggedChoice>,
    queued_bytes: &AtomicUsize,
    mut file: RotatingFile,
    metrics: &RequestLogMetrics,
) {
    let mut is_failing = false;
    while let Ok(choice) = receiver.recv() {
        queued_bytes.fetch_sub(choice.num_bytes(), Ordering::AcqRel);
        match append(&mut file, &choice) {
            Ok(()) => {
                metrics.written.inc();
                if std::mem::take(&mut is_failing) {
                    tracing::info!("the request log is writable again");
                }
            }
            Err(error) => {
                metrics.failed.inc();
                if !std::mem::replace(&mut is_failing, true) {
                    let path = file.path().display();
                    tracing::warn!(%path, %error, "cannot write the request log; requests are served but not logged");
                }
            }
        }
    }
}

fn append(file: &mut RotatingFile, choice: &LoggedChoice) -> io::Result<()> {
    let mut line = serde_json::to_vec(&choice.line(since_unix_epoch().as_secs()))?;
    line.push(b'\n');
    file.append(&line)
}

#[cfg(test)]
mod tests;
