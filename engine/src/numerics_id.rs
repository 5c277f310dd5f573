//! Id of a class of engines with equal bits (docs/contract.md C4). It is sent in the handshake, determines
//! between which targets a failover keeps the text, and is the `system_fingerprint` that clients see.

use sha2::{Digest, Sha256};

/// Raised with every change to docs/contract.md part C.
const CONTRACT_VERSION: &str = "2";

/// Hex digits of the id: 64 bits, enough to distinguish the engines of one operator.
const DIGITS: usize = 16;

/// Names of kernels and devices: those with equal names compute equal bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NumericsClass {
    pub(crate) kernel_class: &'static str,
    pub(crate) device_class: &'static str,
}

/// Everything that determines an engine's bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NumericsParts<'a> {
    /// Content of config.json, which determines shapes, norms, rope and windows.
    pub(crate) config: &'a [u8],
    /// Hash over every byte of the weight files.
    pub(crate) checkpoint: [u8; 32],
    pub(crate) weight_format: &'a str,
    pub(crate) kv_format: &'a str,
    pub(crate) kernel_class: &'a str,
    pub(crate) device_class: &'a str,
}

impl NumericsParts<'_> {
    pub(crate) fn id(&self) -> String {
        let mut hash = Sha256::new();
        let words =
            [self.weight_format, self.kv_format, self.kernel_class, self.device_class, CONTRACT_VERSION];
        hash.update(Sha256::digest(self.config));
        hash.update(self.checkpoint);
        for word in words {
            hash.update((word.len() as u64).to_le_bytes());
            hash.update(word);
        }
        let mut id: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        id.truncate(DIGITS);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_depends_on_every_part() {
        let parts = NumericsParts {
            config: b"{}",
            checkpoint: [7; 32],
            weight_format: "f32",
            kv_format: "f32",
            kernel_class: "a",
            device_class: "cpu",
        };
        assert_eq!(parts.id(), NumericsParts { ..parts }.id());
        let others = [
            NumericsParts { config: b"{ }", ..parts },
            NumericsParts { checkpoint: [8; 32], ..parts },
            NumericsParts { weight_format: "bf16", ..parts },
            NumericsParts { kv_format: "bf16", ..parts },
            NumericsParts { kernel_class: "b", ..parts },
            NumericsParts { device_class: "cuda", ..parts },
        ];
        assert!(others.iter().all(|other| other.id() != parts.id()));
        assert_eq!(parts.id().len(), DIGITS);
    }
}
