//! The kernels there are: files, entry points, block sizes, and the registers each may take. A new kernel is a
//! file in `kernels/` and a line here; `make kernels-check` compiles what is listed and holds it to its budget.

/// What stands before every file.
const PRELUDE: &str = include_str!("kernels/prelude.cuh");

/// One entry point.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Its name in the file.
    pub(crate) name: &'static str,
    /// Threads in a block; each kernel is written for one size.
    pub(crate) threads: u32,
    /// Most registers a thread may take on any architecture: more would lower how many blocks run at a time.
    pub(crate) max_registers: u32,
}

/// A file of kernels.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its name, for messages.
    pub(crate) file: &'static str,
    text: &'static str,
    /// Its entry points.
    pub(crate) kernels: &'static [Kernel],
}

impl Source {
    /// What the compiler gets.
    pub(crate) fn text(&self) -> String {
        format!("{PRELUDE}\n#line 1 \"{}\"\n{}", self.file, self.text)
    }

    /// The name of its machine code's file.
    pub(crate) fn machine_code_file(&self) -> String {
        self.file.replace(".cu", ".cubin")
    }

    /// An entry point of this file. Panics where it is not listed: names are written in `ops` alone.
    pub(crate) const fn kernel(&'static self, index: usize) -> &'static Kernel {
        &self.kernels[index]
    }
}

const fn kernel(name: &'static str, threads: u32, max_registers: u32) -> Kernel {
    Kernel { name, threads, max_registers }
}

macro_rules! source {
    ($constant:ident, $file:literal, [$($kernel:expr),+ $(,)?]) => {
        pub(crate) static $constant: Source = Source {
            file: $file,
            text: include_str!(concat!("kernels/", $file)),
            kernels: &[$($kernel),+],
        };
    };
}

source!(EMBEDDING, "embedding.cu", [kernel("embedding", 256, 32)]);
source!(
    ROWS,
    "rows.cu",
    [
        kernel("add", 256, 32),
        kernel("to_bf16", 256, 32),
        kernel("take_rows", 256, 32),
        kernel("finish_sum", 256, 32)
    ]
);
source!(RMS_NORM, "rms_norm.cu", [kernel("rms_norm", 256, 32)]);
source!(
    HEADS,
    "heads.cu",
    [kernel("norm_heads", 32, 48), kernel("rotate", 32, 48), kernel("write_kv", 32, 48)]
);
source!(SWIGLU, "swiglu.cu", [kernel("swiglu", 256, 32)]);
source!(GEMM_BF16, "gemm_bf16.cu", [kernel("gemm_bf16_8", 256, 64), kernel("gemm_bf16_32", 256, 96)]);
source!(
    INT8,
    "int8.cu",
    [kernel("quantize_rows", 128, 32), kernel("gemm_int8_8", 256, 64), kernel("gemm_int8_32", 256, 96)]
);
source!(
    ATTENTION,
    "attention.cu",
    [
        kernel("attention_16", 32, 80),
        kernel("attention_32", 32, 80),
        kernel("attention_64", 32, 96),
        kernel("attention_96", 32, 128),
        kernel("attention_128", 32, 160),
        kernel("attention_merge", 32, 48),
    ]
);
source!(LOGITS, "logits.cu", [kernel("edit_logits", 128, 32)]);
source!(FILTERS, "filters.cu", [kernel("keep", 256, 64)]);
source!(RANKS, "ranks.cu", [kernel("sum_ranks", 256, 40), kernel("side_by_side", 256, 40)]);
source!(DRAW, "draw.cu", [kernel("draw", 256, 80)]);
source!(SCORE, "score.cu", [kernel("score", 256, 48)]);
source!(RANDOM, "random.cu", [kernel("random_bf16", 256, 32), kernel("random_f32", 256, 32)]);
source!(PROBE, "probe.cu", [kernel("read_words", 256, 48), kernel("multiply_only", 256, 64)]);

/// All of them.
pub(crate) fn all() -> [&'static Source; 15] {
    [
        &EMBEDDING, &ROWS, &RMS_NORM, &HEADS, &SWIGLU, &GEMM_BF16, &INT8, &ATTENTION, &LOGITS, &FILTERS,
        &RANKS, &DRAW, &SCORE, &RANDOM, &PROBE,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_point_is_listed_once_and_every_listed_one_is_written() {
        for source in all() {
            for kernel in source.kernels {
                let written = source.text.contains(&format!("{}(", kernel.name))
                    || source
                        .text
                        .contains(&format!("ATTENTION({})", kernel.name.trim_start_matches("attention_")));
                assert!(written, "{} is not in {}", kernel.name, source.file);
                assert_eq!(kernel.threads % 32, 0, "{}: whole warps", kernel.name);
            }
            let written = source.text.matches("extern \"C\" __global__").count()
                + source.text.matches("\nATTENTION(").count();
            // The macro that writes the attention kernels is one occurrence more.
            let expected = source.kernels.len() + usize::from(source.file == "attention.cu");
            assert_eq!(written, expected, "{}", source.file);
        }
    }
}
