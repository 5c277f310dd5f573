//! Who is asking: API keys from a file. Keys are kept and compared as SHA-256 digests, every one of them for every
//! request and in constant time, so that an answer's timing tells nothing about a key.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::check::check_task_type;
use crate::error::RouterError;

/// Who sent a request, and what their key says of their requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Caller {
    /// The key's name, for logs and traces.
    pub name: Option<String>,
    /// For requests that do not say what they are.
    pub task_type: Option<String>,
    /// The most urgent priority that the key may have; lower is more urgent.
    pub priority: u8,
    /// Callers of different keys never share prefix blocks.
    pub isolation_key: u64,
}

/// Whether, and by which keys, callers are told apart.
#[derive(Debug, Clone, Default)]
pub enum Auth {
    /// Everyone may ask; for a router that listens on loopback only.
    #[default]
    Open,
    /// Only who holds one of these keys.
    Keys(Arc<[ApiKey]>),
}

/// One line of the key file.
#[derive(Debug, Clone)]
pub struct ApiKey {
    digest: [u8; 32],
    caller: Caller,
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ApiKeysError {
    /// Not readable.
    #[error("cannot read the api key file {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line that is not `KEY [name] [task_type=..] [priority=..]`. The line itself is not repeated: it holds a key.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// No key at all would lock everybody out.
    #[error("the api key file {} holds no key: write one a line as KEY [name] [task_type=..] [priority=..]", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

impl Auth {
    /// Reads a key file: one key a line as `KEY [name] [task_type=..] [priority=..]`; `#` begins a comment line.
    pub fn from_file(path: &Path) -> Result<Self, ApiKeysError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ApiKeysError::Unreadable { path: path.to_owned(), source })?;
        let mut keys: Vec<ApiKey> = Vec::new();
        for (line_idx, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let refused = |reason| ApiKeysError::Line { path: path.to_owned(), line: line_idx + 1, reason };
            let key = ApiKey::parse(line).map_err(refused)?;
            if keys.iter().any(|known| known.digest == key.digest) {
                return Err(refused("this key stands on an earlier line too".into()));
            }
            keys.push(key);
        }
        if keys.is_empty() {
            return Err(ApiKeysError::Empty { path: path.to_owned() });
        }
        Ok(Self::Keys(keys.into()))
    }

    /// Whether everyone may ask.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    /// Who sent a request with this `authorization` header.
    pub fn authenticate(&self, authorization: Option<&[u8]>) -> Result<Caller, RouterError> {
        let Self::Keys(keys) = self else { return Ok(Caller::default()) };
        let header = authorization.ok_or(RouterError::Unauthenticated(
            "an API key is required: send it as `Authorization: Bearer KEY`",
        ))?;
        let key = bearer_key(header)
            .ok_or(RouterError::Unauthenticated("the authorization header must be `Bearer KEY`"))?;
        let digest = digest(key);
        let mut found = None;
        for known in keys.iter() {
            if bool::from(known.digest.ct_eq(&digest)) {
                found = Some(&known.caller);
            }
        }
        found.cloned().ok_or(RouterError::Unauthenticated("the API key is not known"))
    }
}

impl ApiKey {
    fn parse(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let key = words.next().ok_or("the line is empty")?;
        let digest = digest(key.as_bytes());
        let isolation_key = u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes"));
        let mut caller = Caller { isolation_key, ..Caller::default() };
        for word in words {
            match word.split_once('=') {
                Some(("task_type", value)) => {
                    check_task_type(value).map_err(|error| error.to_string())?;
                    caller.task_type = Some(value.to_owned());
                }
                Some(("priority", value)) => {
                    caller.priority =
                        value.parse().map_err(|_| format!("priority must be 0 to 255, not {value}"))?;
                }
                Some((name, _)) => {
                    return Err(format!("unknown setting {name}: known are task_type and priority"));
                }
                None if caller.name.is_none() => caller.name = Some(word.to_owned()),
                None => return Err(format!("unexpected word {word}: a key has one name")),
            }
        }
        Ok(Self { digest, caller })
    }
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// The key of `Bearer KEY`; the scheme's case does not matter.
fn bearer_key(header: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = header.split_at_checked(7)?;
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        return None;
    }
    let key = rest.trim_ascii();
    (!key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_text(text: &str) -> Result<Auth, ApiKeysError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, text).unwrap();
        Auth::from_file(&path)
    }

    #[test]
    fn keys_carry_their_callers_defaults() {
        let auth = from_text("# keys\n\nsk-one alice task_type=code priority=7\n  sk-two\n").unwrap();
        let alice = auth.authenticate(Some(b"Bearer sk-one")).unwrap();
        assert_eq!(alice.name.as_deref(), Some("alice"));
        assert_eq!((alice.task_type.as_deref(), alice.priority), (Some("code"), 7));
        let other = auth.authenticate(Some(b"bearer  sk-two ")).unwrap();
        assert_eq!((other.name, other.priority), (None, 0));
        assert_ne!(other.isolation_key, alice.isolation_key);
    }

    #[test]
    fn what_is_no_known_key_is_refused() {
        let auth = from_text("sk-one\n").unwrap();
        for header in
            [None, Some(&b"Bearer sk-on"[..]), Some(b"Bearer "), Some(b"Basic sk-one"), Some(b"sk-one")]
        {
            let error = auth.authenticate(header).unwrap_err();
            assert_eq!(error.meaning().status, 401, "{header:?}");
            assert!(!error.to_string().contains("sk-on"), "a key must not be repeated: {error}");
        }
        assert_eq!(Auth::Open.authenticate(None).unwrap(), Caller::default());
    }

    #[test]
    fn a_faulty_file_names_the_line_and_never_the_key() {
        for (text, expected) in [
            ("sk-one a b\n", "line 1: unexpected word b"),
            ("\nsk-one priority=900\n", "line 2: priority must be 0 to 255, not 900"),
            ("sk-one color=red\n", "line 1: unknown setting color"),
            ("sk-one task_type=A!\n", "line 1: task_type"),
            ("sk-one\nsk-one\n", "line 2: this key stands on an earlier line too"),
            ("# nothing\n", "holds no key"),
        ] {
            let error = from_text(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
            assert!(!error.contains("sk-one"), "{error}");
        }
    }
}
