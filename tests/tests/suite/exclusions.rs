//! `allowed_token_ids` and `bad_words`: the excluded tokens never occur, and drafts, chains or trees, change
//! no token. The bad words are parts of the text that the target writes without them, so that they matter.

use anyhow::ensure;
use speculation::{AcceptanceMode, TokenId};
use tests::case::Case;
use tests::client::{Answer, Client};
use tests::cluster::{Cluster, WorkerKind};
use tests::oracle::OracleCheck;
use tests::pair::{END_OF_TEXT, PairText, TASK_TYPES};

/// Concurrent sequences.
const CONCURRENCY: usize = 9;

/// Depth and number of tokens of the drafts: chains and trees.
const SHAPES: [(u32, u32); 4] = [(1, 0), (4, 0), (8, 0), (4, 12)];

/// Requests with bad words, with allowed ids, or with both and penalties.
async fn cases(client: &Client) -> anyhow::Result<Vec<Case>> {
    let text = PairText::load()?;
    let mut cases = Vec::new();
    for (i, task_type) in TASK_TYPES.into_iter().enumerate() {
        let prompt = text.bundled(task_type)?.swap_remove(0);
        let temperature = [0.0, 0.7, 1.0][i % 3];
        let mut case = Case::new(format!("{task_type} at T = {temperature}"), prompt, temperature);
        case.seed = i as u64;
        case.max_tokens = 40;
        case.logprobs = (i % 4 == 0).then_some(2);
        cases.push(case.with_prompt_tail(60));
    }
    let answers = client.ask_plain(&cases, CONCURRENCY).await?;
    for (i, (case, answer)) in cases.iter_mut().zip(&answers).enumerate() {
        // Each kind of exclusion occurs at each temperature.
        let kind = i / 3 % 3;
        if kind != 0 {
            case.sampling.bad_words = bad_words(&answer.token_ids);
        }
        if kind != 1 {
            case.sampling.allowed_token_ids = (0..4_096).filter(|id| id % 3 != 1).collect();
        }
        if kind == 2 {
            case.sampling.repetition_penalty = 1.2;
            case.sampling.presence_penalty = 0.3;
        }
    }
    Ok(cases)
}

/// Parts of one to three tokens of a text.
fn bad_words(ids: &[TokenId]) -> Vec<Vec<TokenId>> {
    let parts = (1..4).flat_map(|len| ids.windows(len).step_by(4 + len));
    parts.filter(|ids| ids[..] != [END_OF_TEXT]).map(<[TokenId]>::to_vec).collect()
}

/// Checks that an answer has no excluded token.
fn check_excluded(case: &Case, answer: &Answer) -> anyhow::Result<()> {
    let (name, ids) = (&case.name, &answer.token_ids);
    for word in &case.sampling.bad_words {
        ensure!(ids.windows(word.len()).all(|ids| ids != word), "{name}: {word:?} occurs");
    }
    let allowed = &case.sampling.allowed_token_ids;
    ensure!(allowed.is_empty() || ids.iter().all(|id| allowed.contains(id)), "{name}: an id is not allowed");
    Ok(())
}

/// The answers without drafts. They have no excluded token.
async fn answers_without_drafts(client: &Client, cases: &[Case]) -> anyhow::Result<Vec<Answer>> {
    let answers = client.ask_plain(cases, CONCURRENCY).await?;
    cases.iter().zip(&answers).try_for_each(|(case, answer)| check_excluded(case, answer))?;
    Ok(answers)
}

/// Checks that drafts of this depth and number of tokens change no token, with at most `width` requests at
/// once. Returns how many tokens were drafted and how many of them accepted.
async fn check_drafted(
    client: &Client,
    (cases, expected): (&[Case], &[Answer]),
    (k, num_tokens): (u32, u32),
    width: usize,
) -> anyhow::Result<(u64, u64)> {
    let drafted: Vec<Case> = cases.iter().map(|case| case.with_tree(k, num_tokens)).collect();
    let answers = client.ask_all(&drafted, width).await?;
    let (mut num_drafted, mut num_accepted) = (0, 0);
    for ((case, answer), expected) in drafted.iter().zip(&answers).zip(expected) {
        answer.check_same(&case.name, expected)?;
        let speculation = answer.speculation();
        num_drafted += speculation.draft_tokens;
        num_accepted += speculation.accepted_tokens;
    }
    Ok((num_drafted, num_accepted))
}

#[tokio::test(flavor = "multi_thread")]
async fn excluded_tokens_never_occur_and_drafts_change_no_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let cases = cases(&client).await?;
    let expected = answers_without_drafts(&client, &cases).await?;
    let oracle = OracleCheck::load()?;
    cases.iter().zip(&expected).try_for_each(|(case, answer)| oracle.check(case, answer))?;
    for shape in SHAPES {
        let (_, accepted) = check_drafted(&client, (&cases, &expected), shape, CONCURRENCY).await?;
        ensure!(accepted > 0, "no drafted token of {shape:?} was accepted");
    }
    for acceptance in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let in_mode: Vec<Case> = cases.iter().map(|case| Case { acceptance, ..case.with_k(4) }).collect();
        for (case, answer) in in_mode.iter().zip(client.ask_all(&in_mode, CONCURRENCY).await?) {
            check_excluded(case, &answer)?;
        }
    }
    cluster.stop().await
}

/// What is drafted ahead, behind several outcomes, follows the excluded tokens of each.
#[tokio::test(flavor = "multi_thread")]
async fn drafts_ahead_with_excluded_tokens_change_no_token() -> anyhow::Result<()> {
    let (cluster, _target, draft) = Cluster::of_pair(WorkerKind::DraftAhead).await?;
    let client = cluster.client().await?;
    let cases = cases(&client).await?;
    let expected = answers_without_drafts(&client, &cases).await?;
    // One request at a time: with many, the draft worker is never idle and drafts nothing ahead.
    let (_, accepted) = check_drafted(&client, (&cases, &expected), (3, 0), 1).await?;
    ensure!(accepted > 0, "no drafted token was accepted");
    ensure!(draft.draft_ahead_hits().await? > 0, "no proposal was drafted ahead");
    cluster.stop().await
}

/// N-grams do not know what is excluded: the target cuts their drafts.
#[tokio::test(flavor = "multi_thread")]
async fn drafts_with_excluded_tokens_are_cut() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Ngram).await?;
    let client = cluster.client().await?;
    let cases = cases(&client).await?;
    let expected = answers_without_drafts(&client, &cases).await?;
    let (drafted, accepted) = check_drafted(&client, (&cases, &expected), (8, 0), CONCURRENCY).await?;
    ensure!(drafted > accepted, "none of {drafted} drafted tokens was cut");
    cluster.stop().await
}
