//! Requests that predict their answer, as from a client that has a text edited.

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::pair::MODEL;

/// A seeded chat request with an optional prediction; the tuple is its temperature and its number of output
/// tokens.
pub fn chat_request(prompt: &str, (temperature, max_tokens): (f64, u32), prediction: Option<&str>) -> Value {
    let mut body = json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": prompt }],
        "temperature": temperature,
        "seed": 5,
        "max_tokens": max_tokens,
        "ignore_eos": true,
    });
    if let Some(text) = prediction {
        body["prediction"] = json!({ "type": "content", "content": text });
    }
    body
}

/// The assistant's text.
pub fn text_of(answer: &Value) -> anyhow::Result<&str> {
    answer["choices"][0]["message"]["content"].as_str().with_context(|| format!("no text in {answer}"))
}

/// A hypothetical text before an edit that replaced one of its words and removed another.
pub fn before_edit(text: &str) -> String {
    let words: Vec<&str> = text.split_inclusive(' ').collect();
    let (third, half) = (words.len() / 3, words.len() / 2);
    let behind = (third + 1).min(half);
    [&words[..third], &["another "], &words[behind..half], &["word "], &words[half..]].concat().concat()
}
