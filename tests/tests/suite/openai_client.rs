//! The official `openai` Python package against a running cluster: `python/openai_client.py` contains the
//! checks.

use std::process::Command;

use anyhow::ensure;
use outrider_cli::cluster::free_address;
use tests::{pair, processes, python};

const API_KEY: &str = "a-key-of-this-test";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openai_package_works() -> anyhow::Result<()> {
    let scripts = pair::root().join("tests/tests/python");
    let python = python::interpreter(&scripts.join("requirements.txt"))?;
    let directory = tempfile::tempdir()?;
    let keys = directory.path().join("api-keys");
    std::fs::write(&keys, format!("# for this test\n{API_KEY} tester task_type=code\n"))?;

    // By default the target is served under the name of its directory.
    let open = processes::start(|spec| spec.target_args.clear());
    let keyed = processes::start(|spec| {
        spec.target_args.clear();
        processes::without_drafts(spec);
        spec.api_keys = Some(keys);
    });
    let small = processes::start(|spec| {
        spec.target_args.clear();
        processes::without_drafts(spec);
        let limits = ["--max-sequences", "1", "--max-waiting-requests", "0"];
        spec.router_args = limits.map(str::to_owned).into();
    });
    let (open, keyed, small) = tokio::try_join!(open, keyed, small)?;

    let mut client = Command::new(python);
    client.arg(scripts.join("openai_client.py"));
    client.args(["--open", &open.http_url(), "--keys", &keyed.http_url(), "--api-key", API_KEY]);
    client.args(["--small", &small.http_url(), "--stopped", &format!("http://{}", free_address()?)]);
    client.arg("--tokenizer").arg(pair::target_dir().join("tokenizer.json"));
    let output = tokio::task::spawn_blocking(move || client.output()).await??;
    let stdout = String::from_utf8_lossy(&output.stdout);
    println!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "a check of the openai package failed: see its output above");
    // An empty list of checks would also succeed.
    ensure!(stdout.lines().filter(|line| line.starts_with("ok ")).count() >= 20, "too few checks ran");
    for cluster in [open, keyed, small] {
        cluster.stop().await;
    }
    Ok(())
}
