//! Popular client programs, each installed from its registry in a separate environment, run against a running
//! cluster. `tests/python/clients/` and `tests/node/` in this crate contain one script and one package list
//! per client.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::ensure;

use crate::{node, pair, python};

/// Names of the scripts and package lists.
pub const CLIENTS: [&str; 8] =
    ["anthropic", "openai-node", "instructor", "pydantic-ai", "litellm", "langchain", "lm-eval", "aiperf"];

/// Clients that run only when selected by name: with PyPI's torch for Linux, each environment takes 6 GB or
/// more.
pub const LARGE_CLIENTS: [&str; 2] = ["guidellm", "vllm"];

/// Clients that run in Node, and their folders.
const IN_NODE: [(&str, &str); 1] = [("openai-node", "openai")];

/// Runs a client's checks against the cluster at `url`. Its output ends with the number of checks that
/// passed.
///
/// Blocks until the checks are done; takes longer if the environment must be created first.
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
            // Python must not write compiled files into the tree.
            client.arg("-B").arg(folder.join(format!("{name}_client.py")));
            client
        }
    };
    Ok(client.args(["--url", url, "--model", pair::MODEL]).output()?)
}

/// Returns the number of checks that passed; fails unless all did and there were at least `min_checks`.
pub fn count_passed(output: &Output, min_checks: usize) -> anyhow::Result<usize> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a check failed:\n{stdout}{stderr}");
    let passed = stdout.lines().filter(|line| line.starts_with("ok ")).count();
    // An empty list of checks would also succeed.
    ensure!(passed >= min_checks, "only {passed} checks ran:\n{stdout}");
    Ok(passed)
}
