//! What a GPU can do at best, from its maker's data sheet, and how `2xH100-80` is read. No prices here: they change by the week,
//! so a plan has a cost only where it is told one.

/// The figures of one GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// As it is written on the command line.
    pub name: &'static str,
    /// Memory, GB (1e9 bytes).
    pub memory_gb: f64,
    /// Memory bandwidth, GB/s.
    pub bandwidth_gb_s: f64,
    /// Dense BF16 with f32 sums, TFLOPS.
    pub bf16_tflops: f64,
    /// Dense INT8, TOPS.
    pub int8_tops: f64,
    /// To its peers in the same machine, one direction, GB/s.
    pub link_gb_s: f64,
}

/// NVIDIA's data sheets, without sparsity (they print twice as much for 2:4 sparse matrices): "H100 Tensor Core GPU", "H200 Tensor
/// Core GPU", "DGX B200" (an eighth of it), "A100 80GB", "L40S", "L4", "A10", "Ada GPU architecture" and "GA102 GPU architecture"
/// white papers, appendix A, for the RTX cards. Links: NVLink, half of the total; PCIe x16 where there is none.
pub const GPUS: [Gpu; 12] = [
    gpu("B200-180", 180.0, 8_000.0, (2_250.0, 4_500.0), 900.0),
    gpu("H200-141", 141.0, 4_800.0, (989.0, 1_979.0), 450.0),
    gpu("H100-80", 80.0, 3_350.0, (989.0, 1_979.0), 450.0),
    gpu("H100-PCIE-80", 80.0, 2_000.0, (756.0, 1_513.0), 64.0),
    gpu("A100-80", 80.0, 2_039.0, (312.0, 624.0), 300.0),
    gpu("A100-40", 40.0, 1_555.0, (312.0, 624.0), 300.0),
    gpu("L40S-48", 48.0, 864.0, (362.0, 733.0), 32.0),
    gpu("L4-24", 24.0, 300.0, (121.0, 242.0), 32.0),
    gpu("A10-24", 24.0, 600.0, (125.0, 250.0), 32.0),
    gpu("RTX5090-32", 32.0, 1_792.0, (209.5, 838.0), 64.0),
    gpu("RTX4090-24", 24.0, 1_008.0, (165.2, 660.6), 32.0),
    gpu("RTX3090-24", 24.0, 936.0, (71.0, 284.0), 32.0),
];

const fn gpu(
    name: &'static str,
    memory_gb: f64,
    bandwidth_gb_s: f64,
    (bf16_tflops, int8_tops): (f64, f64),
    link_gb_s: f64,
) -> Gpu {
    Gpu { name, memory_gb, bandwidth_gb_s, bf16_tflops, int8_tops, link_gb_s }
}

/// Some GPUs of one kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSet {
    /// How many.
    pub count: u32,
    /// Of which kind.
    pub gpu: Gpu,
}

/// More than this is a slip of the finger.
const MOST: u32 = 4_096;

impl std::str::FromStr for GpuSet {
    type Err = String;

    /// `2xH100-80`, `4xL4`, `L40S`: the memory may be left out where one size alone is known, or the largest is meant.
    fn from_str(text: &str) -> Result<Self, String> {
        let (count, name) = match text.split_once(['x', 'X', '*']) {
            Some((count, name)) if count.bytes().all(|b| b.is_ascii_digit()) && !count.is_empty() => {
                (count.parse().unwrap_or(0), name)
            }
            _ => (1, text),
        };
        if !(1..=MOST).contains(&count) {
            return Err(format!("expected 1 to {MOST} GPUs, as in 2xH100-80"));
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
