//! Bodies of requests, written before a run so that nothing is computed while it lasts.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::endpoint::{Dialect, Endpoint};
use super::prompts::{Content, Prompt};

/// What is the same for many requests.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The longest answer, tokens.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f64,
    /// Of the draws, where the endpoint knows seeds.
    pub seed: Option<i64>,
    /// Ours only: `Some(false)` refuses drafts.
    pub speculation: Option<bool>,
    /// Ours only: pins k.
    pub num_draft_tokens: Option<u32>,
    /// Sends prompts as conversations of one message.
    pub chat: bool,
    /// Further fields of the body, as they are; the last word.
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

/// A request ready to be sent.
#[derive(Debug, Clone)]
pub struct Request {
    /// Of the prompt.
    pub task: String,
    /// Which question this is: equal for requests that are to be compared.
    pub item: usize,
    /// In which pair of blocks it stands: what was sent close together stands together.
    pub block: usize,
    /// Below the endpoint.
    pub path: &'static str,
    /// JSON.
    pub body: Bytes,
}

impl Settings {
    /// Item and block are 0 until the caller says otherwise.
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
