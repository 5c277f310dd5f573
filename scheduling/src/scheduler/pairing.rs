//! Compatibility of draft workers with targets, and the reason for each mismatch.

use super::events::WorkerInfo;

/// Why a draft worker and a target worker cannot be paired.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PairingError {
    /// Their tokenizers differ.
    #[error("their tokenizers differ")]
    Tokenizer,
    /// Their sampling schemes differ: they draw with different noise.
    #[error("their sampling schemes differ: `{draft}` at the draft, `{target}` at the target")]
    SamplingScheme {
        /// The draft's scheme.
        draft: String,
        /// The target's scheme.
        target: String,
    },
}

/// Checks that `draft` may draft for `target`. A draft worker without a tokenizer works on ids and fits any
/// target.
pub fn check(draft: &WorkerInfo, target: &WorkerInfo) -> Result<(), PairingError> {
    if draft.sampling_scheme != target.sampling_scheme {
        return Err(PairingError::SamplingScheme {
            draft: draft.sampling_scheme.clone(),
            target: target.sampling_scheme.clone(),
        });
    }
    if !draft.tokenizer_fingerprint.is_empty() && draft.tokenizer_fingerprint != target.tokenizer_fingerprint
    {
        return Err(PairingError::Tokenizer);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use speculation::Role;

    use super::*;

    fn worker(fingerprint: &str, scheme: &str) -> WorkerInfo {
        WorkerInfo {
            tokenizer_fingerprint: fingerprint.to_owned(),
            sampling_scheme: scheme.to_owned(),
            ..WorkerInfo::of(Role::Draft, "m")
        }
    }

    #[test]
    fn only_equal_tokenizers_and_schemes_pair() {
        let target = worker("aa", "s1");
        assert_eq!(check(&worker("aa", "s1"), &target), Ok(()));
        assert_eq!(check(&worker("", "s1"), &target), Ok(()), "an n-gram draft has no tokenizer");
        assert_eq!(check(&worker("bb", "s1"), &target), Err(PairingError::Tokenizer));
        let fault = check(&worker("aa", "s2"), &target).unwrap_err();
        assert_eq!(fault.to_string(), "their sampling schemes differ: `s2` at the draft, `s1` at the target");
    }
}
