//! Peak figures of GPUs from data sheets, and the parser for sets such as `2xH100-80`. Prices are not
//! included because they change every week: a plan has a cost only if prices are given.

/// The figures of one GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Name on the command line.
    pub name: &'static str,
    /// Memory, GB (1e9 bytes).
    pub memory_gb: f64,
    /// Memory bandwidth, GB/s.
    pub bandwidth_gb_s: f64,
    /// Dense BF16 with f32 accumulation, TFLOPS.
    pub bf16_tflops: f64,
    /// Dense INT8, TOPS.
    pub int8_tops: f64,
    /// Bandwidth to its peers in the same machine, one direction, GB/s.
    pub link_gb_s: f64,
}

/// Peaks without sparsity (data sheets state twice as much, for 2:4 sparse matrices); GB are 1e9 bytes; links
/// are one direction: half of NVLink's total, or PCIe x16 without NVLink. The source of each row was read in
/// November 2026:
///
/// | GPU | source |
/// |---|---|
/// | B200 | <https://glennklockwood.com/garden/processors/B200> (HGX variant, after NVIDIA's brief): bandwidth, BF16, INT8, NVLink; <https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview>: 179 GB as `nvidia-smi` shows it |
/// | H100 | <https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html>, SXM and PCIe, all figures |
/// | H200 | <https://glennklockwood.com/garden/processors/h100>: arithmetic and links are H100's; <https://aiwiki.ai/wiki/nvidia_h200>: 141 GB, 4.8 TB/s |
/// | A100 | <https://glennklockwood.com/garden/processors/A100> (after NVIDIA's data sheet), all figures |
/// | L40S | <https://www.mullet.se/product.html?product_id=355414>: all but INT8, which Ada does as fast as FP8 (the L40's two lines there are equal) |
/// | L4 | <https://grokipedia.com/page/NVIDIA_L4_vs_L40S> (after NVIDIA's data sheet): 242 and 485 with sparsity, half of it here |
/// | A10 | <https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/>: memory and bandwidth; arithmetic follows from 288 tensor cores at 1.695 GHz (<https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000>) at the 256 operations a clock that the A40's data sheet gives that chip |
/// | T4 | <https://hmc-tech.com/gpu/nvidia-a16-vs-nvidia-t4>: arithmetic; <https://sysrqmts.com/it/gpus/compare/nvidia-tesla-t10-processor-vs-nvidia-tesla-t4>: memory. It has no BF16: the figure is FP16's |
/// | RTX 4090 | <https://waredb.com/processor/nvidia-geforce-rtx-4090>, all figures |
/// | RTX 5090 | <https://www.spheron.network/blog/nvidia-rtx-5090-specs/>: memory and bandwidth. **Its arithmetic has no source here** |
/// | RTX 3090 | **no source here**: from memory of NVIDIA's GA102 white paper |
pub const GPUS: [Gpu; 13] = [
    gpu("B200-180", 180.0, 8_000.0, 900.0).computing(2_250.0, 4_500.0),
    gpu("H200-141", 141.0, 4_800.0, 450.0).computing(989.0, 1_979.0),
    gpu("H100-80", 80.0, 3_350.0, 450.0).computing(989.0, 1_979.0),
    gpu("H100-PCIE-80", 80.0, 2_000.0, 64.0).computing(756.0, 1_513.0),
    gpu("A100-80", 80.0, 2_039.0, 300.0).computing(312.0, 624.0),
    gpu("A100-40", 40.0, 1_555.0, 300.0).computing(312.0, 624.0),
    gpu("L40S-48", 48.0, 864.0, 32.0).computing(362.0, 733.0),
    gpu("L4-24", 24.0, 300.0, 32.0).computing(121.0, 242.0),
    gpu("A10-24", 24.0, 600.0, 32.0).computing(125.0, 250.0),
    gpu("T4-16", 16.0, 320.0, 16.0).computing(65.0, 130.0),
    gpu("RTX5090-32", 32.0, 1_792.0, 64.0).computing(209.5, 838.0),
    gpu("RTX4090-24", 24.0, 1_008.0, 32.0).computing(165.2, 660.6),
    gpu("RTX3090-24", 24.0, 936.0, 32.0).computing(71.0, 284.0),
];

const fn gpu(name: &'static str, memory_gb: f64, bandwidth_gb_s: f64, link_gb_s: f64) -> Gpu {
    Gpu { name, memory_gb, bandwidth_gb_s, bf16_tflops: 0.0, int8_tops: 0.0, link_gb_s }
}

impl Gpu {
    const fn computing(self, bf16_tflops: f64, int8_tops: f64) -> Self {
        Self { bf16_tflops, int8_tops, ..self }
    }
}

/// A number of equal GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSet {
    /// Number of GPUs.
    pub count: u32,
    /// Kind of GPU.
    pub gpu: Gpu,
}

/// Upper limit, to catch typing errors.
const GPUS_MAX: u32 = 4_096;

impl std::str::FromStr for GpuSet {
    type Err = String;

    /// Parses `2xH100-80`, `4xL4`, `L40S`. The memory size may be omitted: then the first entry of that kind
    /// in [`GPUS`] is used, which is the largest.
    fn from_str(text: &str) -> Result<Self, String> {
        let (count, name) = match text.split_once(['x', 'X', '*']) {
            Some((count, name)) if count.bytes().all(|b| b.is_ascii_digit()) && !count.is_empty() => {
                (count.parse().unwrap_or(0), name)
            }
            _ => (1, text),
        };
        if !(1..=GPUS_MAX).contains(&count) {
            return Err(format!("expected 1 to {GPUS_MAX} GPUs, as in 2xH100-80"));
        }
        let wanted = plain(name);
        let gpu = GPUS.iter().find(|gpu| plain(gpu.name) == wanted).or_else(|| {
            GPUS.iter().find(|gpu| gpu.name.rsplit_once('-').is_some_and(|(kind, _)| plain(kind) == wanted))
        });
        match gpu {
            Some(gpu) => Ok(Self { count, gpu: *gpu }),
            None => Err(format!("no GPU is called {name:?}; known: {}", names())),
        }
    }
}

impl std::fmt::Display for GpuSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.count, self.gpu.name)
    }
}

fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_uppercase()).collect()
}

fn names() -> String {
    GPUS.map(|gpu| gpu.name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_read_as_people_write_them() {
        for (text, expected) in [
            ("2xH100-80", "2xH100-80"),
            ("4xL4", "4xL4-24"),
            ("l40s", "1xL40S-48"),
            ("8 x a100", "8xA100-80"),
            ("RTX 4090", "1xRTX4090-24"),
            ("1xh100-pcie", "1xH100-PCIE-80"),
            ("4xT4", "4xT4-16"),
        ] {
            assert_eq!(
                text.replace(" x ", "x").parse::<GpuSet>().map(|set| set.to_string()),
                Ok(expected.to_owned())
            );
        }
        for (text, expected) in
            [("0xL4", "1 to 4096"), ("2xTPU", "known: B200-180"), ("", "no GPU is called \"\"")]
        {
            let error = text.parse::<GpuSet>().unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
