//! Text files of a checkpoint (tokenizer, chat template, defaults), served to routers so that they need no
//! model files.

use std::borrow::Cow;
use std::io;
use std::path::Path;

use bytes::Bytes;
use proto::{MAX_ASSET_BYTES, v1};
use sha2::{Digest, Sha256};
use speculation::fingerprint::{TokenList, token_list_from_json};
use text::{ModelText, ModelTextError, asset, with_added_tokens};

/// Files that a router may fetch.
const ASSET_NAMES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
];

/// Why the text files of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AssetError {
    /// A file exists but cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// The I/O error.
        source: io::Error,
    },
    /// A file is implausibly large.
    #[error("{path} has {bytes} bytes, at most {MAX_ASSET_BYTES} are accepted")]
    TooLarge {
        /// The file.
        path: String,
        /// Its size.
        bytes: u64,
    },
    /// The tokens of tokenizer_config.json cannot be added to the tokenizer.
    #[error("{directory}: {reason}")]
    AddedTokens {
        /// The checkpoint.
        directory: String,
        /// What is wrong.
        reason: ModelTextError,
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
    /// Reads the files that exist; only tokenizer.json is required. It is held with the tokens that only
    /// tokenizer_config.json has, so that everything that reads it finds the same tokens.
    pub fn load(model_dir: &Path) -> Result<Self, AssetError> {
        let mut files = Vec::new();
        for name in ASSET_NAMES {
            if let Some(bytes) = read_file(&model_dir.join(name))? {
                files.push((described(name, &bytes), Bytes::from(bytes)));
            }
        }
        Self::with_tokens(model_dir, files)
    }

    /// Creates assets from files in memory, which must include tokenizer.json.
    pub fn from_files(files: Vec<(&str, String)>) -> Result<Self, AssetError> {
        let files: Vec<(v1::Asset, Bytes)> = files
            .into_iter()
            .map(|(name, text)| (described(name, text.as_bytes()), Bytes::from(text)))
            .collect();
        Self::with_tokens(Path::new("(generated)"), files)
    }

    /// Adds the tokens that only tokenizer_config.json has.
    fn with_tokens(model_dir: &Path, mut files: Vec<(v1::Asset, Bytes)>) -> Result<Self, AssetError> {
        let bytes_of =
            |name| files.iter().find(|(asset, _)| asset.name == name).map(|(_, bytes)| bytes.clone());
        if let Some(tokenizer) = bytes_of(asset::TOKENIZER) {
            let config = bytes_of(asset::TOKENIZER_CONFIG);
            let whole = with_added_tokens(&tokenizer, config.as_deref()).map_err(|reason| {
                AssetError::AddedTokens { directory: model_dir.display().to_string(), reason }
            })?;
            if let Cow::Owned(whole) = whole {
                files.retain(|(asset, _)| asset.name != asset::TOKENIZER);
                files.insert(0, (described(asset::TOKENIZER, &whole), Bytes::from(whole)));
            }
        }
        let token_list = token_list(model_dir, &files)?;
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

/// Reads a file; `None` if there is none. A link whose file is missing is an error, because without the file
/// prompts might be others. A link may lead to a device, which would be read without end.
fn read_file(path: &Path) -> Result<Option<Vec<u8>>, AssetError> {
    let shown = || path.display().to_string();
    let failed = |source| AssetError::Read { path: shown(), source };
    if std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::other("it is not a regular file")));
    }
    if metadata.len() > MAX_ASSET_BYTES {
        return Err(AssetError::TooLarge { path: shown(), bytes: metadata.len() });
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    engine::check_lfs_pointer(&bytes).map_err(failed)?;
    Ok(Some(bytes))
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

fn described(name: &str, bytes: &[u8]) -> v1::Asset {
    v1::Asset { name: name.to_owned(), sha256: hex(&Sha256::digest(bytes)), size: bytes.len() as u64 }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_may_be_missing_but_is_no_device_pointer_or_dangling_link() {
        assert!(matches!(read_file(Path::new("/dev/no such file")), Ok(None)));
        let error = read_file(Path::new("/dev/null")).unwrap_err().to_string();
        assert_eq!(error, "cannot read /dev/null: it is not a regular file");
        let dir = tempfile::tempdir().unwrap();
        let (pointer, link) = (dir.path().join("pointer"), dir.path().join("link"));
        std::fs::write(&pointer, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap();
        std::os::unix::fs::symlink("missing", &link).unwrap();
        for (path, expected) in [(pointer, "git lfs pull"), (link, "No such file")] {
            let error = read_file(&path).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_served_tokenizer_has_the_tokens_of_the_configuration() {
        let tokenizer = json!({ "model": { "type": "BPE", "vocab": { "a": 0, "b": 1 }, "merges": [] } });
        let load = |id: &str| {
            let listed = json!({ "added_tokens_decoder": { id: { "content": "<x>", "special": true } } });
            Assets::from_files(vec![
                ("tokenizer.json", tokenizer.to_string()),
                ("tokenizer_config.json", listed.to_string()),
            ])
        };
        let assets = load("2").unwrap();
        assert_eq!((assets.token_list().num_ids(), assets.token_list().get(2)), (3, Some("<x>")));
        let served = assets.list().into_iter().find(|asset| asset.name == "tokenizer.json").unwrap();
        let bytes = assets.get("tokenizer.json").unwrap();
        assert_eq!((served.size, served.sha256), (bytes.len() as u64, hex(&Sha256::digest(&bytes))));
        assets.check_text().unwrap();

        let error = load("3").unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json") && error.contains("its id is 2"), "{error}");
    }
}
