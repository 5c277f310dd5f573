//! The central guarantee: for any draft, from any source and of any length, and with any concurrent load, the
//! committed ids are the target's own.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Context as _, ensure};
use proto::v1::FinishReason;
use speculation::AcceptanceMode;
use tests::case::{Case, covering_set};
use tests::client::Answer;
use tests::cluster::{Cluster, WorkerKind};
use tests::hostile::{DraftMisbehaviour, HostileDraft};
use tests::oracle::OracleCheck;
use tests::pair::PairText;

/// One sequence and eight concurrent ones.
const CONCURRENCY: usize = 9;

/// Runs every case of the covering set alone at k = 0; then at k = 1, 4 and 8 with nine concurrent requests,
/// and every third case alone at k = 4. Returns the numbers of verified drafted tokens and of accepted ones.
async fn check_lossless(cluster: &Cluster) -> anyhow::Result<(u64, u64)> {
    let client = cluster.client().await?;
    let cases = covering_set(&PairText::load()?)?;
    let alone = client.ask_plain(&cases, 1).await?;
    let beside: Vec<Case> =
        [1, 4, 8].iter().flat_map(|&k| cases.iter().map(move |case| case.with_k(k))).collect();
    let mut answers = client.ask_by_name(&beside, CONCURRENCY).await?;
    let also_alone: Vec<Case> = cases.iter().step_by(3).map(|case| case.with_k(4)).collect();
    for (name, answer) in client.ask_by_name(&also_alone, 1).await? {
        answers.insert(format!("{name}, alone"), answer);
    }
    let (mut drafted, mut accepted) = (0, 0);
    for (i, (case, expected)) in cases.iter().zip(&alone).enumerate() {
        ensure!(!expected.token_ids.is_empty(), "{}: nothing came", case.name);
        let mut names = [1, 4, 8].map(|k| case.with_k(k).name).to_vec();
        names.extend((i % 3 == 0).then(|| format!("{}, alone", case.with_k(4).name)));
        for name in names {
            let got = answers.get(&name).with_context(|| format!("{name} was not answered"))?;
            got.check_same(&name, expected)?;
            drafted += got.speculation().draft_tokens;
            accepted += got.speculation().accepted_tokens;
        }
    }
    Ok((drafted, accepted))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bundled_draft_changes_no_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let (drafted, accepted) = check_lossless(&cluster).await?;
    ensure!(accepted * 4 > drafted, "only {accepted} of {drafted} drafted tokens were accepted");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ngram_draft_changes_no_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Ngram).await?;
    let (drafted, accepted) = check_lossless(&cluster).await?;
    ensure!(accepted > 0, "none of {drafted} drafted tokens was accepted");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn random_ids_change_no_token() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let vocab_size = PairText::load()?.vocab_size() as u32;
    let num_misbehaviours = Arc::new(AtomicU64::new(0));
    cluster
        .add_draft_service(|lifetime| {
            HostileDraft::new(DraftMisbehaviour::RandomIds, vocab_size, num_misbehaviours, lifetime)
        })
        .await?;
    let (drafted, accepted) = check_lossless(&cluster).await?;
    ensure!(
        drafted > 1_000 && accepted * 20 < drafted,
        "{accepted} of {drafted} random tokens were accepted"
    );
    cluster.stop().await
}

/// The oracle shares only tensors and pure rules with the serving path; see `tests::oracle`.
#[tokio::test(flavor = "multi_thread")]
async fn every_token_equals_the_one_drawn_by_the_oracle() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let oracle = OracleCheck::load()?;
    let mut cases = covering_set(&PairText::load()?)?;
    // The oracle's time grows with the prompt: all but the longest are cut.
    cases.sort_by_key(|case| case.prompt_ids.len());
    let longest = cases.pop().context("no case")?;
    ensure!(longest.prompt_ids.len() > 200, "{} ids are no long prompt", longest.prompt_ids.len());
    let mut cases: Vec<Case> = cases.iter().map(|case| case.with_prompt_tail(60)).collect();
    cases.push(longest);
    let answers = client.ask_by_name(&cases, CONCURRENCY).await?;
    for case in &cases {
        oracle.check(case, &answers[&case.name])?;
    }
    // The oracle's two methods agree: one forward over all ids, and one per token.
    for temperature in [0.0, 0.7, 1.0] {
        let mut at_temperature = cases.iter().filter(|case| case.sampling.temperature == temperature);
        let case = at_temperature.next().with_context(|| format!("no case at {temperature}"))?;
        let case = Case { max_tokens: 10, ..case.with_prompt_tail(20) };
        ensure!(oracle.write(&case)? == client.ask(&case).await?.token_ids, "{}: token by token", case.name);
    }
    cluster.stop().await
}

/// The oracle reads the checkpoint without ballast. Covers greedy and sampled texts, with drafts and without.
#[tokio::test(flavor = "multi_thread")]
async fn ballast_changes_no_token() -> anyhow::Result<()> {
    let oracle = OracleCheck::load()?;
    // Every second case with a short prompt is enough: the tests above check the drafts.
    let cases = covering_set(&PairText::load()?)?;
    let cases: Vec<Case> = cases.iter().step_by(2).map(|case| case.with_prompt_tail(60)).collect();
    for temperature in [0.0, 1.0] {
        ensure!(
            cases.iter().any(|case| case.sampling.temperature == temperature),
            "no case at {temperature}"
        );
    }
    let both: Vec<Case> = cases.iter().flat_map(|case| [case.with_k(0), case.with_k(4)]).collect();
    let (light, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let expected = light.client().await?.ask_by_name(&both, CONCURRENCY).await?;
    light.stop().await?;
    let heavy = Cluster::start(|_| ()).await?;
    let target = heavy.add_with(WorkerKind::Target, |config| config.ballast = 4_000_000).await?;
    let _draft = heavy.add(WorkerKind::Draft).await?;
    let found = heavy.client().await?.ask_by_name(&both, CONCURRENCY).await?;
    for case in &both {
        let (expected, found) = (&expected[&case.name], &found[&case.name]);
        ensure!(expected.system_fingerprint != found.system_fingerprint, "ballast is not seen from outside");
        let as_without = Answer { system_fingerprint: expected.system_fingerprint.clone(), ..found.clone() };
        as_without.check_same(&case.name, expected)?;
    }
    for case in both.iter().skip(1).step_by(8) {
        oracle.check(case, &found[&case.name])?;
    }
    let ballast = target.metrics().await?.sum("outrider_worker_ballast_parameters");
    ensure!((3_000_000..5_000_000).contains(&ballast), "{ballast} parameters of ballast");
    heavy.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oracle_detects_a_single_wrong_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let oracle = OracleCheck::load()?;
    let mut case = covering_set(&PairText::load()?)?[1].with_prompt_tail(20);
    case.max_tokens = 12;
    let right = cluster.client().await?.ask(&case).await?;
    oracle.check(&case, &right)?;
    for i in 0..right.token_ids.len() {
        let mut wrong = right.clone();
        wrong.token_ids[i] ^= 1;
        ensure!(oracle.check(&case, &wrong).is_err(), "a wrong token {i} passed");
    }
    let mut short = right;
    short.token_ids.pop();
    short.logprobs.pop();
    ensure!(oracle.check(&case, &short).is_err(), "a missing last token passed");
    cluster.stop().await
}

/// The other two modes depend on the draft by definition; at T = 0 all three are the same.
#[tokio::test(flavor = "multi_thread")]
async fn rejection_and_typical_modes_finish_and_are_exact_at_temperature_0() -> anyhow::Result<()> {
    for draft in [WorkerKind::Draft, WorkerKind::Ngram] {
        let (cluster, _target, _draft) = Cluster::of_pair(draft).await?;
        let client = cluster.client().await?;
        let cases = covering_set(&PairText::load()?)?;
        let plain = client.ask_plain(&cases, CONCURRENCY).await?;
        for mode in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
            let in_mode: Vec<Case> =
                cases.iter().map(|case| Case { acceptance: mode, ..case.clone() }).collect();
            let answers = client.ask_by_name(&in_mode, CONCURRENCY).await?;
            let mut accepted = 0;
            for (case, expected) in in_mode.iter().zip(&plain) {
                let got = &answers[&case.name];
                accepted += got.speculation().accepted_tokens;
                let whole = got.finish == FinishReason::Stop || got.token_ids.len() as u32 == case.max_tokens;
                ensure!(whole, "{} in {} mode: {} tokens", case.name, mode.as_str(), got.token_ids.len());
                if case.sampling.is_greedy() {
                    got.check_same(&case.name, expected)?;
                }
            }
            ensure!(accepted > 0, "{draft:?} in {} mode: no drafted token was accepted", mode.as_str());
        }
        cluster.stop().await?;
    }
    Ok(())
}
