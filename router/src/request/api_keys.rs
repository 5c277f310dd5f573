//! The API key file: the known keys and their settings.
//!
//! ```text
//! # KEY [NAME] [SETTING=VALUE ..], one key per line
//! sha256:5ca24005b740717ba4f3f6bc48a230700e68c2a4b11ecedb96f169f4efaf1f21 alice models=demo,org/large
//! sk-in-plain-text bob task_type=code priority=7 max_concurrent_requests=4
//! sk-another carol requests_per_minute=60 tokens_per_minute=100000
//! sk-gateway gateway fairness_ids=true
//! sk-logged dave log_requests=true
//! sk-operator eve admin=true
//! ```
//!
//! `printf %s KEY | sha256sum` computes the digest of a key. A file with only digests reveals no key.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::auth::Caller;
use super::check::check_task_type;
use super::key_limits::{KeyLimits, KeyUsage};

/// Prefix of a key given by its digest.
const DIGEST_PREFIX: &str = "sha256:";

const LINE_FORMAT: &str = "KEY [name] [setting=value ..]";

/// SHA-256 of a key.
pub(super) type KeyDigest = [u8; 32];

/// One line of the file.
#[derive(Debug, Clone)]
pub(super) struct ApiKey {
    pub(super) digest: KeyDigest,
    pub(super) caller: Caller,
    limits: KeyLimits,
}

/// Why a key file was refused.
#[derive(Debug, thiserror::Error)]
pub enum ApiKeysError {
    /// The file cannot be read.
    #[error("cannot read the API key file {}: {error}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Cause. Not a `source`, because the text already contains it.
        error: std::io::Error,
    },
    /// A line without a valid key. The error does not repeat the line, because it contains a key.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A file without keys would lock everyone out.
    #[error("the API key file {} contains no keys: write one per line as {LINE_FORMAT}", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Parses the text of a key file; `#` begins a comment line. `path` is for messages.
pub(super) fn parse(text: &str, path: &Path) -> Result<Vec<ApiKey>, ApiKeysError> {
    let mut keys: Vec<ApiKey> = Vec::new();
    for (line_idx, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line_error = |reason| ApiKeysError::Line { path: path.to_owned(), line: line_idx + 1, reason };
        let key = ApiKey::parse(line).map_err(line_error)?;
        if keys.iter().any(|earlier| earlier.digest == key.digest) {
            return Err(line_error("duplicate key, first defined on an earlier line".into()));
        }
        keys.push(key);
    }
    if keys.is_empty() {
        return Err(ApiKeysError::Empty { path: path.to_owned() });
    }
    Ok(keys)
}

pub(super) fn digest(key: &[u8]) -> KeyDigest {
    Sha256::digest(key).into()
}

impl ApiKey {
    /// Takes over the usage of the same key in `previous`, under the new limits.
    pub(super) fn inherit_usage(&mut self, previous: &[Self]) {
        let previous = previous.iter().find(|previous| previous.digest == self.digest);
        if let Some(usage) = previous.and_then(|previous| previous.caller.usage.clone()) {
            usage.set_limits(self.limits);
            self.caller.usage = Some(usage);
        }
    }

    fn parse(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let digest = parse_digest(words.next().ok_or("the line is empty")?)?;
        let isolation_key = u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes"));
        let mut caller = Caller { isolation_key, ..Caller::default() };
        let mut limits = KeyLimits::default();
        for word in words {
            match word.split_once('=') {
                Some((name, value)) => apply_setting(name, value, &mut caller, &mut limits)?,
                None if caller.name.is_none() => caller.name = Some(word.to_owned()),
                None => return Err(format!("unexpected word {word}: a key has only one name")),
            }
        }
        caller.usage = Some(KeyUsage::new(limits));
        Ok(Self { digest, caller, limits })
    }
}

fn apply_setting(name: &str, value: &str, caller: &mut Caller, limits: &mut KeyLimits) -> Result<(), String> {
    match name {
        "task_type" => {
            check_task_type(value).map_err(|error| error.to_string())?;
            caller.task_type = Some(value.to_owned());
        }
        "priority" => {
            caller.priority = value.parse().map_err(|_| format!("priority must be 0 to 255, not {value}"))?;
        }
        "models" => {
            let models: BTreeSet<String> = value.split(',').map(str::to_owned).collect();
            if models.iter().any(String::is_empty) {
                return Err(
                    "models must be a comma-separated list of names, such as models=one,two".to_owned()
                );
            }
            caller.models = Some(Arc::new(models));
        }
        "fairness_ids" => caller.honors_fairness_ids = parse_bool(name, value)?,
        "log_requests" => caller.may_be_logged = parse_bool(name, value)?,
        "admin" => caller.is_operator = parse_bool(name, value)?,
        "max_concurrent_requests" => limits.max_concurrent_requests = Some(parse_positive(name, value)?),
        "requests_per_minute" => limits.requests_per_minute = Some(parse_positive(name, value)?),
        "tokens_per_minute" => limits.tokens_per_minute = Some(parse_positive(name, value)?),
        _ => {
            return Err(format!(
                "unknown setting {name}: expected task_type, priority, models, fairness_ids, \
                 log_requests, admin, max_concurrent_requests, requests_per_minute or tokens_per_minute"
            ));
        }
    }
    Ok(())
}

fn parse_bool(name: &str, value: &str) -> Result<bool, String> {
    value.parse().map_err(|_| format!("{name} must be true or false, not {value}"))
}

fn parse_positive(name: &str, value: &str) -> Result<u32, String> {
    let count = value.parse().ok().filter(|count: &u32| *count > 0);
    count.ok_or_else(|| format!("{name} must be a positive whole number, not {value}"))
}

/// Returns the digest of a key, or the digest that replaces it in the file.
fn parse_digest(word: &str) -> Result<KeyDigest, String> {
    let Some(hex) = word.strip_prefix(DIGEST_PREFIX) else { return Ok(digest(word.as_bytes())) };
    let invalid =
        || format!("{DIGEST_PREFIX} must be followed by 64 hexadecimal digits: printf %s KEY | sha256sum");
    if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(invalid());
    }
    let mut digest = KeyDigest::default();
    for (idx, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * idx..2 * idx + 2], 16).map_err(|_| invalid())?;
    }
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `printf %s sk-one | sha256sum` prints.
    const SK_ONE: &str = "456f1612bd25c6c8455039437bf441f43aa3b7d1c0b0047c712d5036dfebef0d";

    fn parsed(text: &str) -> Result<Vec<ApiKey>, String> {
        parse(text, Path::new("keys")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_sets_the_caller_and_its_limits() {
        let keys = parsed(
            "# keys\n\nsk-one alice task_type=code priority=7 models=a,org/b max_concurrent_requests=4 \
             requests_per_minute=60 tokens_per_minute=100000 log_requests=true\n  sk-two\n",
        )
        .unwrap();
        let alice = &keys[0].caller;
        assert_eq!(alice.name.as_deref(), Some("alice"));
        assert_eq!((alice.task_type.as_deref(), alice.priority), (Some("code"), 7));
        assert!(alice.may_use("a") && alice.may_use("org/b") && !alice.may_use("b"));
        let limits = KeyLimits {
            max_concurrent_requests: Some(4),
            requests_per_minute: Some(60),
            tokens_per_minute: Some(100_000),
        };
        assert_eq!((keys[0].limits, keys[1].limits), (limits, KeyLimits::default()));
        let other = &keys[1].caller;
        assert_eq!((&other.name, other.priority, other.may_use("b")), (&None, 0, true));
        assert_ne!(other.isolation_key, alice.isolation_key);
        assert!(alice.may_be_logged && !other.may_be_logged, "logging is off by default");
    }

    #[test]
    fn a_digest_line_equals_its_plain_key() {
        let hashed = parsed(&format!("{DIGEST_PREFIX}{SK_ONE} alice\n")).unwrap();
        assert_eq!(hashed[0].digest, digest(b"sk-one"));
        assert_eq!(
            parsed(&format!("{DIGEST_PREFIX}{}\n", SK_ONE.to_uppercase())).unwrap()[0].digest,
            hashed[0].digest
        );
        let plain = parsed("sk-one alice\n").unwrap();
        assert_eq!(plain[0].caller.isolation_key, hashed[0].caller.isolation_key);
        let duplicate = parsed(&format!("sk-one\n{DIGEST_PREFIX}{SK_ONE}\n")).unwrap_err();
        assert!(duplicate.contains("line 2: duplicate key, first defined on an earlier line"), "{duplicate}");
    }

    #[test]
    fn errors_name_the_line_but_not_the_key() {
        for (text, expected) in [
            ("sk-one a b\n", "line 1: unexpected word b"),
            ("\nsk-one priority=900\n", "line 2: priority must be 0 to 255, not 900"),
            ("sk-one color=red\n", "line 1: unknown setting color"),
            ("sk-one log_requests=1\n", "line 1: log_requests must be true or false, not 1"),
            ("sk-one admin=yes\n", "line 1: admin must be true or false, not yes"),
            ("sk-one task_type=A!\n", "line 1: task_type"),
            ("sk-one models=a,,b\n", "line 1: models must be a comma-separated list"),
            ("sk-one requests_per_minute=0\n", "line 1: requests_per_minute must be a positive whole number"),
            ("sk-one tokens_per_minute=1e5\n", "line 1: tokens_per_minute must be a positive whole number"),
            ("sk-one max_concurrent_requests=-1\n", "line 1: max_concurrent_requests must be a positive"),
            ("sha256:sk-one alice\n", "line 1: sha256: must be followed by 64 hexadecimal digits"),
            ("sk-one\nsk-one\n", "line 2: duplicate key, first defined on an earlier line"),
            ("# nothing\n", "contains no keys"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
            assert!(!error.contains("sk-one"), "{error}");
        }
    }
}
