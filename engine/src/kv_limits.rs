//! What the memory for KV allows: the number of blocks and the longest sequence.

use cpu_kernels::BLOCK_SIZE;

use crate::EngineError;
use crate::model_config::ModelConfig;
use crate::options::LoadOptions;

/// Refuses KV options that do not suit the model. They are known before the weights are read, unless the
/// memory for KV is measured afterwards.
pub(crate) fn check_kv(
    options: &LoadOptions,
    config: &ModelConfig,
    kv_bytes_per_token: u64,
) -> Result<(), EngineError> {
    let kv_blocks = num_kv_blocks(kv_bytes_per_token, (options.kv_memory_bytes, options))?;
    max_model_len(options, config, kv_blocks * BLOCK_SIZE as u64).map(drop)
}

/// Number of blocks that fit in this memory, at least one.
pub(crate) fn num_kv_blocks(
    kv_bytes_per_token: u64,
    (kv_memory_bytes, options): (u64, &LoadOptions),
) -> Result<u64, EngineError> {
    let block_bytes = kv_bytes_per_token * BLOCK_SIZE as u64;
    let blocks = kv_memory_bytes / block_bytes;
    if blocks == 0 {
        let reason = format!("less than one block of {BLOCK_SIZE} tokens, {block_bytes} bytes");
        let value = options.kv_memory_bytes;
        return Err(EngineError::BadOption { option: "kv_memory_bytes", value, reason });
    }
    Ok(blocks)
}

/// The longest sequence: as the option says, or what the model and memory for `kv_tokens` allow.
pub(crate) fn max_model_len(
    options: &LoadOptions,
    config: &ModelConfig,
    kv_tokens: u64,
) -> Result<u32, EngineError> {
    let max = config.max_len.min(u32::try_from(kv_tokens).unwrap_or(u32::MAX));
    match options.max_model_len {
        None => Ok(max),
        Some(len) if (1..=max).contains(&len) => Ok(len),
        Some(len) => {
            let supported = format!("the model supports {}", config.max_len);
            let held = format!(", kv_memory_bytes holds {kv_tokens}");
            let reason = match kv_tokens < u64::from(config.max_len) {
                true => format!("expected 1 to {max} ({supported}{held})"),
                false => format!("expected 1 to {max} ({supported})"),
            };
            Err(EngineError::BadOption { option: "max_model_len", value: u64::from(len), reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::WeightFormat;

    fn check(kv_memory_bytes: u64, max_model_len: Option<u32>) -> Result<(), String> {
        let options = LoadOptions {
            model_dir: PathBuf::new(),
            weights: WeightFormat::AsStored,
            threads: 1,
            tensor_parallel: 1,
            kv_memory_bytes,
            max_model_len,
        };
        check_kv(&options, &crate::model_config::tests::tiny(), 8).map_err(|error| error.to_string())
    }

    #[test]
    fn options_are_checked_before_anything_is_read() {
        let block = 8 * BLOCK_SIZE as u64;
        assert_eq!(check(block, None), Ok(()));
        assert_eq!(check(block, Some(BLOCK_SIZE as u32)), Ok(()));
        for (kv_memory_bytes, max_model_len, expected) in [
            (block - 1, None, "less than one block"),
            (block, Some(BLOCK_SIZE as u32 + 1), "kv_memory_bytes holds"),
            (1 << 40, Some(u32::MAX), "the model supports"),
            (1 << 40, Some(0), "expected 1 to"),
        ] {
            let error = check(kv_memory_bytes, max_model_len).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
