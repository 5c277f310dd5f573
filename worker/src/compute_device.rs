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
