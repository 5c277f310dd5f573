//! Compiled kernels as files, so that a machine with a GPU needs no NVRTC. `kernels_check --write DIR` writes
//! them, `--cuda-kernels DIR` reads them: `DIR/sm_90/attention.cubin` and so on, with a digest of the
//! sources. A binary only accepts kernels compiled from its own sources.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::sources::{self, Source};
use super::toolkit::CudaVersion;
use super::{CudaError, nvrtc};

/// Name of the digest's file. Its second line is the version of CUDA that compiled the kernels.
pub(super) const DIGEST_FILE: &str = "sources.sha256";
/// Placeholder for machine code if the driver is the host driver.
pub(super) const HOST_KERNELS: &[u8] = b"host kernels\0";

/// Machine code of every source file.
pub(super) type MachineCode = Vec<(&'static Source, Vec<u8>)>;

/// Reads the machine code of every file for a device of this compute capability, and the version of the
/// toolkit that compiled it.
pub(super) fn read(dir: &Path, (major, minor): (i32, i32)) -> Result<(MachineCode, CudaVersion), CudaError> {
    let refuse = |reason: String| CudaError::BadKernelFiles { dir: dir.display().to_string(), reason };
    let found = std::fs::read_to_string(dir.join(DIGEST_FILE))
        .map_err(|error| refuse(format!("{DIGEST_FILE}: {error}")))?;
    let mut lines = found.lines();
    if lines.next() != Some(digest().as_str()) {
        return Err(refuse("made of other sources than this program's: write them anew".to_owned()));
    }
    let toolkit = lines.next().and_then(|line| line.parse().ok());
    let toolkit = toolkit.ok_or_else(|| refuse(format!("{DIGEST_FILE} does not name the toolkit")))?;
    // A cubin runs on devices of the same major and the same or a higher minor compute capability.
    let arch =
        (0..=minor).rev().map(|minor| format!("sm_{major}{minor}")).find(|arch| dir.join(arch).is_dir());
    let arch = arch.ok_or_else(|| refuse(format!("nothing for a device of capability {major}.{minor}")))?;
    let read_one = |source: &'static Source| {
        let path = dir.join(&arch).join(source.machine_code_file());
        let code = std::fs::read(&path).map_err(|error| refuse(format!("{}: {error}", path.display())))?;
        Ok((source, code))
    };
    let runs = |source: &&'static Source| source.target(&arch).is_some();
    let code = sources::all().into_iter().filter(runs).map(read_one).collect::<Result<_, CudaError>>()?;
    Ok((code, toolkit))
}

/// Writes the machine code of one file for an architecture such as `sm_90`.
pub(super) fn write(dir: &Path, arch: &str, source: &Source, code: &[u8]) -> Result<(), CudaError> {
    let folder = dir.join(arch);
    let written = std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(folder.join(source.machine_code_file()), code));
    written.map_err(|error| refused_by_disk(dir, &error))
}

/// Writes the digest of the sources and the toolkit's version. Called last: an incomplete folder has no
/// digest and is refused.
pub(super) fn write_digest(dir: &Path, toolkit: CudaVersion) -> Result<(), CudaError> {
    let text = format!("{}\n{toolkit}\n", digest());
    std::fs::write(dir.join(DIGEST_FILE), text).map_err(|error| refused_by_disk(dir, &error))
}

fn refused_by_disk(dir: &Path, error: &std::io::Error) -> CudaError {
    CudaError::BadKernelFiles { dir: dir.display().to_string(), reason: error.to_string() }
}

/// Digest of the compiler options and all sources. Does not cover the compiler's version.
fn digest() -> String {
    let mut hasher = Sha256::new();
    nvrtc::OPTIONS.iter().for_each(|option| hasher.update(option.as_bytes()));
    sources::all().iter().for_each(|source| hasher.update(source.text().as_bytes()));
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_all(dir: &Path, arch: &str) {
        for source in sources::all() {
            write(dir, arch, source, arch.as_bytes()).unwrap();
        }
    }

    #[test]
    fn a_device_takes_the_nearest_code_that_it_runs_and_no_other_sources() {
        let dir = tempfile::tempdir().unwrap();
        let said = |capability| read(dir.path(), capability).unwrap_err().to_string();
        assert!(said((9, 0)).contains(DIGEST_FILE), "{}", said((9, 0)));
        for arch in ["sm_80", "sm_89", "sm_90"] {
            write_all(dir.path(), arch);
        }
        write_digest(dir.path(), CudaVersion { major: 13, minor: 1 }).unwrap();
        for (capability, arch) in [((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90")]
        {
            let (files, toolkit) = read(dir.path(), capability).unwrap();
            assert_eq!(toolkit, CudaVersion { major: 13, minor: 1 });
            let runs = |source: &&Source| source.target(arch).is_some();
            assert_eq!(files.len(), sources::all().iter().filter(|source| runs(source)).count());
            assert!(files.iter().all(|(_, code)| code == arch.as_bytes()), "{capability:?}");
        }
        assert!(said((10, 0)).contains("nothing for a device of capability 10.0"), "{}", said((10, 0)));
        std::fs::remove_file(dir.path().join("sm_90/draw.cubin")).unwrap();
        assert!(said((9, 0)).contains("draw.cubin"), "{}", said((9, 0)));
        std::fs::write(dir.path().join(DIGEST_FILE), "00").unwrap();
        assert!(said((8, 0)).contains("other sources"), "{}", said((8, 0)));
    }
}
