//! Size of the KV cache on a GPU, after its weights are loaded. Pure arithmetic.

use super::ops::{EDIT_BYTES, MAX_SUMS_BYTES, candidate_bytes, capacity, own_bytes, partial_bytes};
use super::ranks::SumPhases;
use crate::EngineError;
use crate::forward_batch::PassLimits;
use crate::kv_limits::KvSize;
use crate::model_config::ModelConfig;
use crate::shard::Shard;

/// Limits of one pass. A row takes a few hundred kilobytes, a row with logits of Llama 3 a megabyte. So a
/// prompt's rows are multiplied together, and rows with logits stay limited as in passes of 512 rows.
pub(crate) const PASS_LIMITS: PassLimits = PassLimits { rows: 2048, ..PassLimits::DEFAULT };

/// Memory for the driver, its modules and the allocator's granularity.
const SLACK_BYTES: u64 = 256 << 20;

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryInfo {
    pub(crate) free_bytes: u64,
    pub(crate) total_bytes: u64,
}

/// Bytes for the KV cache on a device of which a share of `utilization` may be used in total, other processes
/// included: that share less all memory in use now, the workspace and some slack.
pub(crate) fn kv_bytes(memory: MemoryInfo, workspace: u64, utilization: f32) -> Result<u64, EngineError> {
    let MemoryInfo { free_bytes, total_bytes } = memory;
    let size = KvSize::Utilization(utilization);
    if !(utilization > 0.0 && utilization <= 1.0) {
        return Err(size.refuse("expected more than 0 and at most 1".to_owned()));
    }
    let allowed = (total_bytes as f64 * f64::from(utilization)) as u64;
    let held = total_bytes.saturating_sub(free_bytes);
    let needed = held + workspace + SLACK_BYTES;
    allowed.checked_sub(needed).filter(|bytes| *bytes > 0).ok_or_else(|| {
        size.refuse(format!(
            "that part of {total_bytes} bytes leaves none for kv: {held} are held, weights included, and a \
             forward needs {workspace}; raise it, lower --max-model-len, or use more gpus"
        ))
    })
}

/// Upper bound of the bytes that the largest pass needs besides weights and KV cache: its rows, rounded
/// inputs of products, attention's splits for sequences of up to `max_len`, KV blocks gathered for rows of
/// token trees, partial sums of other ranks, edits of logits, candidates of filters, and the angles of all
/// positions.
pub(crate) fn workspace_bytes(config: &ModelConfig, shard: Shard, max_len: u32) -> u64 {
    bytes_of_passes(PASS_LIMITS, config, shard, max_len)
}

fn bytes_of_passes(limits: PassLimits, config: &ModelConfig, shard: Shard, max_len: u32) -> u64 {
    let (PassLimits { rows, logit_rows }, layout) = (limits, shard.layout(config));
    let (hidden, intermediate) = (config.hidden_size, shard.intermediate(config).len());
    let buffer = |rows: usize, width: usize| capacity(rows * width, size_of::<f32>());
    let of_rows = 3 * buffer(rows, hidden)
        + buffer(rows, layout.row_width())
        + buffer(rows, layout.q_width())
        + buffer(rows, 2 * intermediate)
        + buffer(rows, intermediate);
    // Logits, a copy of the raw logits for logprobs, and with several ranks also the parts of all ranks.
    let num_logits = if shard.ranks == 1 { 2 } else { 3 };
    let of_logit_rows = buffer(logit_rows, hidden)
        + buffer(logit_rows, layout.row_width())
        + num_logits * buffer(logit_rows, config.vocab_size);
    let widest = hidden.max(intermediate).max(layout.q_width());
    let partial = capacity(partial_bytes(rows, layout, max_len as usize), 1);
    let sums =
        if shard.is_split() { SumPhases::BY_SIZE.workspace_len((rows, hidden), shard.ranks) } else { 0 };
    // At most an eighth more than is needed, as for any large buffer.
    let floats = of_rows + sums + sums / 8 + of_logit_rows;
    // Inputs of products are rounded to bf16, or int8 with eight scales a row: two bytes per number cover
    // both.
    let own = own_bytes(rows, layout);
    let rounded = capacity(2 * rows * widest, 1);
    let widest_output = [layout.row_width(), hidden, 2 * intermediate, config.vocab_size].into_iter().max();
    let sums_of_groups = capacity(MAX_SUMS_BYTES.min(32 * rows * widest_output.unwrap_or(0)), 1);
    let of_draws = EDIT_BYTES + candidate_bytes(config.vocab_size);
    let angles = max_len as usize * config.head_dim * size_of::<f32>();
    (4 * floats + partial + own + rounded + sums_of_groups + of_draws + angles) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn kv_gets_what_weights_and_workspace_leave_of_the_part() {
        let memory = MemoryInfo { free_bytes: 60 * GIB, total_bytes: 80 * GIB };
        assert_eq!(kv_bytes(memory, 2 * GIB, 1.0).unwrap(), 58 * GIB - SLACK_BYTES);
        assert_eq!(kv_bytes(memory, 2 * GIB, 0.5).unwrap(), 18 * GIB - SLACK_BYTES);
        // Memory of other processes counts as used.
        let shared = MemoryInfo { free_bytes: 30 * GIB, ..memory };
        assert_eq!(kv_bytes(shared, 0, 0.75).unwrap(), 10 * GIB - SLACK_BYTES);
    }

    #[test]
    fn a_part_that_leaves_nothing_is_refused_with_the_numbers() {
        let memory = MemoryInfo { free_bytes: 60 * GIB, total_bytes: 80 * GIB };
        for (utilization, says) in [
            (0.25, "is 0.25: that part of 85899345920 bytes leaves none for kv: 21474836480 are held"),
            (0.0, "more than 0"),
            (1.5, "at most 1"),
        ] {
            let error = kv_bytes(memory, GIB, utilization).unwrap_err().to_string();
            assert!(error.contains("gpu_memory_utilization") && error.contains(says), "{error}");
        }
        assert!(kv_bytes(memory, GIB, f32::NAN).is_err());
    }

    #[test]
    fn a_workspace_is_a_models_rows_and_grows_with_its_context() {
        let mut config = crate::model_config::tests::tiny();
        (config.hidden_size, config.intermediate_size, config.vocab_size) = (4096, 14_336, 128_256);
        (config.num_heads, config.num_kv_heads, config.head_dim) = (32, 8, 128);
        let whole = Shard::all(1, &config).unwrap()[0];
        // Counted by hand. 2,048 rows: 3 x hidden, 6144 + 4096 for heads, 3 x 14336. 512 rows with logits:
        // hidden, 6144 for heads, 2 x 131072 for a vocabulary of 128256, rounded up. The splits of attention
        // reach their limit.
        let floats = 2048 * (3 * 4096 + 6144 + 4096 + 3 * 14_336) + 512 * (4096 + 6144 + 2 * 131_072);
        // Filters: 64 rows x 32 parts x 1,024 candidates of 8 bytes. Edits: 2^18 of 32 bytes.
        let of_draws = 64 * 32 * 1024 * 8 + (8 << 20);
        // Rows of token trees: 64 MiB of gathered blocks. Sums of groups of slices: 32 MiB.
        let counted = 4 * floats + (512 << 20) + (64 << 20) + (32 << 20) + 2048 * 2 * 14_336 + of_draws;
        let angles = |max_len: u64| max_len * 128 * 4;
        assert_eq!(workspace_bytes(&config, whole, 2048), counted + angles(2048));
        let longer = workspace_bytes(&config, whole, 131_072);
        assert_eq!(longer, counted + angles(131_072), "splits of a long context take turns");
        // Compared with passes of 512 rows.
        for (max_len, most_more) in [(2048, 860 << 20), (131_072, 460 << 20)] {
            let [now, before] = [PASS_LIMITS, PassLimits::DEFAULT]
                .map(|limits| bytes_of_passes(limits, &config, whole, max_len));
            println!("workspace of 8B up to {max_len}: {now} bytes, in passes of 512 rows {before}");
            assert!((1..most_more).contains(&(now - before)), "{now}, {before}");
        }
        let part = workspace_bytes(&config, Shard::all(4, &config).unwrap()[1], 2048);
        assert!(part > 512 * 4 * 3 * 128_256, "the first rank joins whole rows");
        let eighth = Shard::all(8, &config).unwrap()[1];
        let mebibytes = workspace_bytes(&config, eighth, 2048) >> 20;
        println!(
            "workspace of a rank of eight: {mebibytes} MiB; sums from parts of all ranks took {} MiB more",
            (2048 * 4096 * 4 * (7 * 8 - 1) / 8) >> 20
        );
    }
}
