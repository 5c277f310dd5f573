//! Request bodies, written before a run so that nothing is computed during it.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::endpoint::{Dialect, Endpoint};
use super::prompts::{Content, Prompt};

/// Settings shared by many requests.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Maximum output length, tokens.
    pub max_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f64,
    /// Sampling seed, for endpoints that support it.
    pub seed: Option<i64>,
    /// Outrider only: `Some(false)` disables drafts.
    pub speculation: Option<bool>,
    /// Outrider only: fixes k.
    pub num_draft_tokens: Option<u32>,
    /// Sends prompts as conversations with one message.
    pub chat: bool,
    /// Additional fields of the body, unchanged; they override the others.
    pub fields: Map<String, Value>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_tokens: 64,
            temperature: 0.0,
            seed: Some(0),
            speculation: None,
            num_draft_tokens: None,
            chat: false,
            fields: Map::new(),
        }
    }
}

/// A request that is ready to send.
#[derive(Debug, Clone)]
pub struct Request {
    /// Task type of the prompt.
    pub task: String,
    /// Index of the question: equal for requests that are compared.
    pub item: usize,
    /// Index of the pair of blocks: requests of a pair are sent close together.
    pub block: usize,
    /// Path below the endpoint's URL.
    pub path: &'static str,
    /// Body in JSON.
    pub body: Bytes,
}

impl Settings {
    /// Creates a request. Item and block are 0 until the caller sets them.
    pub fn request(&self, endpoint: &Endpoint, prompt: &Prompt) -> Request {
        let mut body = Map::new();
        let mut set = |field: &str, value: Value| body.insert(field.to_owned(), value);
        set("model", endpoint.model().into());
        let path = match &prompt.content {
            Content::Messages(messages) => {
                set("messages", messages.clone());
                "/v1/chat/completions"
            }
            Content::Prompt(text) if self.chat => {
                set("messages", json!([{ "role": "user", "content": text }]));
                "/v1/chat/completions"
            }
            Content::Prompt(text) => {
                set("prompt", text.as_str().into());
                "/v1/completions"
            }
        };
        set("max_tokens", self.max_tokens.into());
        set("temperature", self.temperature.into());
        if let Some(seed) = self.seed {
            set("seed", seed.into());
        }
        set("stream", true.into());
        let mut options = json!({ "include_usage": true });
        if endpoint.dialect() == Dialect::Outrider {
            options["include_speculation"] = true.into();
            set("task_type", prompt.task.as_str().into());
            let mut speculation = Map::new();
            if let Some(enabled) = self.speculation {
                speculation.insert("enabled".to_owned(), enabled.into());
            }
            if let Some(k) = self.num_draft_tokens {
                speculation.insert("num_draft_tokens".to_owned(), k.into());
            }
            if !speculation.is_empty() {
                set("speculation", speculation.into());
            }
        }
        set("stream_options", options);
        body.extend(self.fields.clone());
        let body = Value::Object(body).to_string().into();
        Request { task: prompt.task.clone(), item: 0, block: 0, path, body }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(served_by: &str, settings: &Settings, content: Content) -> (&'static str, Value) {
        let prompt = Prompt { task: "sql".to_owned(), content };
        let request = settings.request(&Endpoint::for_tests(served_by), &prompt);
        (request.path, serde_json::from_slice(&request.body).unwrap())
    }

    #[test]
    fn only_ours_is_told_what_only_ours_knows() {
        let settings = Settings {
            speculation: Some(false),
            num_draft_tokens: Some(3),
            fields: Map::from_iter([("ignore_eos".to_owned(), json!(true))]),
            ..Settings::default()
        };
        let prompt = || Content::Prompt("SELECT".to_owned());
        let common = json!({
            "model": "m", "prompt": "SELECT", "max_tokens": 64, "temperature": 0.0, "seed": 0, "stream": true,
            "stream_options": { "include_usage": true }, "ignore_eos": true,
        });
        assert_eq!(body("vllm", &settings, prompt()), ("/v1/completions", common.clone()));
        let mut ours = common;
        ours["stream_options"]["include_speculation"] = true.into();
        ours["task_type"] = "sql".into();
        ours["speculation"] = json!({ "enabled": false, "num_draft_tokens": 3 });
        assert_eq!(body("outrider", &settings, prompt()), ("/v1/completions", ours));
    }

    #[test]
    fn conversations_go_to_the_other_path() {
        let messages = json!([{ "role": "user", "content": "hi" }]);
        let settings = Settings { chat: true, ..Settings::default() };
        for content in [Content::Prompt("hi".to_owned()), Content::Messages(messages.clone())] {
            let (path, body) = body("vllm", &settings, content);
            assert_eq!((path, &body["messages"]), ("/v1/chat/completions", &messages));
            assert_eq!(body["prompt"], Value::Null);
        }
    }
}
