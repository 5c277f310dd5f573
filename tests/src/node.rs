//! Node programs for tests: a folder with `package.json` and a script, copied to the target directory, where
//! its packages are installed once.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::python::{run, target_directory};

/// Written last: an installation that was interrupted has none.
const MADE_FOR: &str = "made-for.json";

/// Path of the folder's script, next to its installed packages.
pub fn script(folder: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let packages = folder.join("package.json");
    let wanted = std::fs::read(&packages).with_context(|| format!("{}", packages.display()))?;
    let kind = folder.file_name().context("a folder has a name")?.to_string_lossy();
    let environment = target_directory()?.join(format!("test-node-{kind}"));
    std::fs::create_dir_all(&environment)?;
    let script = environment.join(name);
    std::fs::copy(folder.join(name), &script)?;
    let made_for = environment.join(MADE_FOR);
    if std::fs::read(&made_for).is_ok_and(|made_for| made_for == wanted) {
        return Ok(script);
    }
    std::fs::copy(&packages, environment.join("package.json"))?;
    let install = ["install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix"];
    run(Command::new("npm").args(install).arg(&environment)).context(
        "cannot install the Node packages of the tests: are npm (Node 20 or later) and its registry reachable?",
    )?;
    std::fs::write(made_for, wanted)?;
    Ok(script)
}
