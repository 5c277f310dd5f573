//! `--device`: what computes. Parsing says which devices are named; whether they are there is asked when the model is
//! loaded, so that `--help` and bad flags need no driver.

use std::str::FromStr;

use engine::cuda::{CudaDevice, CudaError};

/// What computes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ComputeDevice {
    /// The processor.
    #[default]
    Cpu,
    /// GPUs of this machine, by the driver's numbers, at least one; the first is rank 0.
    Cuda(Vec<usize>),
}

/// Why nothing can be computed on the device that was asked for.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// It is not there, or cannot be used.
    #[error("--device cuda:{ordinal}: {source}")]
    Unusable {
        /// The device that was asked for.
        ordinal: usize,
        /// What is missing.
        source: CudaError,
    },
    /// It is there, and models are not run on it yet.
    #[error(
        "--device cuda:{ordinal}: {name} was found, but this build only checks kernels on it (make gpu-check): run with --device cpu"
    )]
    NotServed {
        /// The device that was asked for.
        ordinal: usize,
        /// Its name.
        name: String,
    },
}

impl ComputeDevice {
    /// Opens what was asked for.
    pub fn check(&self) -> Result<(), DeviceError> {
        let Self::Cuda(ordinals) = self else { return Ok(()) };
        let ordinal = ordinals[0];
        let unusable = |source| DeviceError::Unusable { ordinal, source };
        let facts = CudaDevice::open(ordinal).and_then(|device| device.facts()).map_err(unusable)?;
        Err(DeviceError::NotServed { ordinal, name: facts.name })
    }
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        let expected = || format!("`{text}` is no device, expected cpu, cuda:0 or cuda:0,1,..");
        let numbers = text.strip_prefix("cuda:").ok_or_else(expected)?;
        let ordinals =
            numbers.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>().map_err(|_| expected())?;
        let mut unique = ordinals.clone();
        unique.sort_unstable();
        unique.dedup();
        if unique.len() < ordinals.len() {
            return Err(format!("`{text}` names a device twice"));
        }
        Ok(Self::Cuda(ordinals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_or_refused() {
        assert_eq!("cpu".parse(), Ok(ComputeDevice::Cpu));
        assert_eq!("cuda:0".parse(), Ok(ComputeDevice::Cuda(vec![0])));
        assert_eq!("cuda:2,0".parse(), Ok(ComputeDevice::Cuda(vec![2, 0])));
        for text in ["", "gpu", "cuda", "cuda:", "cuda:a", "cuda:0,", "cuda:-1", "cuda:0,0"] {
            assert!(text.parse::<ComputeDevice>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_processor_is_always_there() {
        assert!(ComputeDevice::Cpu.check().is_ok());
    }
}
