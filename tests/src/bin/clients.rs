//! `make clients`: runs popular client programs against a running cluster, each installed from its registry
//! in a separate environment, and prints a table. Arguments select clients by name.

use std::io::Write as _;
use std::time::Instant;

use tests::clients::{CLIENTS, LARGE_CLIENTS, all_held, run};
use tests::processes;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let picked: Vec<String> = std::env::args().skip(1).collect();
    let is_picked = |name: &str| match picked.as_slice() {
        [] => CLIENTS.contains(&name),
        picked => picked.iter().any(|picked| picked == name),
    };
    let cluster = processes::start(|_| ()).await?;
    let mut failures = 0;
    let mut out = std::io::stdout();
    writeln!(out, "| client | checks | seconds, installation included | |\n|---|---|---|---|")?;
    for name in CLIENTS.into_iter().chain(LARGE_CLIENTS).filter(|name| is_picked(name)) {
        let (url, began) = (cluster.http_url(), Instant::now());
        let output = tokio::task::spawn_blocking(move || run(name, &url)).await?;
        let seconds = began.elapsed().as_secs();
        let held = output.and_then(|output| {
            let told = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
            Ok((all_held(&output, 1)?, told))
        });
        match held {
            Ok((held, told)) => writeln!(out, "| {name} | {held} | {seconds} | {told} |")?,
            Err(error) => {
                failures += 1;
                writeln!(out, "| {name} | failed | {seconds} | |\n\n{error:#}\n")?;
            }
        }
    }
    cluster.stop().await;
    anyhow::ensure!(failures == 0, "{failures} of the clients do not work");
    Ok(())
}
