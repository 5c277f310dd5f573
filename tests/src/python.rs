//! Python environments for tests: virtual environments with pinned packages, each created once and kept in
//! the target directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// The interpreter of an environment with the packages listed in `requirements` (a pip requirements file).
///
/// Several tests may call this at the same time: one creates the environment, the others wait for it.
pub fn interpreter(requirements: &Path) -> anyhow::Result<PathBuf> {
    let wanted =
        std::fs::read_to_string(requirements).with_context(|| format!("{}", requirements.display()))?;
    let name = requirements.file_stem().context("a file of requirements has a name")?.to_string_lossy();
    let environment = target_directory()?.join(format!("test-venv-{name}"));
    let python = environment.join("bin/python");
    let lock = File::create(environment.with_extension("lock"))?;
    lock.lock()?;
    // Written last: an environment whose creation was interrupted has none.
    let made_for = environment.join("requirements.txt");
    if std::fs::read_to_string(&made_for).is_ok_and(|made_for| made_for == wanted) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment)).context(
        "cannot make a Python environment: install Python 3.10 or later with venv and ensurepip \
         (Debian: apt-get install python3-venv, or `make deps`)",
    )?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
    run(Command::new(&python).args(install).arg(requirements)).context(
        "cannot install the Python packages of the tests: is PyPI, or a mirror that pip knows, reachable?",
    )?;
    std::fs::write(&made_for, wanted)?;
    Ok(python)
}

/// Cargo's target directory, derived from the path of this program, which is in `target/PROFILE`, or for a
/// test in its `deps` folder.
pub(crate) fn target_directory() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folder = program.parent().context("a program lies in a folder")?;
    let profile = if folder.ends_with("deps") { folder.parent() } else { Some(folder) };
    let directory = profile.and_then(Path::parent).context("a program lies below the target directory")?;
    Ok(directory.to_owned())
}

/// Runs a command that must succeed.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let all_output = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success(),
        "{command:?} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&all_output)
    );
    Ok(())
}
