//! A CUDA driver that is the host: a libcuda.so whose kernels are run by the emulator (`emulator/driver.hpp`), and which is a
//! cuBLASLt too (`emulator/cublaslt.hpp`). With it in
//! reach of the loader, `--device cuda:0` works without a GPU, hundreds of thousands of times slower than with one: for dry
//! runs of `gpu-check` and for tests of workers, which then execute every line that a GPU would have executed.
//!
//! It is built on demand, into a folder outside the tree, and found by `LD_LIBRARY_PATH` alone.

use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::{Library, Symbol};

use super::kernel_files::{self, HOST_KERNELS};
use super::on_host::{self, Check};
use super::sources;
use super::toolkit::CudaVersion;

const DRIVER: &str = include_str!("emulator/driver.hpp");
const BLAS: &str = include_str!("emulator/cublaslt.hpp");
/// Another name of the driver's file, for the loader to find cuBLASLt in it.
const BLAS_NAME: &str = "libcublasLt.so.13";
/// Set for the second run of a test, which has the driver.
const SECOND_RUN: &str = "OUTRIDER_HOST_DRIVER";

/// Where the driver was built.
#[derive(Debug, Clone)]
pub struct HostDriver {
    /// For `LD_LIBRARY_PATH`.
    pub libraries: PathBuf,
    /// Files that stand for compiled kernels, for [`crate::cuda::GpuOptions::kernels`]. Its kernels are in the driver itself.
    pub kernels: PathBuf,
}

/// What was asked of the driver since the process began. A replayed graph counts its launches once, when it
/// was captured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverCounts {
    /// Kernels.
    pub launches: u64,
    /// Copies to the device, and their bytes.
    pub copies_in: u64,
    /// See `copies_in`.
    pub bytes_in: u64,
    /// Copies from the device, and their bytes.
    pub copies_out: u64,
    /// See `copies_out`.
    pub bytes_out: u64,
    /// Allocations of device memory.
    pub allocations: u64,
    /// Bytes of global memory that kernels have read, where they count them: products, attention, filters and draws.
    pub bytes_read: u64,
}

impl DriverCounts {
    /// What was asked since an earlier count.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            launches: self.launches - earlier.launches,
            copies_in: self.copies_in - earlier.copies_in,
            bytes_in: self.bytes_in - earlier.bytes_in,
            copies_out: self.copies_out - earlier.copies_out,
            bytes_out: self.bytes_out - earlier.bytes_out,
            allocations: self.allocations - earlier.allocations,
            bytes_read: self.bytes_read - earlier.bytes_read,
        }
    }
}

impl HostDriver {
    /// What was asked of the driver so far, in a process that has loaded it.
    pub fn counts(&self) -> DriverCounts {
        let mut counts = [0u64; 7];
        // SAFETY: the file that `build` made, which this process has loaded as its driver.
        let library =
            unsafe { Library::new(self.libraries.join("libcuda.so")) }.expect("the driver was built");
        // SAFETY: the signature that driver.hpp declares; seven numbers are written.
        unsafe {
            let count: Symbol<'_, unsafe extern "C" fn(*mut u64)> =
                library.get(b"outrider_counts").expect("the host's driver counts");
            count(counts.as_mut_ptr());
        }
        let [launches, copies_in, bytes_in, copies_out, bytes_out, allocations, bytes_read] = counts;
        DriverCounts { launches, copies_in, bytes_in, copies_out, bytes_out, allocations, bytes_read }
    }

    /// Builds it with the system's C++ compiler, unless that was done before.
    pub fn build() -> Result<Self, String> {
        let table: String = sources::all()
            .iter()
            .flat_map(|source| source.kernels)
            .map(|kernel| {
                let (name, threads) = (kernel.name, kernel.threads);
                format!("    {{\"{name}\", {{run_{name}, params_{name}, {threads}}}}},\n")
            })
            .collect();
        let find = format!(
            "static driver::Kernel* driver::find(const char* name) {{\n  static auto& kernels = *new std::map<std::string, Kernel>{{\n\
             {table}  }};\n  auto found = kernels.find(name);\n  return found == kernels.end() ? nullptr : &found->second;\n}}\n"
        );
        let text = format!("{}\n{DRIVER}\n{BLAS}\n{find}", on_host::kernels());
        let library = on_host::build(&text, "libcuda.so", Check::Nothing)?;
        let libraries = library.parent().map(Path::to_owned).ok_or("a library lies in a folder")?;
        let blas = libraries.join(BLAS_NAME);
        if !blas.exists() {
            // Several processes may do it at once, to the same end.
            let made = std::os::unix::fs::symlink("libcuda.so", &blas);
            made.or_else(|error| if blas.exists() { Ok(()) } else { Err(error) })
                .map_err(|error| format!("{}: {error}", blas.display()))?;
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

    /// For a test, named as the harness does: runs it again, as a process of its own that finds the driver, for the loader
    /// looks for libraries in a new place only as a process begins. Returns the driver in that second run, and nothing in the
    /// first, once the second went well.
    ///
    /// Panics where it did not.
    pub fn for_test(name: &str) -> Option<Self> {
        Self::for_test_with(name, &[])
    }

    /// The same with variables in that process's environment: `OUTRIDER_HOST_DEVICES` devices, and a driver
    /// of `OUTRIDER_HOST_DRIVER_VERSION`.
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
