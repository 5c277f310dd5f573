//! The kernels for the host: their own sources behind a shim (`emulator/emulator.hpp`), built by the system's C++
//! compiler. For checks where there is no GPU; no server ever loads what is built here.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use super::sources;

const SHIM: &str = include_str!("emulator/emulator.hpp");
/// What finds races, where that is asked for.
const RACES: &str = include_str!("emulator/races.hpp");

/// What a library of kernels does besides running them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// Nothing.
    Nothing,
    /// It notes who reads and writes every byte, several times slower.
    Races,
}

/// The shim by itself.
pub(super) fn shim() -> String {
    format!("{}\n", SHIM.replace("#include \"races.hpp\"", RACES))
}

/// The shim, all sources (each in a namespace, for helpers share names) and an entry `run_NAME` for each kernel.
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

/// Builds a library named `file` in a folder of its own, once for each `text` and check.
pub(super) fn build(text: &str, file: &str, check: Check) -> Result<PathBuf, String> {
    let digest = Sha256::new().chain_update(text).chain_update([u8::from(check == Check::Races)]).finalize();
    let id: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let dir = std::env::temp_dir().join("outrider-kernels").join(id);
    let library = dir.join(file);
    // Threads of one process take turns; processes have names of their own.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if library.exists() {
        return Ok(library);
    }
    let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
    std::fs::create_dir_all(&dir).map_err(failed)?;
    let unique = std::process::id();
    let [source, object, built] = ["cpp", "o", "so"].map(|end| dir.join(format!("{unique}.{end}")));
    std::fs::write(&source, text).map_err(failed)?;
    let flags = [
        "-std=c++17",
        "-O2",
        "-c",
        "-fPIC",
        // A product and a sum are two roundings, as in the twins.
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-w",
    ];
    // The calls that the sanitizer puts into kernels are answered by the shim: its own library is not linked.
    let races: &[&str] = if check == Check::Races { &["-fsanitize=thread", "-DCHECK_RACES"] } else { &[] };
    run_compiler(Command::new("c++").args(flags).args(races).arg("-o").args([&object, &source]))?;
    run_compiler(Command::new("c++").arg("-shared").arg("-o").args([&built, &object]))?;
    std::fs::remove_file(&source).map_err(failed)?;
    std::fs::remove_file(&object).map_err(failed)?;
    // Several processes may build at once; the last rename wins, and all are equal.
    std::fs::rename(&built, &library).map_err(failed)?;
    Ok(library)
}

fn run_compiler(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("c++: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(())
}
