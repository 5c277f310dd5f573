//! `--device`: the compute device. Parsing only names the device; loading the model checks that it exists, so
//! `--help` and bad flags need no driver.

use std::str::FromStr;

/// A compute device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ComputeDevice {
    /// The host CPU.
    #[default]
    Cpu,
    /// GPUs of this machine, by CUDA ordinal; the model is split over them.
    Cuda(Vec<usize>),
}

impl ComputeDevice {
    /// The GPUs of the device; none on the CPU.
    pub fn gpus(&self) -> &[usize] {
        match self {
            Self::Cpu => &[],
            Self::Cuda(ordinals) => ordinals,
        }
    }

    /// Whether `--gpu-memory-utilization` sizes the KV cache of a worker on this device: on GPUs, unless
    /// `--kv-memory` gives it a size. Elsewhere that flag has no effect.
    pub fn sizes_kv_by_utilization(&self, has_kv_memory: bool) -> bool {
        !self.gpus().is_empty() && !has_kv_memory
    }
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        let list = text.strip_prefix("cuda:").unwrap_or_default();
        let ordinals: Result<Vec<usize>, _> = list.split(',').map(str::parse).collect();
        ordinals
            .map(Self::Cuda)
            .map_err(|_| format!("`{text}` is not a device, expected cpu, cuda:0 or cuda:0,1,.."))
    }
}

impl std::fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinals) => {
                let list: Vec<String> = ordinals.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", list.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilization_sizes_kv_on_gpus_without_a_size() {
        let (cpu, gpus) = (ComputeDevice::Cpu, ComputeDevice::Cuda(vec![0, 1]));
        assert!(gpus.sizes_kv_by_utilization(false));
        assert!(!gpus.sizes_kv_by_utilization(true));
        assert!(!cpu.sizes_kv_by_utilization(false) && !cpu.sizes_kv_by_utilization(true));
        assert!(cpu.gpus().is_empty());
        assert_eq!(gpus.gpus(), [0, 1]);
    }

    #[test]
    fn devices_are_read_or_refused() {
        for (text, device) in [
            ("cpu", ComputeDevice::Cpu),
            ("cuda:0", ComputeDevice::Cuda(vec![0])),
            ("cuda:12", ComputeDevice::Cuda(vec![12])),
            ("cuda:3,0", ComputeDevice::Cuda(vec![3, 0])),
        ] {
            assert_eq!(text.parse(), Ok(device.clone()));
            assert_eq!(device.to_string(), text);
        }
        for text in ["", "gpu", "cuda", "cuda:", "cuda:a", "cuda:-1", "CPU", "cuda:0,", "cuda:,1", "cuda:0 1"]
        {
            let error = text.parse::<ComputeDevice>().unwrap_err();
            assert!(error.contains("expected cpu, cuda:0 or cuda:0,1,.."), "{error}");
        }
    }
}
