//! A CUDA driver for the host: a libcuda.so that runs kernels in the emulator (`emulator/driver.hpp`) and
//! also provides cuBLASLt (`emulator/cublaslt.hpp`) and NCCL (`emulator/nccl.hpp`). If the loader finds it,
//! `--device cuda:0` works without a GPU, several hundred thousand times slower. Used for dry runs of
//! `gpu-check` and for tests of workers, which then execute every line that runs with a GPU.
//!
//! It is built on demand into a folder outside the source tree, and is found only through `LD_LIBRARY_PATH`.

use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::{Library, Symbol};

use super::kernel_files::{self, HOST_KERNELS};
use super::on_host::{self, Check};
use super::sources::{self, Kernel};
use super::toolkit::CudaVersion;

const DRIVER: &str = include_str!("emulator/driver.hpp");
const BLAS: &str = include_str!("emulator/cublaslt.hpp");
const NCCL: &str = include_str!("emulator/nccl.hpp");
/// Other names of the driver's file, under which the loader finds cuBLASLt and NCCL.
const OTHER_NAMES: [&str; 2] = ["libcublasLt.so.13", "libnccl.so.2"];
/// Environment variable that is set for the second run of a test, in which the driver is loaded.
const SECOND_RUN: &str = "OUTRIDER_HOST_DRIVER";

/// Paths of the built driver.
#[derive(Debug, Clone)]
pub struct HostDriver {
    /// Folder to add to `LD_LIBRARY_PATH`.
    pub libraries: PathBuf,
    /// Placeholder files for [`crate::cuda::GpuOptions::kernels`]; the kernels themselves are in the driver.
    pub kernels: PathBuf,
}

/// Operations that the driver has executed since the process began. A replayed graph counts its launches
/// once, when it is captured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverCounts {
    /// Kernel launches.
    pub launches: u64,
    /// Copies to the device.
    pub copies_to_device: u64,
    /// Bytes of those copies.
    pub bytes_to_device: u64,
    /// Copies from the device.
    pub copies_from_device: u64,
    /// Bytes of those copies.
    pub bytes_from_device: u64,
    /// Allocations of device memory.
    pub allocations: u64,
    /// Bytes that ranks have received from other ranks.
    pub bytes_from_ranks: u64,
    /// Waits for a stream. Waits that watch other ranks are not counted: they poll.
    pub waits: u64,
    /// Bytes of global memory read by kernels that count them: products, attention, filters and draws.
    pub bytes_read: u64,
}

impl DriverCounts {
    /// Operations since an earlier count.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            launches: self.launches - earlier.launches,
            copies_to_device: self.copies_to_device - earlier.copies_to_device,
            bytes_to_device: self.bytes_to_device - earlier.bytes_to_device,
            copies_from_device: self.copies_from_device - earlier.copies_from_device,
            bytes_from_device: self.bytes_from_device - earlier.bytes_from_device,
            allocations: self.allocations - earlier.allocations,
            bytes_from_ranks: self.bytes_from_ranks - earlier.bytes_from_ranks,
            waits: self.waits - earlier.waits,
            bytes_read: self.bytes_read - earlier.bytes_read,
        }
    }
}

impl HostDriver {
    /// Operations so far. The process must have loaded the driver.
    pub fn counts(&self) -> DriverCounts {
        let mut counts = [0u64; 9];
        // SAFETY: `build` made this file, and this process has loaded it as its driver.
        let library =
            unsafe { Library::new(self.libraries.join("libcuda.so")) }.expect("the driver was built");
        // SAFETY: the signature is the one that driver.hpp declares; nine numbers are written.
        unsafe {
            let count: Symbol<'_, unsafe extern "C" fn(*mut u64)> =
                library.get(b"outrider_counts").expect("the host's driver counts");
            count(counts.as_mut_ptr());
        }
        let [
            launches,
            copies_to_device,
            bytes_to_device,
            copies_from_device,
            bytes_from_device,
            allocations,
            bytes_from_ranks,
            waits,
            bytes_read,
        ] = counts;
        DriverCounts {
            launches,
            copies_to_device,
            bytes_to_device,
            copies_from_device,
            bytes_from_device,
            allocations,
            bytes_from_ranks,
            waits,
            bytes_read,
        }
    }

    /// Builds the driver with the system's C++ compiler, unless it exists already.
    pub fn build() -> Result<Self, String> {
        let table: String = sources::all()
            .iter()
            .flat_map(|source| source.kernels)
            .map(|kernel| {
                let Kernel { name, threads, cluster, .. } = kernel;
                format!("    {{\"{name}\", {{run_{name}, params_{name}, {threads}, {cluster}}}}},\n")
            })
            .collect();
        let find = format!(
            "static driver::Kernel* driver::find(const char* name) {{\n  static auto& kernels = *new std::map<std::string, Kernel>{{\n\
             {table}  }};\n  auto found = kernels.find(name);\n  return found == kernels.end() ? nullptr : &found->second;\n}}\n"
        );
        let text = format!("{}\n{DRIVER}\n{BLAS}\n{NCCL}\n{find}", on_host::kernels());
        let library = on_host::build(&text, "libcuda.so", Check::Nothing)?;
        let libraries = library.parent().map(Path::to_owned).ok_or("a library lies in a folder")?;
        for name in OTHER_NAMES.map(|name| libraries.join(name)) {
            if !name.exists() {
                // Another process may have made the same link.
                let made = std::os::unix::fs::symlink("libcuda.so", &name);
                made.or_else(|error| if name.exists() { Ok(()) } else { Err(error) })
                    .map_err(|error| format!("{}: {error}", name.display()))?;
            }
        }
        let kernels = libraries.join("kernels");
        if !kernels.join(kernel_files::DIGEST_FILE).exists() {
            for source in sources::all() {
                kernel_files::write(&kernels, "sm_90", source, HOST_KERNELS)
                    .map_err(|error| error.to_string())?;
            }
            kernel_files::write_digest(&kernels, CudaVersion { major: 12, minor: 0 })
                .map_err(|error| error.to_string())?;
        }
        Ok(Self { libraries, kernels })
    }

    /// For a test with this name in the test harness: runs the test again in a process that has the driver,
    /// since the loader reads `LD_LIBRARY_PATH` only when a process starts. Returns the driver in that second
    /// run. Returns `None` in the first run after the second one has passed, and panics if it has failed.
    pub fn for_test(name: &str) -> Option<Self> {
        Self::for_test_with(name, &[])
    }

    /// As [`HostDriver::for_test`], with environment variables for the second run: `OUTRIDER_HOST_DEVICES` is
    /// the number of devices, `OUTRIDER_HOST_DRIVER_VERSION` the driver's version, `OUTRIDER_HOST_ISOLATED` a
    /// device that no other one reaches.
    pub fn for_test_with(name: &str, variables: &[(&str, &str)]) -> Option<Self> {
        let driver = Self::build().expect("the host's driver builds");
        if std::env::var_os(SECOND_RUN).is_some() {
            return Some(driver);
        }
        let this = std::env::current_exe().expect("a test has a file");
        let output = Command::new(this)
            .args(["--exact", name, "--nocapture"])
            .env("LD_LIBRARY_PATH", &driver.libraries)
            .env(SECOND_RUN, "1")
            .envs(variables.iter().copied())
            .output()
            .expect("a test can be run");
        let said = String::from_utf8_lossy(&output.stdout);
        let ran_one = said.contains("1 passed");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && ran_one, "{name} with the host's driver:\n{said}\n{errors}");
        None
    }
}
