//! Fields that OpenAI's API accepts in several formats. Deserialized by hand, so that errors for values of
//! the wrong type say what is expected.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::api::integer;
use crate::api::object::Object;
use crate::request::raw::RawPrompt;
use text::Framing;

/// `prompt`: a text, several texts, token ids, or several lists of token ids.
#[derive(Debug, Clone, Default)]
pub struct Prompts(pub Vec<RawPrompt>);

impl Prompts {
    /// Returns the prompts, with the client's choice of `add_special_tokens`.
    pub(super) fn into_raw(self, add_special_tokens: Option<bool>) -> Vec<RawPrompt> {
        let with_framing = |prompt: RawPrompt| match prompt {
            RawPrompt::Text { text, .. } => RawPrompt::Text { text, framing: framing(add_special_tokens) },
            other => other,
        };
        self.0.into_iter().map(with_framing).collect()
    }
}

/// Reads `add_special_tokens` of a text, true by default.
pub fn framing(add_special_tokens: Option<bool>) -> Framing {
    if add_special_tokens == Some(false) { Framing::AsIs } else { Framing::Add }
}

/// `stop`: a string or several.
#[derive(Debug, Clone, Default)]
pub struct Stops(pub Vec<String>);

/// `content` of a message: a text, or parts of type `text`, which are joined by line breaks.
#[derive(Debug, Clone)]
pub struct Content(pub String);

/// `logprobs`: a boolean in chat completions, a number in completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logprobs {
    /// In chat completions.
    Switch(bool),
    /// In completions.
    Count(i64),
}

/// An integer. Values above `i64::MAX` are clamped, so that the later bounds check refuses them.
#[derive(Debug, Clone, Copy)]
struct ClampedInt(i64);

impl<'de> Deserialize<'de> for ClampedInt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ClampedIntVisitor;
        impl Visitor<'_> for ClampedIntVisitor {
            type Value = ClampedInt;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id")
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<ClampedInt, E> {
                Ok(ClampedInt(value))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<ClampedInt, E> {
                Ok(ClampedInt(i64::try_from(value).unwrap_or(i64::MAX)))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<ClampedInt, E> {
                integer::from_float(value, &self).map(ClampedInt)
            }
        }
        deserializer.deserialize_i64(ClampedIntVisitor)
    }
}

/// One item of a list of prompts.
enum PromptItem {
    Text(String),
    Id(i64),
    Ids(Vec<i64>),
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = PromptItem;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id, or a list of token ids")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<PromptItem, E> {
                Ok(PromptItem::Text(text.to_owned()))
            }
            fn visit_i64<E: Error>(self, id: i64) -> Result<PromptItem, E> {
                Ok(PromptItem::Id(id))
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<PromptItem, E> {
                Ok(PromptItem::Id(i64::try_from(id).unwrap_or(i64::MAX)))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<PromptItem, E> {
                integer::from_float(value, &self).map(PromptItem::Id)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<PromptItem, A::Error> {
                let ids = Vec::<ClampedInt>::deserialize(SeqAccessDeserializer::new(items))?;
                Ok(PromptItem::Ids(ids.into_iter().map(|ClampedInt(id)| id).collect()))
            }
        }
        deserializer.deserialize_any(ItemVisitor)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        fn plain(text: String) -> RawPrompt {
            RawPrompt::Text { text, framing: Framing::Add }
        }
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a string, a list of strings, a list of token ids, or a list of lists of token ids",
                )
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![plain(text.to_owned())]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
                let mut prompts = Vec::new();
                let mut ids = Vec::new();
                while let Some(item) = items.next_element()? {
                    match item {
                        PromptItem::Text(text) => prompts.push(plain(text)),
                        PromptItem::Ids(ids) => prompts.push(RawPrompt::TokenIds(ids)),
                        PromptItem::Id(id) => ids.push(id),
                    }
                }
                let is_text = |prompt: &RawPrompt| matches!(prompt, RawPrompt::Text { .. });
                let homogeneous = prompts.windows(2).all(|pair| is_text(&pair[0]) == is_text(&pair[1]));
                if !homogeneous || !(ids.is_empty() || prompts.is_empty()) {
                    return Err(Error::custom("a list of prompts must contain items of one type"));
                }
                if !ids.is_empty() {
                    prompts.push(RawPrompt::TokenIds(ids));
                }
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}

impl<'de> Deserialize<'de> for Stops {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopsVisitor;
        impl<'de> Visitor<'de> for StopsVisitor {
            type Value = Stops;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Stops, E> {
                Ok(Stops(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Stops, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(Stops)
            }
        }
        deserializer.deserialize_any(StopsVisitor)
    }
}

/// One part of a message's content.
#[derive(Deserialize)]
struct ContentPart {
    r#type: String,
    #[serde(default)]
    text: Option<String>,
    // Content of part types that are refused.
    #[serde(default, rename = "image_url", alias = "input_audio", alias = "file", alias = "refusal")]
    _other: IgnoredAny,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of text parts")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut texts: Vec<String> = Vec::new();
                while let Some(Object(part)) = parts.next_element::<Object<ContentPart>>()? {
                    match part {
                        ContentPart { r#type, text: Some(text), .. } if r#type == "text" => texts.push(text),
                        ContentPart { r#type, .. } if r#type == "text" => {
                            return Err(Error::missing_field("text"));
                        }
                        ContentPart { r#type, .. } => {
                            let reason =
                                format!("a content part of type `{}` is not supported, only text is", r#type);
                            return Err(Error::custom(reason));
                        }
                    }
                }
                Ok(Content(texts.join("\n")))
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LogprobsVisitor;
        impl Visitor<'_> for LogprobsVisitor {
            type Value = Logprobs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a boolean for a chat completion, a whole number for a completion")
            }
            fn visit_bool<E: Error>(self, on: bool) -> Result<Logprobs, E> {
                Ok(Logprobs::Switch(on))
            }
            fn visit_i64<E: Error>(self, count: i64) -> Result<Logprobs, E> {
                Ok(Logprobs::Count(count))
            }
            fn visit_u64<E: Error>(self, count: u64) -> Result<Logprobs, E> {
                Ok(Logprobs::Count(i64::try_from(count).unwrap_or(i64::MAX)))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Logprobs, E> {
                integer::from_float(value, &self).map(Logprobs::Count)
            }
        }
        deserializer.deserialize_any(LogprobsVisitor)
    }
}

/// `logit_bias`: biases by token id; in JSON the ids are strings.
#[derive(Debug, Clone, Default)]
pub struct LogitBias(pub Vec<(i64, f64)>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasVisitor;
        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = LogitBias;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of biases by token id")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<LogitBias, A::Error> {
                let mut biases = Vec::new();
                while let Some((id, bias)) = entries.next_entry::<String, f64>()? {
                    let id =
                        id.parse().map_err(|_| Error::custom(format!("key `{id}` is not a token id")))?;
                    biases.push((id, bias));
                }
                Ok(LogitBias(biases))
            }
        }
        deserializer.deserialize_map(BiasVisitor)
    }
}
