//! Requests that predict their answer: what a client would send that has a text edited.

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::pair::MODEL;

/// Where predictions are taken.
pub const CHAT: &str = "/v1/chat/completions";

/// A seeded conversation of so many output tokens, with a prediction or without.
pub fn asking(prompt: &str, (temperature, max_tokens): (f64, u32), prediction: Option<&str>) -> Value {
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

/// What the assistant says.
pub fn text_of(answer: &Value) -> anyhow::Result<&str> {
    answer["choices"][0]["message"]["content"].as_str().with_context(|| format!("no text in {answer}"))
}

/// The text as it was before somebody replaced one of its words and left another one out.
pub fn before_edit(text: &str) -> String {
    let words: Vec<&str> = text.split_inclusive(' ').collect();
    let (third, half) = (words.len() / 3, words.len() / 2);
    let behind = (third + 1).min(half);
    [&words[..third], &["another "], &words[behind..half], &["word "], &words[half..]].concat().concat()
}
