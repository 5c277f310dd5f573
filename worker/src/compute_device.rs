//! `--device`: what computes. Parsing says which device is named; whether it is there shows when the model is loaded,
//! so that `--help` and bad flags need no driver.

use std::str::FromStr;

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ComputeDevice {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU of this machine, by the driver's number.
    Cuda(usize),
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        let ordinal = text.strip_prefix("cuda:").unwrap_or_default();
        if ordinal.contains(',') {
            return Err(format!("`{text}` names several gpus, and a model runs on one so far: use cuda:0"));
        }
        ordinal.parse().map(Self::Cuda).map_err(|_| format!("`{text}` is no device, expected cpu or cuda:0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_or_refused() {
        assert_eq!("cpu".parse(), Ok(ComputeDevice::Cpu));
        assert_eq!("cuda:0".parse(), Ok(ComputeDevice::Cuda(0)));
        assert_eq!("cuda:12".parse(), Ok(ComputeDevice::Cuda(12)));
        for text in ["", "gpu", "cuda", "cuda:", "cuda:a", "cuda:-1", "CPU"] {
            let error = text.parse::<ComputeDevice>().unwrap_err();
            assert!(error.contains("expected cpu or cuda:0"), "{error}");
        }
        assert!("cuda:0,1".parse::<ComputeDevice>().unwrap_err().contains("several gpus"));
    }
}
