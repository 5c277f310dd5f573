//! Text files of a checkpoint (tokenizer, chat template, defaults), served to routers so that they need no
//! model files.

use std::path::Path;

use bytes::Bytes;
use proto::v1;
use sha2::{Digest, Sha256};
use speculation::fingerprint::{TokenList, token_list_from_json};
use text::{ModelText, ModelTextError};

/// Files that a router may fetch.
pub const ASSET_NAMES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "config.json",
];

/// Maximum size of an asset, in bytes.
const MAX_ASSET_BYTES: u64 = 256 << 20;

/// Why the text files of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AssetError {
    /// A file exists but cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// The I/O error.
        source: std::io::Error,
    },
    /// A file is implausibly large.
    #[error("{path} has {bytes} bytes, at most {MAX_ASSET_BYTES} are accepted")]
    TooLarge {
        /// The file.
        path: String,
        /// Its size.
        bytes: u64,
    },
    /// The tokenizer is missing or invalid.
    #[error("{path}: {reason}")]
    Tokenizer {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The text files in memory with their hashes, and the token list that draft and target must share.
#[derive(Debug, Clone)]
pub struct Assets {
    files: Vec<(v1::Asset, Bytes)>,
    token_list: TokenList,
}

impl Assets {
    /// Reads the files that exist; only tokenizer.json is required.
    pub fn load(model_dir: &Path) -> Result<Self, AssetError> {
        let mut files = Vec::new();
        for name in ASSET_NAMES {
            let path = model_dir.join(name);
            let shown = path.display().to_string();
            let bytes = match std::fs::metadata(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Ok(metadata) if metadata.len() > MAX_ASSET_BYTES => {
                    return Err(AssetError::TooLarge { path: shown, bytes: metadata.len() });
                }
                _ => std::fs::read(&path).map_err(|source| AssetError::Read { path: shown, source })?,
            };
            files.push((asset(name, &bytes), Bytes::from(bytes)));
        }
        let token_list = token_list(model_dir, &files)?;
        Ok(Self { files, token_list })
    }

    /// Creates assets from generated files, which must include tokenizer.json.
    pub fn from_files(files: Vec<(&str, String)>) -> Result<Self, AssetError> {
        let files: Vec<(v1::Asset, Bytes)> =
            files.into_iter().map(|(name, text)| (asset(name, text.as_bytes()), Bytes::from(text))).collect();
        let token_list = token_list(Path::new("(generated)"), &files)?;
        Ok(Self { files, token_list })
    }

    /// Names, hashes and sizes of the files, for the handshake.
    pub fn list(&self) -> Vec<v1::Asset> {
        self.files.iter().map(|(asset, _)| asset.clone()).collect()
    }

    /// Content of one file.
    pub fn get(&self, name: &str) -> Option<Bytes> {
        self.files.iter().find(|(asset, _)| asset.name == name).map(|(_, bytes)| bytes.clone())
    }

    /// Loads tokenizer and chat template the way a router does, to check that a router can use them.
    pub fn check_text(&self) -> Result<(), ModelTextError> {
        let bytes = |name: &str| self.files.iter().find(|(asset, _)| asset.name == name);
        ModelText::from_assets(|name| bytes(name).map(|(_, bytes)| bytes.as_ref())).map(drop)
    }

    /// The tokenizer's vocabulary, by id.
    pub fn token_list(&self) -> &TokenList {
        &self.token_list
    }
}

fn token_list(model_dir: &Path, files: &[(v1::Asset, Bytes)]) -> Result<TokenList, AssetError> {
    let broken = |reason: String| AssetError::Tokenizer {
        path: model_dir.join("tokenizer.json").display().to_string(),
        reason,
    };
    let (_, bytes) = files
        .iter()
        .find(|(asset, _)| asset.name == "tokenizer.json")
        .ok_or_else(|| broken("is missing; save it with the tokenizer's save_pretrained".to_owned()))?;
    let text = std::str::from_utf8(bytes).map_err(|error| broken(error.to_string()))?;
    token_list_from_json(text).map_err(|error| broken(error.to_string()))
}

fn asset(name: &str, bytes: &[u8]) -> v1::Asset {
    v1::Asset { name: name.to_owned(), sha256: hex(&Sha256::digest(bytes)), size: bytes.len() as u64 }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
