//! Synthetic workers: they commit their function of seed and position, for any drafts, with concurrent
//! requests, and across the loss of a target.

use anyhow::ensure;
use proto::v1::FinishReason;
use scheduling::profile::text::SyntheticText;
use speculation::{AcceptanceMode, TokenId};
use tests::case::Case;
use tests::client::Answer;
use tests::cluster::{Cluster, WorkerKind};
use tests::pair;
use worker::config::WorkerConfig;

const TASK_TYPES: [&str; 3] = ["", "sql", "summarization"];

/// Requests of all task types with every k, of different lengths and seeds.
fn cases() -> Vec<Case> {
    let one = |i: u32| {
        let prompt: Vec<TokenId> = (0..3 + 37 * i).map(|id| 4 + id % 256).collect();
        let mut case = Case::new(format!("case {i}"), prompt, [0.0, 1.0][i as usize % 2]);
        case.task_type = TASK_TYPES[i as usize % TASK_TYPES.len()].to_owned();
        case.max_tokens = 20 + 7 * i;
        case.seed = 1_000 + u64::from(i);
        case.with_k([0, 1, 4, 8][i as usize % 4])
    };
    (0..24).map(one).collect()
}

/// The ids of the profile's text after the case's prompt.
fn expected(case: &Case) -> anyhow::Result<Vec<TokenId>> {
    let text = SyntheticText { seed: case.seed, choice: 0, vocab_size: pair::profile()?.vocab_size };
    let start = case.prompt_ids.len() as u32;
    Ok((start..start + case.max_tokens).map(|position| text.token(position)).collect())
}

fn check(case: &Case, answer: &Answer) -> anyhow::Result<()> {
    let expected = expected(case)?;
    let (name, got) = (&case.name, &answer.token_ids);
    ensure!(*got == expected, "{name}: ids differ from the text\n  {expected:?}\n  {got:?}");
    ensure!(answer.finish == FinishReason::Length, "{name}: ended with {:?}", answer.finish);
    Ok(())
}

/// Makes a synthetic worker five times as fast as its profile.
fn accelerate(config: &mut WorkerConfig) {
    if let Some(synthetic) = &mut config.synthetic {
        synthetic.time_scale = 0.2;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn synthetic_workers_commit_the_same_text_for_any_draft() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add_with(WorkerKind::SyntheticTarget, accelerate).await?;
    for _ in 0..2 {
        cluster.add_with(WorkerKind::SyntheticDraft, accelerate).await?;
    }
    let (client, cases) = (cluster.client().await?, cases());
    let (mut drafted, mut accepted) = (0, 0);
    for width in [1, 9] {
        for (case, answer) in cases.iter().zip(client.ask_all(&cases, width).await?) {
            check(case, &answer)?;
            drafted += answer.speculation().draft_tokens;
            accepted += answer.speculation().accepted_tokens;
        }
    }
    // Of eight drafted tokens with an acceptance of 0.4 to 0.7 each, one or two are accepted; of a single
    // one, half.
    ensure!(
        6 * accepted > drafted && 2 * accepted < drafted,
        "{accepted} of {drafted} drafted tokens accepted"
    );
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_continues_at_another_synthetic_target() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let first = cluster.add_far(WorkerKind::SyntheticTarget).await?;
    let _draft = cluster.add(WorkerKind::SyntheticDraft).await?;
    let mut case = cases().swap_remove(2);
    case.max_tokens = 400;
    let mut stream = cluster.client().await?.open(&case).await?;
    stream.read_tokens(40).await?;
    // Before the other target is there, so that the text cannot end before.
    first.stop().await;
    let second = cluster.add(WorkerKind::SyntheticTarget).await?;
    check(&case, &stream.rest().await?)?;
    ensure!(second.steps().await? > 0, "the text ended before its target did");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn features_that_need_a_model_are_rejected_with_the_reason() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::SyntheticTarget).await?;
    let client = cluster.client().await?;
    let case = cases().swap_remove(1);
    for case in [
        Case { logprobs: Some(2), ..case.clone() },
        Case { acceptance: AcceptanceMode::Rejection, ..case.clone() },
    ] {
        let Err(error) = client.ask(&case).await else { anyhow::bail!("{} was answered", case.name) };
        ensure!(format!("{error:#}").contains("has no probabilities"), "{error:#}");
    }
    cluster.stop().await
}
