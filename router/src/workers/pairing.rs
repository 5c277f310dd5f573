//! Which draft worker may serve which target: pure, and explained where the answer is no.

use proto::v1::WorkerHello;

/// Why a draft worker and a target worker cannot be paired.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PairFault {
    /// They number tokens differently.
    #[error("their tokenizers differ")]
    Tokenizer,
    /// They draw with different noise.
    #[error("the draft draws by `{draft}`, the target by `{target}`")]
    SamplingScheme {
        /// The draft's scheme.
        draft: String,
        /// The target's scheme.
        target: String,
    },
}

/// Whether `draft` may guess for `target`. A draft without a tokenizer works on ids and goes with any.
pub fn check(draft: &WorkerHello, target: &WorkerHello) -> Result<(), PairFault> {
    if draft.sampling_scheme != target.sampling_scheme {
        return Err(PairFault::SamplingScheme {
            draft: draft.sampling_scheme.clone(),
            target: target.sampling_scheme.clone(),
        });
    }
    if !draft.tokenizer_fingerprint.is_empty() && draft.tokenizer_fingerprint != target.tokenizer_fingerprint
    {
        return Err(PairFault::Tokenizer);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(fingerprint: &str, scheme: &str) -> WorkerHello {
        WorkerHello {
            tokenizer_fingerprint: fingerprint.to_owned(),
            sampling_scheme: scheme.to_owned(),
            ..WorkerHello::default()
        }
    }

    #[test]
    fn only_equal_tokenizers_and_schemes_pair() {
        let target = hello("aa", "s1");
        assert_eq!(check(&hello("aa", "s1"), &target), Ok(()));
        assert_eq!(check(&hello("", "s1"), &target), Ok(()), "an n-gram draft has no tokenizer");
        assert_eq!(check(&hello("bb", "s1"), &target), Err(PairFault::Tokenizer));
        let fault = check(&hello("aa", "s2"), &target).unwrap_err();
        assert_eq!(fault.to_string(), "the draft draws by `s2`, the target by `s1`");
    }
}
