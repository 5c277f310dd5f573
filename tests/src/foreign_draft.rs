//! The bundled draft with another tokenizer: other ids, and without some of the longest tokens, those that no
//! merge continues from. Its weights were trained on the same language, so its drafts are comparable with the
//! bundled draft's, although it never learned to write the missing tokens in parts.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Map, Value, json};

use crate::checkpoint_copy::CheckpointCopy;
use crate::pair::{self, END_OF_TEXT};

/// Rows of the embedding table, which is also the output projection.
const NUM_IDS: u64 = 4_096;

/// The lowest id of a token that may be left out: lower ids are special tokens and bytes.
const FIRST_LONG: u64 = 260;

/// The modified checkpoint in a temporary directory.
#[derive(Debug)]
pub struct ForeignDraft(CheckpointCopy);

impl ForeignDraft {
    /// A draft that lacks a twentieth of the target's tokens.
    pub fn new() -> anyhow::Result<Self> {
        Self::leaving_out(12)
    }

    /// A draft without the tokens that no merge continues from and whose ids are divisible by `divisor`.
    pub fn leaving_out(divisor: u64) -> anyhow::Result<Self> {
        Self::with_ids(|id| id, divisor)
    }

    /// A draft whose tokenizer does not match its weights, as after a version mix-up: each ordinary token has
    /// the id of another one, so that a translation built from it is wrong throughout.
    pub fn with_a_wrong_tokenizer() -> anyhow::Result<Self> {
        let next = |id| {
            if id < FIRST_LONG { id } else { FIRST_LONG + (id - FIRST_LONG + 1) % (NUM_IDS - FIRST_LONG) }
        };
        Self::with_ids(next, 12)
    }

    /// The bundled draft with new ids for all of its tokens, without leaving any out.
    pub fn renumbered() -> anyhow::Result<Self> {
        Self::with_ids(|id| id, u64::MAX)
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        self.0.directory()
    }

    /// `tokenizer_id` maps the id of an embedding row to the id in the tokenizer, before renumbering. Of the
    /// tokens that no merge continues from, those with an id divisible by `left_out` are left out.
    fn with_ids(tokenizer_id: impl Fn(u64) -> u64, left_out: u64) -> anyhow::Result<Self> {
        let copy = CheckpointCopy::of(&pair::draft_dir())?;
        let inner = inner_tokens(&copy)?;
        let is_left_out = |id: u64| id > FIRST_LONG && id.is_multiple_of(left_out) && !inner.contains(&id);
        copy.edit_json("tokenizer.json", |tokenizer| {
            change_tokenizer(tokenizer, &tokenizer_id, is_left_out)
        })?;
        let mut rows = vec![None; NUM_IDS as usize];
        for id in (0..NUM_IDS).filter(|&id| !is_left_out(id)) {
            rows[renumbered(id) as usize] = Some(id as usize);
        }
        copy.move_rows("model.embed_tokens.weight", &rows)?;
        for file in ["config.json", "generation_config.json"] {
            copy.edit_json(file, |config| {
                for name in ["eos_token_id", "pad_token_id"] {
                    config.insert(name.to_owned(), json!(renumbered(END_OF_TEXT.into())));
                }
            })?;
        }
        Ok(Self(copy))
    }
}

/// Ids of the tokens that some merge continues from.
fn inner_tokens(copy: &CheckpointCopy) -> anyhow::Result<BTreeSet<u64>> {
    let tokenizer: Value = serde_json::from_slice(&std::fs::read(copy.path("tokenizer.json"))?)?;
    let model = &tokenizer["model"];
    let merges = model["merges"].as_array().context("a BPE tokenizer has merges")?;
    let parts = merges.iter().filter_map(Value::as_array).flatten().filter_map(Value::as_str);
    Ok(parts.filter_map(|part| model["vocab"][part].as_u64()).collect())
}

/// A bijection, because 7 and the number of ids are coprime.
fn renumbered(id: u64) -> u64 {
    (7 * id + 5) % NUM_IDS
}

fn change_tokenizer(
    tokenizer: &mut Map<String, Value>,
    tokenizer_id: impl Fn(u64) -> u64,
    is_left_out: impl Fn(u64) -> bool,
) {
    let new_id = |id: &Value| id.as_u64().map(|id| renumbered(tokenizer_id(id)));
    if let Some(model) = tokenizer.get_mut("model") {
        let vocabulary = model["vocab"].as_object().cloned().unwrap_or_default();
        let is_removed = |token: &str| vocabulary.get(token).and_then(Value::as_u64).is_none_or(&is_left_out);
        if let Some(merges) = model["merges"].as_array_mut() {
            merges.retain(|merge| {
                let [left, right] = [0, 1].map(|side| merge[side].as_str().unwrap_or_default());
                ![left, right, &format!("{left}{right}")].into_iter().any(&is_removed)
            });
        }
        let kept = vocabulary.iter().filter(|(token, _)| !is_removed(token));
        model["vocab"] = kept.map(|(token, id)| (token.clone(), json!(new_id(id)))).collect();
    }
    for token in tokenizer.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
        token["id"] = json!(new_id(&token["id"]));
    }
}

impl CheckpointCopy {
    /// Permutes the rows of a bf16 matrix in `model.safetensors`: row i becomes the old row `rows[i]`, or
    /// zeros.
    fn move_rows(&self, tensor: &str, rows: &[Option<usize>]) -> anyhow::Result<()> {
        let mut moved = Ok(());
        self.edit("model.safetensors", |bytes| {
            moved = crate::checkpoint_copy::bf16_bytes(bytes, tensor).map(|range| {
                let len = range.len() / rows.len();
                let old = bytes[range.clone()].to_vec();
                for (new, from) in bytes[range].chunks_exact_mut(len).zip(rows) {
                    match from {
                        Some(from) => new.copy_from_slice(&old[from * len..][..len]),
                        None => new.fill(0),
                    }
                }
            });
        })?;
        moved.with_context(|| format!("the rows of {tensor}"))
    }
}
