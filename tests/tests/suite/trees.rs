//! Token trees through real processes: more candidates per position change how fast tokens arrive, never
//! which.

use anyhow::ensure;
use nix::sys::signal::Signal;
use tests::case::{Case, covering_set};
use tests::client::Answer;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::pair::PairText;
use tests::processes;
use tests::wait::until;

/// Concurrent sequences.
const CONCURRENCY: usize = 9;

/// Depth and number of tokens of the trees.
const SHAPES: [(u32, u32); 4] = [(1, 4), (3, 4), (4, 12), (8, 48)];

/// Totals over answers: rounds, drafted tokens, accepted tokens.
fn totals<'a>(answers: impl Iterator<Item = &'a Answer>) -> (u64, u64, u64) {
    answers.map(Answer::speculation).fold((0, 0, 0), |(rounds, drafted, accepted), usage| {
        (rounds + usage.rounds, drafted + usage.draft_tokens, accepted + usage.accepted_tokens)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn trees_of_every_shape_change_no_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let cases = covering_set(&PairText::load()?)?;
    let expected = client.ask_plain(&cases, 1).await?;
    for (k, num_tokens) in SHAPES {
        let trees: Vec<Case> = cases.iter().map(|case| case.with_tree(k, num_tokens)).collect();
        // If other programs use the CPU, drafts are late and rounds plain: then repeat.
        until("drafts are larger than chains", async || {
            let answers = client.ask_by_name(&trees, CONCURRENCY).await?;
            for (tree, expected) in trees.iter().zip(&expected) {
                answers[&tree.name].check_same(&tree.name, expected)?;
            }
            let (rounds, drafted, _) = totals(answers.values());
            Ok(drafted > rounds * u64::from(k))
        })
        .await?;
    }
    // The same draws with more candidates: fewer verifications.
    let chains: Vec<Case> = cases.iter().map(|case| case.with_k(4)).collect();
    let trees: Vec<Case> = cases.iter().map(|case| case.with_tree(4, 20)).collect();
    until("trees save a tenth of the rounds of chains", async || {
        let (chains, _, _) = totals(client.ask_by_name(&chains, CONCURRENCY).await?.values());
        let (trees, _, _) = totals(client.ask_by_name(&trees, CONCURRENCY).await?.values());
        Ok(trees * 10 < chains * 9)
    })
    .await?;
    cluster.stop().await
}

/// The text continues without its draft worker, and on another target, from KV left by trees.
#[tokio::test(flavor = "multi_thread")]
async fn losing_the_workers_of_a_tree_changes_no_token() -> anyhow::Result<()> {
    let cases = [Case::long_text(0.0, 400)?, Case::long_text(1.0, 400)?];
    let expected = plain_answers(&cases, 2).await?;
    for (case, expected) in cases.iter().zip(&expected) {
        let cluster = Cluster::start(|_| ()).await?;
        let target = cluster.add_far(WorkerKind::Target).await?;
        let draft = cluster.add(WorkerKind::Draft).await?;
        let client = cluster.client().await?;
        let tree = case.with_tree(4, 16);
        let short = Case { max_tokens: 24, ..tree.clone() };
        client.wait_for_drafts(&short).await?;
        let mut stream = client.open(&tree).await?;
        stream.read_tokens(60).await?;
        draft.stop().await;
        stream.read_tokens(80).await?;
        // Before the other target is there, so that the text cannot end before.
        target.stop().await;
        let second = cluster.add(WorkerKind::Target).await?;
        let _draft = cluster.add(WorkerKind::Draft).await?;
        let got = stream.rest().await?;
        got.check_same(&case.name, expected)?;
        ensure!(second.steps().await? > 0, "the text ended before its target did");
        ensure!(totals(std::iter::once(&got)).1 > 0, "nothing was drafted");
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_a_draft_process_that_drafts_trees_changes_no_token() -> anyhow::Result<()> {
    let cluster = processes::start(|_| ()).await?;
    let client = processes::client(&cluster).await?;
    let case = Case::long_text(1.0, 400)?;
    let expected = client.ask(&case.with_k(0)).await?;
    let tree = case.with_tree(4, 16);
    let short = Case { max_tokens: 12, ..tree.clone() };
    client.wait_for_drafts(&short).await?;
    let mut stream = client.open(&tree).await?;
    stream.read_tokens(20).await?;
    cluster.signal("draft-0", Signal::SIGKILL)?;
    let got = stream.rest().await?;
    got.check_same(&tree.name, &expected)?;
    let used = got.speculation();
    ensure!(used.draft_tokens > 4 * used.rounds.min(5), "it was killed before it drafted trees: {used:?}");
    ensure!(used.disabled_reason == "no_draft_worker", "it was killed after the text was done: {used:?}");
    cluster.stop().await;
    Ok(())
}

/// Modes whose text depends on the draft, and drafts without scores, get chains even if trees are requested.
#[tokio::test(flavor = "multi_thread")]
async fn only_coupled_drafts_of_a_model_are_trees() -> anyhow::Result<()> {
    use speculation::AcceptanceMode::{Coupled, Rejection, Typical};
    for (worker, mode) in
        [(WorkerKind::Draft, Rejection), (WorkerKind::Draft, Typical), (WorkerKind::Ngram, Coupled)]
    {
        let (cluster, _target, _draft) = Cluster::of_pair(worker).await?;
        let client = cluster.client().await?;
        let prompt = PairText::load()?.bundled("code")?.swap_remove(1);
        let mut case = Case::new(format!("{worker:?} in {} mode", mode.as_str()), prompt, 1.0);
        (case.max_tokens, case.ignore_eos, case.acceptance) = (60, true, mode);
        // If other programs use the CPU, drafts are late and rounds plain: then repeat.
        until("drafts are used", async || {
            let got = client.ask(&case.with_tree(3, 20)).await?;
            let (rounds, drafted, _) = totals(std::iter::once(&got));
            ensure!(drafted <= 3 * rounds, "{}: {drafted} tokens in {rounds} rounds", case.name);
            if mode == Coupled {
                got.check_same(&case.name, &client.ask(&case.with_k(0)).await?)?;
            }
            Ok(drafted > 0)
        })
        .await?;
        cluster.stop().await?;
    }
    Ok(())
}
