//! Tokens that only tokenizer_config.json has (`added_tokens_decoder`). transformers adds them to the
//! tokenizer when it loads it, and so does everything here that reads one.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::{Value, json};
use speculation::TokenId;

use super::ModelTextError;

const FIELD: &str = "added_tokens_decoder";

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    added_tokens_decoder: Option<BTreeMap<String, AddedToken>>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<TokenWithId>,
}

#[derive(Deserialize)]
struct TokenWithId {
    id: TokenId,
    content: String,
}

/// Returns a tokenizer.json with the tokens that only tokenizer_config.json has. Each must have the next free
/// id, which is the one that it gets; if not, the two files do not belong together.
pub fn with_added_tokens<'a>(
    tokenizer: &'a [u8],
    config: Option<&[u8]>,
) -> Result<Cow<'a, [u8]>, ModelTextError> {
    let Some(config) = config else { return Ok(Cow::Borrowed(tokenizer)) };
    let bad_config = |reason: String| ModelTextError::TokenizerConfig { reason };
    let config: Config = serde_json::from_slice(config).map_err(|error| bad_config(error.to_string()))?;
    let listed = config.added_tokens_decoder.unwrap_or_default();
    if listed.is_empty() {
        return Ok(Cow::Borrowed(tokenizer));
    }
    let known: Tokenizer = serde_json::from_slice(tokenizer).map_err(ModelTextError::tokenizer)?;
    let mut missing = BTreeMap::new();
    for (id, token) in listed {
        let is_known = known.added_tokens.iter().any(|known| known.content == token.content);
        if token.content.is_empty() || is_known {
            continue;
        }
        let id: TokenId =
            id.parse().map_err(|_| bad_config(format!("{FIELD} has \"{id}\", expected a token id")))?;
        missing.insert(id, token);
    }
    if missing.is_empty() {
        return Ok(Cow::Borrowed(tokenizer));
    }

    let mut tokenizer: Value = serde_json::from_slice(tokenizer).map_err(ModelTextError::tokenizer)?;
    let vocabulary = vocabulary(&tokenizer);
    let num_tokens = vocabulary.len() as TokenId;
    let mut next_id = known.added_tokens.iter().map(|token| token.id + 1).fold(num_tokens, TokenId::max);
    let mut added = Vec::new();
    for (id, token) in &missing {
        let actual = vocabulary.get(token.content.as_str()).copied().unwrap_or(next_id);
        if actual != *id {
            return Err(bad_config(format!(
                "{FIELD} has the token {:?} with id {id}, but in {} its id is {actual}: save the tokenizer again with \
                 save_pretrained",
                token.content,
                super::asset::TOKENIZER
            )));
        }
        next_id = next_id.max(id + 1);
        added.push(json!({
            "id": id,
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized.unwrap_or(!token.special),
            "special": token.special,
        }));
    }
    match tokenizer.get_mut("added_tokens").and_then(Value::as_array_mut) {
        Some(tokens) => tokens.extend(added),
        None => tokenizer["added_tokens"] = Value::Array(added),
    }
    serde_json::to_vec(&tokenizer).map(Cow::Owned).map_err(ModelTextError::tokenizer)
}

/// Ids of the model's tokens: an object of ids, or a list of [token, score].
fn vocabulary(tokenizer: &Value) -> HashMap<&str, TokenId> {
    match &tokenizer["model"]["vocab"] {
        Value::Object(ids) => ids
            .iter()
            .filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?.try_into().ok()?)))
            .collect(),
        Value::Array(list) => {
            (0..).zip(list).filter_map(|(id, entry)| Some((entry[0].as_str()?, id))).collect()
        }
        _ => HashMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Framing, ModelText, asset};

    fn tokenizer() -> Vec<u8> {
        let known = json!({ "id": 2, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false });
        let model = json!({ "type": "WordLevel", "vocab": { "a": 0, "b": 1, "<s>": 2 }, "unk_token": "a" });
        let tokenizer = json!({ "version": "1.0", "added_tokens": [known], "pre_tokenizer": { "type": "Whitespace" },
            "model": model });
        tokenizer.to_string().into_bytes()
    }

    fn config(listed: &Value) -> Vec<u8> {
        json!({ "added_tokens_decoder": listed }).to_string().into_bytes()
    }

    #[test]
    fn tokens_of_the_configuration_are_added_in_order() {
        let token = |content: &str, special: bool| json!({ "content": content, "special": special });
        // In the order of numbers, not of texts.
        let mut listed = json!({ "2": token("<s>", true), "1": token("b", true) });
        for id in 3..12 {
            listed[id.to_string()] = token(&format!("<{id}>"), id == 11);
        }
        let (tokenizer, config) = (tokenizer(), config(&listed));
        let fetch = |name: &str| match name {
            asset::TOKENIZER => Some(tokenizer.as_slice()),
            asset::TOKENIZER_CONFIG => Some(config.as_slice()),
            _ => None,
        };
        let text = ModelText::from_assets(fetch).unwrap();
        assert_eq!(text.encode("a<11>b<3>", Framing::AsIs).unwrap(), [0, 11, 1, 3]);
        assert_eq!((text.vocabulary().len(), text.vocabulary().text_bytes(11)), (12, &b""[..]));
        assert_eq!(text.vocabulary().text_bytes(3), b"<3>");

        let whole = with_added_tokens(&tokenizer, Some(&config)).unwrap();
        assert!(
            matches!(with_added_tokens(&whole, Some(&config)), Ok(Cow::Borrowed(_))),
            "nothing is missing"
        );
        assert!(matches!(with_added_tokens(&tokenizer, None), Ok(Cow::Borrowed(_))));
    }

    #[test]
    fn other_ids_are_refused() {
        for (listed, words) in [
            (json!({ "5": { "content": "<x>" } }), ["\"<x>\" with id 5", "its id is 3"]),
            (json!({ "3": { "content": "b" } }), ["\"b\" with id 3", "its id is 1"]),
            (json!({ "x": { "content": "<x>" } }), ["\"x\"", "a token id"]),
        ] {
            let error = with_added_tokens(&tokenizer(), Some(&config(&listed))).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
