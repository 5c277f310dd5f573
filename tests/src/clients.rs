//! Programs that people have, each as it comes from its registry, in an environment of its own, against a running cluster:
//! `tests/python/clients/` and `tests/node/` hold what each is asked, one script and one list of packages a client.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::ensure;

use crate::{node, pair, python};

/// Scripts and lists of packages, by name.
pub const CLIENTS: [&str; 8] =
    ["anthropic", "openai-node", "instructor", "pydantic-ai", "litellm", "langchain", "lm-eval", "aiperf"];

/// Those that are asked by name alone: with the torch that PyPI has for Linux, the environment of each takes 6 GB and more.
pub const LARGE_CLIENTS: [&str; 2] = ["guidellm", "vllm"];

/// Those that run in Node, and their folders.
const IN_NODE: [(&str, &str); 1] = [("openai-node", "openai")];

/// Runs a client's checks against the cluster at `url`. What it prints ends with how many held.
///
/// It blocks for as long as the checks take, and longer where the environment is still to be made.
pub fn run(name: &str, url: &str) -> anyhow::Result<Output> {
    let scripts: PathBuf = pair::root().join("tests/tests");
    let mut client = match IN_NODE.iter().find(|(in_node, _)| *in_node == name) {
        Some((_, folder)) => {
            let mut client = Command::new("node");
            client.arg(node::script(&scripts.join("node").join(folder), "client.mjs")?);
            client
        }
        None => {
            let folder = scripts.join("python/clients");
            let mut client = Command::new(python::interpreter(&folder.join(format!("{name}.txt")))?);
            // What is compiled is not left in the tree.
            client.arg("-B").arg(folder.join(format!("{name}_client.py")));
            client
        }
    };
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
