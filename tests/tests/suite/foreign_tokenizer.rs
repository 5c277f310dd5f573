//! A draft with another tokenizer than the target's: the committed ids must be the target's own regardless of
//! the translation, and the draft must be worth nearly as much as with the target's tokenizer.

use anyhow::ensure;
use draft_worker::config::DraftConfig;
use speculation::AcceptanceMode;
use tests::case::{Case, covering_set};
use tests::client::{Answer, Client};
use tests::cluster::{Cluster, WorkerKind, draft_config, plain_answers};
use tests::foreign_draft::ForeignDraft;
use tests::pair::{self, PairText};
use tests::wait::until;

/// Concurrent sequences.
const CONCURRENCY: usize = 9;

/// A draft worker that translates `draft` to the bundled target's ids.
fn translating(draft: &ForeignDraft) -> anyhow::Result<DraftConfig> {
    let target_tokenizer = Some(pair::target_dir());
    Ok(DraftConfig { target_tokenizer, ..draft_config(draft.directory())? })
}

/// The covering set, and texts in several scripts, at T = 0, 0.7 and 1.
fn cases() -> anyhow::Result<Vec<Case>> {
    let text = PairText::load()?;
    let mut cases = covering_set(&text)?;
    let more = [
        "Größe, naïve façade: 日本語のテキスト 🙂🙃 и русский",
        "<|end|> is text here, \u{1F469}\u{200D}\u{1F4BB} too\n\n\t  \n",
    ];
    for (i, message) in more.into_iter().enumerate() {
        for temperature in [0.0, 0.7, 1.0] {
            let mut prompt = text.chat_ids(message)?;
            if i == 0 {
                // An incomplete character at the end.
                let character = text.ids("🙃")?;
                ensure!(character.len() > 1, "a token of its own");
                prompt.extend(&character[..1]);
            }
            cases.push(Case::new(format!("script {i} at T = {temperature}"), prompt, temperature));
        }
    }
    Ok(cases)
}

/// Requests variants of `cases` and compares each text with `expected`. Returns the numbers of drafted and
/// accepted tokens.
async fn check(
    client: &Client,
    (cases, expected): (&[Case], &[Answer]),
    (width, change): (usize, impl Fn(&Case) -> Case),
) -> anyhow::Result<(u64, u64)> {
    let variants: Vec<Case> = cases.iter().map(change).collect();
    let answers = client.ask_by_name(&variants, width).await?;
    let (mut drafted, mut accepted) = (0, 0);
    for (variant, expected) in variants.iter().zip(expected) {
        let answer = &answers[&variant.name];
        answer.check_same(&variant.name, expected)?;
        drafted += answer.speculation().draft_tokens;
        accepted += answer.speculation().accepted_tokens;
    }
    Ok((drafted, accepted))
}

/// Acceptance rate of a draft worker with four tokens per round; also compares the texts.
async fn acceptance(config: DraftConfig, (cases, expected): (&[Case], &[Answer])) -> anyhow::Result<f64> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let _draft = cluster.add_draft(config).await?;
    let client = cluster.client().await?;
    let (drafted, accepted) = check(&client, (cases, expected), (1, |case: &Case| case.with_k(4))).await?;
    ensure!(drafted > 500, "only {drafted} tokens were drafted");
    cluster.stop().await?;
    Ok(accepted as f64 / drafted as f64)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_with_another_tokenizer_changes_no_token() -> anyhow::Result<()> {
    let draft = ForeignDraft::new()?;
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let _draft = cluster.add_draft(translating(&draft)?).await?;
    let client = cluster.client().await?;
    let cases = cases()?;
    let expected = client.ask_plain(&cases, CONCURRENCY).await?;
    let expectations = (cases.as_slice(), expected.as_slice());
    for k in [1, 4, 8] {
        let (drafted, accepted) =
            check(&client, expectations, (CONCURRENCY, |case: &Case| case.with_k(k))).await?;
        ensure!(
            accepted * 20 > drafted,
            "k = {k}: only {accepted} of {drafted} drafted tokens were accepted"
        );
    }
    for (k, num_tokens) in [(1, 4), (4, 12)] {
        let tree = |case: &Case| case.with_tree(k, num_tokens);
        let (_, accepted) = check(&client, expectations, (CONCURRENCY, tree)).await?;
        ensure!(accepted > 0, "nothing of the trees of {num_tokens} tokens was accepted");
    }
    // Alternates drafted and plain rounds, as chosen by the lane.
    let left_to_lane = |case: &Case| Case { is_k_left_to_lane: true, ..case.clone() };
    check(&client, expectations, (2, left_to_lane)).await?;
    cluster.stop().await
}

/// A draft with all of the target's tokens under other ids is worth as much as the bundled one; without a
/// twentieth of them, somewhat less; and with a wrong translation little. None changes a token.
#[tokio::test(flavor = "multi_thread")]
async fn a_draft_with_another_tokenizer_is_accepted_nearly_as_often() -> anyhow::Result<()> {
    let cases = covering_set(&PairText::load()?)?;
    let expected = plain_answers(&cases, CONCURRENCY).await?;
    let expectations = (cases.as_slice(), expected.as_slice());
    let bundled = acceptance(draft_config(&pair::draft_dir())?, expectations).await?;
    let renumbered = acceptance(translating(&ForeignDraft::renumbered()?)?, expectations).await?;
    let foreign = acceptance(translating(&ForeignDraft::new()?)?, expectations).await?;
    let wrong = acceptance(translating(&ForeignDraft::with_a_wrong_tokenizer()?)?, expectations).await?;
    ensure!(renumbered > 0.95 * bundled, "other ids: {renumbered:.3}, bundled: {bundled:.3}");
    ensure!(foreign > 0.6 * bundled, "another tokenizer: {foreign:.3}, bundled: {bundled:.3}");
    ensure!(wrong * 3.0 < foreign, "a map that is off by one: {wrong:.3}, the right one: {foreign:.3}");
    Ok(())
}

/// Features that depend on positions, masks and distributions: draft-ahead, grammars, rejection mode.
#[tokio::test(flavor = "multi_thread")]
async fn a_draft_with_another_tokenizer_drafts_ahead_and_follows_grammars() -> anyhow::Result<()> {
    let draft = ForeignDraft::new()?;
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let worker = cluster.add_draft(DraftConfig { draft_ahead: 9, ..translating(&draft)? }).await?;
    let client = cluster.client().await?;
    let mut cases = cases()?;
    for case in cases.iter_mut().step_by(5) {
        case.sampling.min_tokens = 0;
        case.sampling.logit_bias.clear();
        case.grammar = Some(r#"{"kind": "regex", "text": "[a-z ,é]{4,60}[.!]"}"#.to_owned());
    }
    let expected = client.ask_plain(&cases, CONCURRENCY).await?;
    for k in [2, 4] {
        let (_, accepted) = check(&client, (&cases, &expected), (1, |case: &Case| case.with_k(k))).await?;
        ensure!(accepted > 0, "nothing was accepted");
    }
    ensure!(worker.draft_ahead_hits().await? > 0, "nothing was drafted ahead");
    // Greedy texts are equal in this mode too; others follow the target's distribution with every draft that
    // reports the distribution it was drawn from.
    let mut accepted = 0;
    let rejecting =
        |case: &Case| Case { acceptance: AcceptanceMode::Rejection, grammar: None, ..case.with_k(4) };
    let variants: Vec<Case> = cases.iter().map(rejecting).collect();
    let answers = client.ask_by_name(&variants, 1).await?;
    for ((case, variant), expected) in cases.iter().zip(&variants).zip(&expected) {
        let answer = &answers[&variant.name];
        accepted += answer.speculation().accepted_tokens;
        if case.sampling.temperature == 0.0 && case.grammar.is_none() {
            answer.check_same(&variant.name, expected)?;
        }
    }
    ensure!(accepted > 0, "no drafted token was accepted in rejection mode");
    until("what was drafted ahead is freed", async || {
        Ok(worker.metrics().await?.sum("outrider_worker_kv_blocks_used") == 0)
    })
    .await?;
    cluster.stop().await
}

/// A new draft worker receives the whole text at once, in the target's ids.
#[tokio::test(flavor = "multi_thread")]
async fn replacing_a_draft_with_another_tokenizer_changes_no_token() -> anyhow::Result<()> {
    let draft = ForeignDraft::new()?;
    let cases = [Case::long_text(0.0, 400)?, Case::long_text(1.0, 400)?];
    let expected = plain_answers(&cases, 2).await?;
    for (case, expected) in cases.iter().zip(&expected) {
        let cluster = Cluster::start(|_| ()).await?;
        let target = cluster.add_far(WorkerKind::Target).await?;
        let first = cluster.add_draft(translating(&draft)?).await?;
        let client = cluster.client().await?;
        let mut stream = client.open(&case.with_k(3)).await?;
        stream.read_tokens(80).await?;
        first.stop().await;
        stream.read_tokens(100).await?;
        // Before the second draft worker is there, so that the text cannot end before.
        target.stop().await;
        let second = cluster.add_draft(translating(&draft)?).await?;
        let _target = cluster.add(WorkerKind::Target).await?;
        stream.rest().await?.check_same(&case.name, expected)?;
        ensure!(second.steps().await? > 0, "the text ended before the second draft worker was there");
        cluster.stop().await?;
    }
    Ok(())
}

/// The handshake contains the hash of the target's tokenizer: with a translation for another tokenizer the
/// draft is not paired.
#[tokio::test(flavor = "multi_thread")]
async fn a_draft_for_another_target_is_not_used() -> anyhow::Result<()> {
    let draft = ForeignDraft::new()?;
    let other = ForeignDraft::renumbered()?;
    let wrong_target =
        DraftConfig { target_tokenizer: Some(other.directory().to_owned()), ..translating(&draft)? };
    for mut config in [draft_config(draft.directory())?, wrong_target] {
        config.worker.profile_steps = false;
        let cluster = Cluster::start(|_| ()).await?;
        let _target = cluster.add_plain_target(|_| ()).await?;
        let _draft = cluster.add_draft(config).await?;
        let client = cluster.client().await?;
        let case =
            Case::new("a question", PairText::load()?.chat_ids("What is the capital of France?")?, 0.0);
        let answer = client.ask(&case).await?;
        ensure!(!answer.token_ids.is_empty() && answer.speculation().draft_tokens == 0, "{answer:?}");
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tokenizer_without_common_tokens_is_rejected_at_start() -> anyhow::Result<()> {
    let draft = ForeignDraft::new()?;
    let nothing = tempfile::tempdir()?;
    for (file, content, expected) in [
        ("missing.json", None, "give the target's tokenizer.json or its directory"),
        ("broken.json", Some("{}"), "tokenizer.json cannot be read"),
        ("wordpiece.json", Some(WORDPIECE), "does not keep the bytes of a text"),
    ] {
        let path = nothing.path().join(file);
        content.map(|content| std::fs::write(&path, content)).transpose()?;
        let cluster = Cluster::start(|_| ()).await?;
        let config = DraftConfig { target_tokenizer: Some(path), ..translating(&draft)? };
        let error =
            cluster.add_draft(config).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(error.contains(expected), "{file}: {error}");
        cluster.stop().await?;
    }
    Ok(())
}

/// The smallest WordPiece tokenizer.
const WORDPIECE: &str = r###"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"[UNK]": 0, "a": 1, "##b": 2}}}"###;
