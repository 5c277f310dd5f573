//! Programs that people have, each as it comes from its registry, in an environment of its own, against a running cluster:
//! `tests/python/clients/` holds what each is asked, one script and one list of packages a client.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::ensure;

use crate::{pair, python};

/// Scripts and lists of packages, by name.
pub const CLIENTS: [&str; 3] = ["anthropic", "litellm", "langchain"];

/// Runs a client's checks against the cluster at `url`. What it prints ends with how many held.
///
/// It blocks for as long as the checks take, and longer where the environment is still to be made.
pub fn run(name: &str, url: &str) -> anyhow::Result<Output> {
    let folder: PathBuf = pair::root().join("tests/tests/python/clients");
    let python = python::interpreter(&folder.join(format!("{name}.txt")))?;
    let mut client = Command::new(python);
    // What is compiled is not left in the tree.
    client.arg("-B").arg(folder.join(format!("{name}_client.py")));
    Ok(client.args(["--url", url, "--model", pair::MODEL]).output()?)
}

/// How many checks held, where all of them did; there must be `least`.
pub fn all_held(output: &Output, least: usize) -> anyhow::Result<usize> {
    let told = String::from_utf8_lossy(&output.stdout);
    let reasons = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a check failed:\n{told}{reasons}");
    let held = told.lines().filter(|line| line.starts_with("ok ")).count();
    // An empty list of checks would succeed as well.
    ensure!(held >= least, "only {held} checks ran:\n{told}");
    Ok(held)
}
