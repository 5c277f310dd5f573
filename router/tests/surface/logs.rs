//! Logs may contain sizes, durations and the caller of a request, but never its prompt or answer.

use std::io;
use std::sync::{Arc, Mutex};

use router::error::RouterError;
use serde_json::json;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::client::{MODEL, TestRouter, post};
use crate::fake_lanes::Script;

/// Contained in every text of this test, and in nothing else.
const SECRET: &str = "xyzzy";

/// What a subscriber has written.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn prompts_and_answers_are_never_logged() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new("info,router=trace,service=trace,scheduling=trace"))
        .with_span_events(FmtSpan::FULL)
        .with_writer(lines.clone())
        .finish();
    let _here = tracing::subscriber::set_default(subscriber);
    let router = TestRouter::start().with_access_log();
    let (completions, chat) = ("/v1/completions", "/v1/chat/completions");
    let completion =
        json!({ "model": MODEL, "prompt": SECRET, "stop": [SECRET], "user": SECRET, "echo": true });
    let conversation = json!({ "model": MODEL, "messages": [{ "role": "user", "content": SECRET }] });
    let refused = RouterError::Refused { reason: "a NaN".into() };
    let fails = [
        Script::Refuse(RouterError::Internal("a bug".into())),
        Script::FailAfterOneSpan(refused),
        Script::Vanish,
        Script::Reply(format!(" {SECRET}")),
    ];
    for script in fails {
        router.lanes.set_script(script);
        for (path, body) in [(completions, &completion), (chat, &conversation)] {
            router.post_json(path, body).await;
            let mut streamed = body.clone();
            streamed["stream"] = json!(true);
            router.post_json(path, &streamed).await;
        }
    }
    let unavailable = RouterError::Unavailable { reason: "no target".into() };
    router.lanes.set_script(Script::Refuse(unavailable));
    let mut identified = post(chat, conversation.to_string());
    identified.headers_mut().insert("x-request-id", "mine-7".parse().unwrap());
    assert_eq!(router.send(identified).await.status, 503);
    let too_long = format!("{SECRET} ").repeat(40_000);
    for body in [
        format!(r#"{{ "model": "{MODEL}", "prompt": "{SECRET}" "#),
        json!({ "model": SECRET, "prompt": SECRET }).to_string(),
        json!({ "model": MODEL, "prompt": SECRET, "temperature": SECRET }).to_string(),
        json!({ "model": MODEL, "prompt": SECRET, SECRET: 1 }).to_string(),
        json!({ "model": MODEL, "prompt": too_long }).to_string(),
    ] {
        let answer = router.send(post(completions, body)).await;
        assert!(answer.status.is_client_error(), "{}", answer.text());
    }
    let written = lines.text();
    assert!(written.contains("a request failed"), "no failure was logged:\n{written}");
    assert!(written.contains("router::access"), "no request was logged:\n{written}");
    let unavailable = written.lines().find(|line| line.contains("a request was not completed")).unwrap();
    for expected in ["WARN", "\"unavailable\"", "mine-7", "\"chatcmpl-"] {
        assert!(unavailable.contains(expected), "{expected} is not in {unavailable}");
    }
    let found: Vec<&str> = written.lines().filter(|line| line.contains(SECRET)).collect();
    assert!(found.is_empty(), "{found:#?}");
}
