//! Versions of CUDA, and whether a driver loads machine code compiled by one of them. Pure.

use super::CudaError;

/// A version of CUDA, such as 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CudaVersion {
    pub(super) major: i32,
    pub(super) minor: i32,
}

impl CudaVersion {
    /// From the number that `cuDriverGetVersion` returns: 1000 x major + 10 x minor.
    pub(super) fn of_driver(version: i32) -> Self {
        Self { major: version / 1000, minor: version % 1000 / 10 }
    }

    /// Returns an error if a driver does not load machine code of this version. Within a major version every
    /// driver loads all machine code (CUDA's minor version compatibility). The driver refuses code of a newer
    /// major version without giving a reason.
    pub(super) fn check_driver(self, driver: Self) -> Result<(), CudaError> {
        if self.major <= driver.major {
            return Ok(());
        }
        Err(CudaError::DriverTooOld { driver: driver.to_string(), toolkit: self.to_string() })
    }
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl std::str::FromStr for CudaVersion {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
        Ok(Self { major: major.parse()?, minor: minor.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_loads_code_of_its_own_major_version_and_of_older_ones() {
        let check = |toolkit: &str, driver: i32| {
            let toolkit: CudaVersion = toolkit.parse().unwrap();
            toolkit.check_driver(CudaVersion::of_driver(driver)).map_err(|error| error.to_string())
        };
        for (toolkit, driver) in [("13.0", 13_000), ("13.1", 13_000), ("12.9", 12_020), ("12.0", 13_010)] {
            assert_eq!(check(toolkit, driver), Ok(()), "{toolkit} on {driver}");
        }
        let said = check("13.0", 12_080).unwrap_err();
        assert!(
            said.starts_with("the driver is for cuda 12.8 and does not load kernels made by cuda 13.0: "),
            "{said}"
        );
        assert!(!said.contains('\n'), "{said}");
    }
}
