//! What is logged, what is left out, and that requests never wait for the log.

use std::time::Duration;

use serde_json::Value;
use service::shutdown::ShutdownOutcome;
use text::asset;

use super::*;
use crate::metrics::RouterMetrics;

fn demo_text() -> Arc<ModelText> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
    let read = |name: &str| std::fs::read(directory.join(name)).expect("the bundled pair exists");
    let assets =
        [asset::TOKENIZER, asset::TOKENIZER_CONFIG, asset::CHAT_TEMPLATE].map(|name| (name, read(name)));
    let fetch = |name: &str| {
        assets.iter().find(|(asset_name, _)| *asset_name == name).map(|(_, bytes)| bytes.as_slice())
    };
    Arc::new(ModelText::from_assets(fetch).expect("the bundled tokenizer is valid"))
}

fn choice(text: &Arc<ModelText>, completion: &str) -> LoggedChoice {
    let ids = |text: &Arc<ModelText>, words: &str| text.encode(words, text::Framing::AsIs).unwrap();
    LoggedChoice {
        request_id: "cmpl-1".to_owned(),
        model: "demo".to_owned(),
        text: Arc::clone(text),
        task_type: "chat".to_owned(),
        prompt_ids: ids(text, "<|user|>\nHi<|end|>\n<|assistant|>\n").into(),
        completion_ids: ids(text, completion),
        finish: FinishReason::Stop,
    }
}

fn metrics() -> RequestLogMetrics {
    RouterMetrics::register(&service::metrics::Metrics::new()).request_log()
}

#[tokio::test]
async fn a_line_has_text_and_ids_and_the_thread_ends_with_the_last_handle() {
    let directory = tempfile::tempdir().unwrap();
    let (path, lifetime, counters) = (directory.path().join("log.jsonl"), Lifetime::new(), metrics());
    let text = demo_text();
    let log = RequestLog::start(&path, 1 << 20, &lifetime, counters.clone()).unwrap();
    let first = choice(&text, "Good morning.<|end|>");
    log.offer(first.clone());
    log.offer(choice(&text, "Hello\nyou"));
    drop(log);
    assert_eq!(lifetime.shut_down(Duration::from_secs(20)).await, ShutdownOutcome::Clean);
    let lines: Vec<Value> = std::fs::read_to_string(&path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line is JSON"))
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["prompt"], "<|user|>\nHi<|end|>\n<|assistant|>\n");
    assert_eq!((&lines[0]["completion"], &lines[0]["task"]), (&"Good morning.".into(), &"chat".into()));
    assert_eq!(lines[0]["completion_ids"], serde_json::json!(first.completion_ids));
    assert_eq!(lines[1]["completion"], "Hello\nyou");
    assert_eq!((counters.written.get(), counters.left_out.get(), counters.failed.get()), (2, 0, 0));
}

#[test]
fn choices_beyond_the_queue_are_counted_and_dropped_without_waiting() {
    let (queue, receiver) = sync_channel(1);
    let counters = metrics();
    let log = RequestLog { queue, queued_bytes: Arc::default(), metrics: counters.clone() };
    let text = demo_text();
    for _ in 0..3 {
        log.offer(choice(&text, "Hello"));
    }
    assert_eq!(counters.left_out.get(), 2);
    let kept = receiver.try_recv().unwrap().num_bytes();
    assert_eq!(log.queued_bytes.load(Ordering::Acquire), kept, "dropped choices do not count");

    log.queued_bytes.store(QUEUED_BYTES_MAX, Ordering::Release);
    log.offer(choice(&text, "Hello"));
    assert_eq!(counters.left_out.get(), 3, "the size of the ids is limited, too");
}

#[test]
fn a_full_disk_loses_lines_only() {
    let counters = metrics();
    let text = demo_text();
    let (queue, receiver) = sync_channel(4);
    let log = RequestLog { queue, queued_bytes: Arc::default(), metrics: counters.clone() };
    for _ in 0..3 {
        log.offer(choice(&text, "Hello"));
    }
    drop((log.queue, log.metrics));
    let full = RotatingFile::full();
    write(&receiver, &log.queued_bytes, full, &counters);
    assert_eq!((counters.written.get(), counters.failed.get()), (0, 3));
    assert_eq!(log.queued_bytes.load(Ordering::Acquire), 0);
}
