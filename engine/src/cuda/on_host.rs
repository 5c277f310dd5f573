//! Builds the kernels for the host: the same sources with a shim (`emulator/emulator.hpp`), compiled by the
//! system's C++ compiler. For checks without a GPU; a server never loads these libraries.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use sha2::{Digest, Sha256};

use super::sources;

const SHIM: &str = include_str!("emulator/emulator.hpp");
/// What warpgroups do.
const WARPGROUP: &str = include_str!("emulator/warpgroup.hpp");
/// Code that detects data races, if that is requested.
const RACES: &str = include_str!("emulator/races.hpp");

/// Checks that a library of kernels makes while it runs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// No checks.
    Nothing,
    /// Records all reads and writes of every byte to find data races; several times slower.
    Races,
}

/// Source text of the shim.
pub(super) fn shim() -> String {
    SHIM.replace("#include \"races.hpp\"", RACES).replace("#include \"warpgroup.hpp\"", WARPGROUP) + "\n"
}

/// The shim, all sources (each in a namespace, since names of helpers repeat) and an entry `run_NAME` for
/// each kernel.
pub(super) fn kernels() -> String {
    let mut text = shim();
    let mut entries = String::new();
    for (i, source) in sources::all().into_iter().enumerate() {
        text.push_str(&format!("namespace unit_{i} {{\n{}\n}}\n", source.text()));
        for kernel in source.kernels {
            let name = kernel.name;
            entries.push_str(&format!(
                "extern \"C\" void run_{name}(void** p) {{ emulator::entry<unit_{i}::{name}>(p); }}\n\
                 constexpr uint32_t params_{name} = emulator::num_params(unit_{i}::{name});\n"
            ));
        }
    }
    text + &entries
}

/// Builds a library with file name `file` in a separate folder, once for each `text` and check.
pub(super) fn build(text: &str, file: &str, check: Check) -> Result<PathBuf, String> {
    let settings = [check == Check::Races, has_avx2()].map(u8::from);
    let digest = Sha256::new().chain_update(text).chain_update(settings).finalize();
    let id: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let dir = std::env::temp_dir().join("outrider-kernels").join(id);
    let library = dir.join(file);
    let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
    std::fs::create_dir_all(&dir).map_err(failed)?;
    // Tests run in many processes; one of them builds, and the others wait.
    let turn = File::create(dir.join("lock")).map_err(failed)?;
    turn.lock().map_err(failed)?;
    if library.exists() {
        return Ok(library);
    }
    let [source, object, built] = ["kernels.cpp", "kernels.o", "built"].map(|name| dir.join(name));
    std::fs::write(&source, text).map_err(failed)?;
    // Without contraction no bit depends on the instruction set.
    let registers: &[&str] = if has_avx2() { &["-mavx2"] } else { &[] };
    let flags = [
        "-std=c++17",
        "-O2",
        "-c",
        "-fPIC",
        // A product and a sum round twice, as in the twins.
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-w",
    ];
    // The shim implements the calls that the sanitizer adds to kernels; the sanitizer's own library is not
    // linked.
    let races: &[&str] = if check == Check::Races { &["-fsanitize=thread", "-DCHECK_RACES"] } else { &[] };
    run_compiler(
        Command::new("c++").args(flags).args(registers).args(races).arg("-o").args([&object, &source]),
    )?;
    run_compiler(Command::new("c++").arg("-shared").arg("-o").args([&built, &object]))?;
    std::fs::remove_file(&source).map_err(failed)?;
    std::fs::remove_file(&object).map_err(failed)?;
    // Only a complete library has the name that others look for.
    std::fs::rename(&built, &library).map_err(failed)?;
    Ok(library)
}

fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn run_compiler(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("c++: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(())
}
