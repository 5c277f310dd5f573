//! The two names of GPUs in `numerics_id` (docs/contract.md C4): the class of kernels and the class of
//! devices. Equal names promise equal bits. Tensor cores of different compute capabilities round their inner
//! sums differently, and so do versions of a library that selects kernels by shape, so both are part of a
//! name. Pure.

use crate::numerics_id::NumericsClass;

/// Class of kernels with equal bits. Change it whenever the arithmetic changes.
const KERNEL_CLASS: &str = "cuda-mma-4";
/// Class of kernels if cuBLASLt computes products of many rows: a row's bits then depend on the other rows of
/// the batch.
const LIBRARY_CLASS: &str = "cuda-cublaslt-2";
/// Device class of tests, which run on the host.
#[cfg(test)]
const EMULATED: &str = "cuda-emulated";

/// What determines the bits of a model's results besides its files and formats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Numerics {
    kernel_class: String,
    device_class: String,
}

impl Numerics {
    /// For GPUs of these compute capabilities, in order of rank. `library`: version of cuBLASLt if it
    /// computes products.
    pub(crate) fn of_devices(capabilities: &[(i32, i32)], library: Option<&str>) -> Self {
        let kernel_class = library
            .map_or_else(|| KERNEL_CLASS.to_owned(), |version| format!("{LIBRARY_CLASS} of {version}"));
        // Ranks of one capability have the bits of a single device. With several capabilities the order of
        // the ranks decides which device computes which sums.
        let mut names: Vec<String> =
            capabilities.iter().map(|(major, minor)| format!("sm_{major}{minor}")).collect();
        if names.iter().all(|name| *name == names[0]) {
            names.truncate(1);
        }
        Self { kernel_class, device_class: format!("cuda-{}", names.join("-")) }
    }

    /// For kernels that the host emulates.
    #[cfg(test)]
    pub(crate) fn emulated() -> Self {
        Self { kernel_class: KERNEL_CLASS.to_owned(), device_class: EMULATED.to_owned() }
    }

    /// The two names as a loaded model keeps them. They are leaked: a process loads one or two models and
    /// keeps them until it exits.
    pub(crate) fn names(self) -> NumericsClass {
        NumericsClass { kernel_class: self.kernel_class.leak(), device_class: self.device_class.leak() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn capabilities_and_library_versions_have_names_of_their_own() {
        type Case<'a> = (&'a [(i32, i32)], Option<&'a str>);
        let cases: [Case<'_>; 9] = [
            (&[(8, 0)], None),
            (&[(8, 6)], None),
            (&[(8, 9)], None),
            (&[(9, 0)], None),
            (&[(8, 0), (9, 0)], None),
            (&[(9, 0), (8, 0)], None),
            (&[(9, 0)], Some("13.0.2")),
            (&[(9, 0)], Some("13.1.0")),
            (&[(8, 9)], Some("13.0.2")),
        ];
        let names: HashSet<_> =
            cases.map(|(devices, library)| Numerics::of_devices(devices, library).names()).into();
        assert_eq!(names.len(), 9, "{names:?}");
        assert!(!names.contains(&Numerics::emulated().names()));
        let on_h100 = NumericsClass { kernel_class: "cuda-mma-4", device_class: "cuda-sm_90" };
        assert!(names.contains(&on_h100), "{names:?}");
    }

    #[test]
    fn ranks_of_one_capability_have_the_name_of_one_device() {
        let name = |devices: &[(i32, i32)]| Numerics::of_devices(devices, None);
        assert_eq!(name(&[(9, 0); 8]), name(&[(9, 0)]));
    }
}
