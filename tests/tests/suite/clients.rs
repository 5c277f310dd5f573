//! The official `anthropic` Python package against a running cluster. `make clients` runs larger ones.

use tests::{clients, processes};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_anthropic_package_works() -> anyhow::Result<()> {
    let cluster = processes::start(|_| ()).await?;
    let url = cluster.http_url();
    let output = tokio::task::spawn_blocking(move || clients::run("anthropic", &url)).await??;
    println!("{}", String::from_utf8_lossy(&output.stdout));
    clients::count_passed(&output, 9)?;
    cluster.stop().await;
    Ok(())
}
