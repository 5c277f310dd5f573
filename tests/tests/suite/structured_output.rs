//! Output under a grammar: valid according to another library, and with the same ids for any drafts. `make
//! schemas` checks a thousand schemas and reports the cost of masks.

use anyhow::{Context as _, ensure};
use grammar::{Grammar, GrammarKind};
use proto::v1::FinishReason;
use serde_json::{Value, json};
use speculation::{AcceptanceMode, SamplingParams};
use tests::case::Case;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::schemas::schema;
use tests::structured::{Drafted, ask_at_every_k, cases, check_valid};

#[tokio::test(flavor = "multi_thread")]
async fn answers_match_a_hundred_schemas_and_speculation_changes_no_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let schemas: Vec<Value> = (0..100).map(schema).collect();
    let (even, odd): (Vec<_>, Vec<_>) = schemas.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    let schemas_of =
        |part: Vec<(usize, Value)>| part.into_iter().map(|(_, schema)| schema).collect::<Vec<_>>();
    let cases = [cases(0, &schemas_of(even), &[0.0])?, cases(0, &schemas_of(odd), &[1.0])?].concat();
    let (answers, Drafted { drafted, accepted }) = ask_at_every_k(&client, &cases).await?;
    ensure!(accepted * 3 > drafted, "only {accepted} of {drafted} drafted tokens were accepted");
    let finished = check_valid(&cases, &answers).await?;
    println!("{finished} of {} answers came to an end, all of them valid", answers.len());
    cluster.stop().await
}

/// A request whose schema requires long texts.
fn long_case(temperature: f32) -> anyhow::Result<Case> {
    let schema = json!({ "type": "array", "items": { "type": "string", "minLength": 5, "maxLength": 9 }, "minItems": 15, "maxItems": 20 });
    let (_, case) = cases(0, &[schema], &[temperature])?.swap_remove(0);
    Ok(Case { max_tokens: 200, ..case })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_survives_the_loss_of_its_target_and_draft_worker() -> anyhow::Result<()> {
    let cases = [long_case(0.0)?, long_case(1.0)?];
    let expected = plain_answers(&cases, 2).await?;
    for (case, expected) in cases.iter().zip(&expected) {
        ensure!(expected.token_ids.len() > 60, "too short to be interrupted");
        let cluster = Cluster::start(|_| ()).await?;
        let first = cluster.add_far(WorkerKind::Target).await?;
        let draft = cluster.add(WorkerKind::Draft).await?;
        let mut stream = cluster.client().await?.open(case).await?;
        stream.read_tokens(20).await?;
        first.stop().await;
        let second = cluster.add(WorkerKind::Target).await?;
        stream.read_tokens(40).await?;
        draft.stop().await;
        let _ngram = cluster.add(WorkerKind::Ngram).await?;
        let got = stream.rest().await?;
        ensure!(expected.token_ids == got.token_ids, "another text after the workers were replaced");
        ensure!(second.steps().await? > 0, "the text ended before its target did");
        cluster.stop().await?;
    }
    Ok(())
}

/// N-grams do not know the grammar, so most of their drafts are invalid: they are cut, and no request fails.
#[tokio::test(flavor = "multi_thread")]
async fn drafts_that_violate_the_grammar_are_cut_in_every_mode() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Ngram).await?;
    let client = cluster.client().await?;
    let case = Case { max_tokens: 80, ..long_case(1.0)? };
    let expected = client.ask(&case.with_k(0)).await?;
    let got = client.ask(&case.with_k(8)).await?;
    ensure!(expected.token_ids == got.token_ids, "a draft changed the text");
    for acceptance in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let (_, case) = cases(0, &[schema(3)], &[1.0])?.swap_remove(0);
        let answer = client.ask(&Case { acceptance, ..case.with_k(8) }).await?;
        ensure!(answer.finish == FinishReason::Stop, "{acceptance:?}: {:?}", answer.text);
        let value: Value = serde_json::from_str(&answer.text).context("not JSON")?;
        ensure!(value.is_object(), "{value}");
    }
    cluster.stop().await
}

/// After `a` and after `b` the lexer is in the same state, by which llguidance caches masks.
#[tokio::test(flavor = "multi_thread")]
async fn no_mask_of_a_rejected_draft_is_left_for_the_text() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Ngram).await?;
    let client = cluster.client().await?;
    let text = "start: item+\nitem: \"a\" Q \")\" | \"b\" Q \",\"\nQ: \"\\\"\"".to_owned();
    let [a, b, quote_paren, quote_comma, other] = [68, 69, 1197, 1375, 9];
    // The drafts begin with `a`, and the target writes `b` wherever it may.
    let prompt = vec![b, quote_comma, b, quote_comma, a, other, b, quote_comma];
    let logit_bias = vec![(b, 100.0), (quote_paren, 50.0), (quote_comma, 50.0)];
    let case = Case::new("drafts of another item", prompt, 1.0);
    let sampling = SamplingParams { logit_bias, ..case.sampling.clone() };
    let grammar = Some(Grammar { kind: GrammarKind::Lark, text }.to_wire());
    let case = Case { sampling, grammar, max_tokens: 8, ..case };
    let expected = client.ask(&case.with_k(0)).await?;
    ensure!(expected.token_ids == [b, quote_comma].repeat(4), "{:?}", expected.text);
    let got = client.ask(&case.with_k(8)).await?;
    ensure!(got.token_ids == expected.token_ids, "a rejected draft changed the text: {:?}", got.text);
    ensure!(got.speculation().draft_tokens > got.speculation().accepted_tokens, "no draft was rejected");
    cluster.stop().await
}
