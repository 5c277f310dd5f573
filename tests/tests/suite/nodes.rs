//! A target whose model is spread over several processes: its texts, and what happens when one is lost, told
//! to stop, or does not fit.

use anyhow::ensure;
use nix::sys::signal::Signal;
use tests::case::{Case, covering_set};
use tests::cluster::plain_answers;
use tests::nodes::{LEADER, NodesCluster};
use tests::pair::PairText;
use tests::processes::without_drafts;

/// How long a node may be silent, where that is awaited.
const SHORT: [&str; 2] = ["--node-timeout-seconds", "5"];

#[tokio::test(flavor = "multi_thread")]
async fn texts_of_several_processes_are_those_of_one() -> anyhow::Result<()> {
    let cases: Vec<Case> = covering_set(&PairText::load()?)?.into_iter().step_by(3).collect();
    let expected = plain_answers(&cases, 1).await?;
    for ranks in [2, 4] {
        let mut nodes = NodesCluster::start((2, ranks), &[], |_| ()).await?;
        let client = nodes.client().await?;
        let mut accepted = 0;
        for (case, expected) in cases.iter().zip(&expected) {
            for case in [case.with_k(0), case.with_k(4), case.with_tree(4, 8)] {
                let answer = client.ask(&case).await?;
                answer.check_same(&case.name, expected)?;
                accepted += answer.speculation().accepted_tokens;
            }
        }
        ensure!(accepted > 0, "no drafted token was accepted");
        nodes.cluster().signal(LEADER, Signal::SIGTERM)?;
        for node in [0, 1] {
            nodes.ends_with(node, 0).await?;
        }
    }
    Ok(())
}

/// Whatever happens to one node ends the others, with a line that names it; started again they continue the
/// text that was begun.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_node_ends_all_and_they_continue_the_text_when_they_are_back() -> anyhow::Result<()> {
    let mut nodes = NodesCluster::start((2, 2), &SHORT, without_drafts).await?;
    let client = nodes.client().await?;
    let case = Case { seed: 77, ..Case::long_text(0.7, 600)? };
    let expected = client.ask(&case).await?;

    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    nodes.signal(1, Signal::SIGKILL);
    nodes.ends_with(0, 1).await?;
    nodes.logs().line_with(LEADER, &["node 1", "it closed the connection"]).await?;
    nodes.restart().await?;
    stream.rest().await?.check_same("after a killed follower", &expected)?;

    // Stopped while nothing runs: its sockets stay open.
    nodes.signal(1, Signal::SIGSTOP);
    nodes.ends_with(0, 1).await?;
    nodes.logs().line_with(LEADER, &["node 1 is lost: it was silent for 5s"]).await?;
    nodes.signal(1, Signal::SIGCONT);
    nodes.ends_with(1, 1).await?;
    nodes.restart().await?;

    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    nodes.cluster().kill(LEADER).await?;
    nodes.ends_with(1, 1).await?;
    nodes.logs().line_with("node-1", &["node 0 is lost: it closed the connection"]).await?;
    nodes.restart().await?;
    stream.rest().await?.check_same("after a killed leader", &expected)
}

/// A node that is told to stop takes the others with it, after the texts that were begun.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_drain_together_and_only_nodes_that_fit_join() -> anyhow::Result<()> {
    let mut nodes = NodesCluster::launch((2, 2), &[], without_drafts)?;
    let mut other = nodes.start_node(1, &["--weights", "int8"])?;
    let refused = other.wait().await;
    let says = format!(
        "error: node 0 at {} does not let node 1 join: weights: int8 on node 1, auto on node 0; give all nodes the \
         same --weights",
        nodes.leader_address()
    );
    let lines = &refused.last_lines;
    ensure!(lines.last() == Some(&says) && refused.status.and_then(|s| s.code()) == Some(1), "{refused}");
    nodes
        .logs()
        .line_with(LEADER, &["node 1 was refused", "weights: int8 on node 1, auto on node 0"])
        .await?;
    nodes.start_followers()?;
    nodes.ready().await?;

    let client = nodes.client().await?;
    let case = Case { seed: 5, ..Case::long_text(0.7, 300)? };
    let expected = client.ask(&case).await?;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    nodes.signal(1, Signal::SIGTERM);
    nodes.logs().line_with(LEADER, &["stopping: requests in flight may finish", "node 1 stops"]).await?;
    let answer = stream.rest().await?;
    answer.check_same("while the nodes drain", &expected)?;
    for node in [0, 1] {
        nodes.ends_with(node, 0).await?;
    }
    nodes.logs().line_with("node-1", &["stopping: requests in flight may finish", "SIGTERM"]).await.map(drop)
}
