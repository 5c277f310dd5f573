//! What the memory for KV allows: the number of blocks and the longest sequence. Errors name the setting that
//! the operator gave.

use cpu_kernels::BLOCK_SIZE;

use crate::EngineError;
use crate::cuda::CudaError;
use crate::model_config::ModelConfig;
use crate::options::LoadOptions;

/// Maximum number of blocks. On GPUs every slot, block * 16 + offset, has a number of 32 bits, and the
/// largest such number means no slot.
const MAX_BLOCKS: u32 = u32::MAX / BLOCK_SIZE as u32;

/// The setting that determines the size of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum KvSize {
    /// [`LoadOptions::kv_memory_bytes`]: bytes over all ranks of this process.
    Bytes(u64),
    /// [`crate::cuda::GpuOptions::memory_utilization`]: share of each GPU's memory that may be used in total.
    /// KV gets what weights and a forward's workspace leave of it.
    Utilization(f32),
}

impl KvSize {
    /// The setting in use: a utilization takes precedence.
    pub(crate) fn new(options: &LoadOptions, memory_utilization: Option<f32>) -> Self {
        memory_utilization.map_or(Self::Bytes(options.kv_memory_bytes), Self::Utilization)
    }

    /// Name of the setting.
    fn option(self) -> &'static str {
        match self {
            Self::Bytes(_) => "kv_memory_bytes",
            Self::Utilization(_) => "gpu_memory_utilization",
        }
    }

    /// The flag of workers that sets it.
    fn flag(self) -> &'static str {
        match self {
            Self::Bytes(_) => "--kv-memory",
            Self::Utilization(_) => "--gpu-memory-utilization",
        }
    }

    /// The error for a value that cannot be used.
    pub(crate) fn refuse(self, reason: String) -> EngineError {
        let value = match self {
            Self::Bytes(bytes) => bytes.to_string(),
            Self::Utilization(utilization) => utilization.to_string(),
        };
        EngineError::BadOption { option: self.option(), value, reason }
    }

    /// Number of blocks of `block_bytes` in `bytes`, at least one and at most [`MAX_BLOCKS`].
    pub(crate) fn num_blocks(self, bytes: u64, block_bytes: u64) -> Result<u32, EngineError> {
        match bytes / block_bytes {
            0 => Err(self.refuse(format!(
                "{bytes} bytes for KV are less than one block of {BLOCK_SIZE} tokens, {block_bytes} bytes: \
                 raise {}",
                self.flag()
            ))),
            blocks => Ok(u32::try_from(blocks).unwrap_or(u32::MAX).min(MAX_BLOCKS)),
        }
    }

    /// The error of a rank that failed to allocate its KV.
    pub(crate) fn failed_to_allocate(self, error: EngineError, rank: usize) -> EngineError {
        match error {
            EngineError::Cuda(CudaError::OutOfMemory { bytes, free, .. }) => self.refuse(format!(
                "the gpu of rank {rank} has {free} bytes free beside the weights, and KV needs {bytes} there: \
                 lower {}",
                self.flag()
            )),
            other => other,
        }
    }
}

/// Refuses KV options that do not suit the model, as far as that is known before the weights are read.
/// `block_bytes` is the size of a block over all ranks of this process.
pub(crate) fn check_kv(
    kv_size: KvSize,
    options: &LoadOptions,
    config: &ModelConfig,
    block_bytes: u64,
) -> Result<(), EngineError> {
    let kv = match kv_size {
        KvSize::Bytes(bytes) => Some((kv_size, kv_size.num_blocks(bytes, block_bytes)?)),
        KvSize::Utilization(_) => None,
    };
    max_model_len(options, config, kv).map(drop)
}

/// The longest sequence: as the option says, or what the model and a KV cache of this many blocks allow.
pub(crate) fn max_model_len(
    options: &LoadOptions,
    config: &ModelConfig,
    kv: Option<(KvSize, u32)>,
) -> Result<u32, EngineError> {
    let kv_tokens = kv.map_or(u64::MAX, |(_, blocks)| u64::from(blocks) * BLOCK_SIZE as u64);
    let max = config.max_len.min(u32::try_from(kv_tokens).unwrap_or(u32::MAX));
    match options.max_model_len {
        None => Ok(max),
        Some(len) if (1..=max).contains(&len) => Ok(len),
        Some(len) => {
            let held = match kv {
                Some((size, _)) if kv_tokens < u64::from(config.max_len) => {
                    format!(", {} holds {kv_tokens}", size.option())
                }
                _ => String::new(),
            };
            let reason = format!("expected 1 to {max} (the model supports {}{held})", config.max_len);
            Err(EngineError::BadOption { option: "max_model_len", value: len.to_string(), reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightFormat;

    /// Bytes of a block.
    const BLOCK: u64 = 128;

    fn options(max_model_len: Option<u32>) -> LoadOptions {
        LoadOptions { max_model_len, ..LoadOptions::new("", WeightFormat::AsStored, 7 * BLOCK) }
    }

    #[test]
    fn options_are_checked_before_anything_is_read() {
        let check = |bytes, max_model_len| {
            let config = crate::model_config::tests::tiny();
            let checked = check_kv(KvSize::Bytes(bytes), &options(max_model_len), &config, BLOCK);
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check(BLOCK, None), Ok(()));
        assert_eq!(check(BLOCK, Some(BLOCK_SIZE as u32)), Ok(()));
        for (bytes, max_model_len, expected) in [
            (BLOCK - 1, None, "less than one block"),
            (BLOCK, Some(BLOCK_SIZE as u32 + 1), "kv_memory_bytes holds"),
            (1 << 40, Some(u32::MAX), "the model supports"),
            (1 << 40, Some(0), "expected 1 to"),
        ] {
            let error = check(bytes, max_model_len).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// A tiny model in the memory of a large machine.
    #[test]
    fn every_slot_of_every_block_has_a_number_of_32_bits() {
        let size = KvSize::Bytes(u64::MAX);
        for block_bytes in [1, BLOCK, 4096] {
            let blocks = size.num_blocks(1 << 42, block_bytes).unwrap();
            let slots = u64::from(blocks) * BLOCK_SIZE as u64;
            assert!(slots <= u64::from(u32::MAX), "{block_bytes} bytes a block: {slots} slots");
        }
    }

    #[test]
    fn errors_name_the_setting_that_sized_the_cache() {
        let config = crate::model_config::tests::tiny();
        let none = || EngineError::from(CudaError::OutOfMemory { bytes: 70, purpose: "kv blocks", free: 60 });
        for (size, option, flag) in [
            (KvSize::new(&options(None), None), "kv_memory_bytes", "--kv-memory"),
            (KvSize::new(&options(None), Some(0.25)), "gpu_memory_utilization", "--gpu-memory-utilization"),
        ] {
            let value = if size == KvSize::Bytes(896) { "896" } else { "0.25" };
            let too_small = size.num_blocks(BLOCK - 1, BLOCK).unwrap_err().to_string();
            let too_large = size.failed_to_allocate(none(), 3).to_string();
            for error in [&too_small, &too_large] {
                assert!(error.starts_with(&format!("option {option} is {value}: ")), "{error}");
                assert!(error.ends_with(&format!(" {flag}")), "{error}");
            }
            for words in ["rank 3", "60 bytes free", "needs 70"] {
                assert!(too_large.contains(words), "{too_large}");
            }
            let options = options(Some(500));
            let too_long = max_model_len(&options, &config, Some((size, 2))).unwrap_err().to_string();
            assert!(too_long.contains(&format!("{option} holds 32")), "{too_long}");
        }
    }
}
