//! [`RequestLog`]: finished choices as lines of JSON in a file, where the operator asks for one (`--request-log`) and whoever sent the request
//! agrees. A draft is distilled from it. A thread of its own decodes and writes; a request never waits for it and never fails by it: what
//! does not fit the queue, or cannot be written, is counted and left out.

mod file;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use service::shutdown::Lifetime;
use speculation::{FinishReason, TokenId};
use text::ModelText;

use self::file::RotatingFile;
use crate::detokenize::{decode, decode_all};
use crate::metrics::RequestLogMetrics;

/// Choices that may wait to be written.
const QUEUE_MAX: usize = 1_024;

/// Bytes of ids that may wait to be written.
const QUEUED_BYTES_MAX: usize = 64 << 20;

/// One choice that is complete.
#[derive(Debug, Clone)]
pub struct LoggedChoice {
    /// The request's id.
    pub request_id: String,
    /// The model's name at its targets.
    pub model: String,
    /// By which its ids become text.
    pub text: Arc<ModelText>,
    /// What kind of text it is.
    pub task_type: String,
    /// As the target read it, its chat template's frame included.
    pub prompt_ids: Arc<[TokenId]>,
    /// Not empty.
    pub completion_ids: Vec<TokenId>,
    /// Why it ended.
    pub finish: FinishReason,
}

impl LoggedChoice {
    fn num_bytes(&self) -> usize {
        size_of::<TokenId>() * (self.prompt_ids.len() + self.completion_ids.len())
    }

    /// What is written of it, without the end of the line.
    fn line(&self, unix_seconds: u64) -> Line<'_> {
        Line {
            created: unix_seconds,
            id: &self.request_id,
            model: &self.model,
            task: &self.task_type,
            framed: true,
            prompt: decode_all(&self.text, &self.prompt_ids),
            completion: decode(&self.text, &self.completion_ids),
            finish: match self.finish {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
            },
            prompt_ids: &self.prompt_ids,
            completion_ids: &self.completion_ids,
        }
    }
}

/// One line.
#[derive(Debug, Serialize)]
struct Line<'a> {
    created: u64,
    id: &'a str,
    model: &'a str,
    task: &'a str,
    /// The prompt stands as its chat template wrote it.
    framed: bool,
    prompt: String,
    completion: String,
    finish: &'static str,
    prompt_ids: &'a [TokenId],
    completion_ids: &'a [TokenId],
}

/// Takes choices to be written. Clones feed the same file.
#[derive(Debug, Clone)]
pub struct RequestLog {
    queue: SyncSender<LoggedChoice>,
    queued_bytes: Arc<AtomicUsize>,
    metrics: RequestLogMetrics,
}

impl RequestLog {
    /// Opens the file, or goes on at its end, and starts the thread that writes it; that ends with the last handle. File and the part before it
    /// (`FILE.1`) take `bytes_max` together.
    ///
    /// # Errors
    /// The file cannot be opened for its owner alone.
    pub fn start(
        path: &Path,
        bytes_max: u64,
        lifetime: &Lifetime,
        metrics: RequestLogMetrics,
    ) -> io::Result<Self> {
        let file = RotatingFile::open(path, bytes_max / 2)?;
        let (queue, waiting) = sync_channel(QUEUE_MAX);
        let log = Self { queue, queued_bytes: Arc::default(), metrics: metrics.clone() };
        let queued_bytes = Arc::clone(&log.queued_bytes);
        let hold = lifetime.thread("request log");
        std::thread::Builder::new().name("request-log".to_owned()).spawn(move || {
            let _hold = hold;
            write(&waiting, &queued_bytes, file, &metrics);
        })?;
        Ok(log)
    }

    /// Has a choice written, if there is room for it in the queue.
    pub fn offer(&self, choice: LoggedChoice) {
        let num_bytes = choice.num_bytes();
        let before = self.queued_bytes.fetch_add(num_bytes, Ordering::AcqRel);
        if before + num_bytes > QUEUED_BYTES_MAX || self.queue.try_send(choice).is_err() {
            self.queued_bytes.fetch_sub(num_bytes, Ordering::AcqRel);
            self.metrics.left_out.inc();
        }
    }
}

/// Writes what comes until no handle is left.
fn write(
    waiting: &Receiver<LoggedChoice>,
    queued_bytes: &AtomicUsize,
    mut file: RotatingFile,
    metrics: &RequestLogMetrics,
) {
    let mut is_failing = false;
    while let Ok(choice) = waiting.recv() {
        queued_bytes.fetch_sub(choice.num_bytes(), Ordering::AcqRel);
        match append(&mut file, &choice) {
            Ok(()) => {
                metrics.written.inc();
                if std::mem::take(&mut is_failing) {
                    tracing::info!("the request log is written again");
                }
            }
            Err(error) => {
                metrics.failed.inc();
                if !std::mem::replace(&mut is_failing, true) {
                    let path = file.path().display();
                    tracing::warn!(%path, %error, "the request log cannot be written; requests are served and left out of it");
                }
            }
        }
    }
}

fn append(file: &mut RotatingFile, choice: &LoggedChoice) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut line = serde_json::to_vec(&choice.line(now))?;
    line.push(b'\n');
    file.append(&line)
}

#[cfg(test)]
mod tests;
