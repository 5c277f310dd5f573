//! The client of the tests: gRPC, because its answers contain token ids.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use proto::v1;
use proto::v1::inference_client::InferenceClient;
use service::tls::ClientTls;
use speculation::TokenId;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::case::Case;
use crate::wait::{WAIT_TIMEOUT, until};

/// A connection to one router.
#[derive(Debug, Clone)]
pub struct Client {
    inference: InferenceClient<Channel>,
}

/// An answer, complete or partial.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// The generated ids.
    pub token_ids: Vec<TokenId>,
    /// The generated text.
    pub text: String,
    /// One entry per id, if requested.
    pub logprobs: Vec<v1::TokenLogprobs>,
    /// Finish reason; unspecified before the end.
    pub finish: v1::FinishReason,
    /// Totals, set at the end.
    pub usage: v1::Usage,
    /// The numerics id of the targets that generated the text.
    pub system_fingerprint: String,
}

impl Answer {
    /// Fails unless the answer equals, token by token, the expected one without drafts.
    pub fn check_same(&self, name: &str, expected: &Self) -> anyhow::Result<()> {
        let (expected_ids, ids) = (&expected.token_ids, &self.token_ids);
        ensure!(
            expected_ids == ids,
            "{name}: ids differ from those without drafts\n  {expected_ids:?}\n  {ids:?}"
        );
        ensure!(
            expected.logprobs == self.logprobs,
            "{name}: log probabilities differ from those without drafts"
        );
        ensure!(expected.finish == self.finish, "{name}: {:?} became {:?}", expected.finish, self.finish);
        ensure!(expected.system_fingerprint == self.system_fingerprint, "{name}: another system fingerprint");
        Ok(())
    }

    /// Speculation counters of the answer.
    pub fn speculation(&self) -> v1::SpeculationUsage {
        self.usage.speculation.clone().unwrap_or_default()
    }
}

impl Client {
    /// Connects.
    pub async fn connect(grpc_url: &str) -> anyhow::Result<Self> {
        let inference = InferenceClient::connect(grpc_url.to_owned()).await;
        Ok(Self { inference: inference.with_context(|| format!("cannot connect to {grpc_url}"))? })
    }

    /// Connects to a router that accepts only TLS.
    pub async fn connect_with_tls(grpc_url: &str, tls: &ClientTls) -> anyhow::Result<Self> {
        let endpoint = Channel::from_shared(grpc_url.to_owned())?.tls_config(tls.config())?;
        let channel = endpoint.connect().await.with_context(|| format!("cannot connect to {grpc_url}"))?;
        Ok(Self { inference: InferenceClient::new(channel) })
    }

    /// Sends a request and returns the complete answer.
    pub async fn ask(&self, case: &Case) -> anyhow::Result<Answer> {
        self.open(case).await?.rest().await
    }

    /// Repeats the request until its answer has drafts: a draft worker is used some time after it has joined.
    pub async fn wait_for_drafts(&self, case: &Case) -> anyhow::Result<()> {
        until("drafts are used", async || Ok(self.ask(case).await?.speculation().draft_tokens > 0)).await
    }

    /// The complete answers, in the order of the cases, with `width` concurrent requests.
    pub async fn ask_all(&self, cases: &[Case], width: usize) -> anyhow::Result<Vec<Answer>> {
        stream::iter(cases).map(|case| self.ask(case)).buffered(width).try_collect().await
    }

    /// The complete answers to the same requests without drafts.
    pub async fn ask_plain(&self, cases: &[Case], width: usize) -> anyhow::Result<Vec<Answer>> {
        let plain: Vec<Case> = cases.iter().map(|case| case.with_k(0)).collect();
        self.ask_all(&plain, width).await
    }

    /// The complete answers by case name, for requests that may finish in any order.
    pub async fn ask_by_name(&self, cases: &[Case], width: usize) -> anyhow::Result<HashMap<String, Answer>> {
        stream::iter(cases)
            .map(|case| async move { anyhow::Ok((case.name.clone(), self.ask(case).await?)) })
            .buffer_unordered(width)
            .try_collect()
            .await
    }

    /// Sends a request and returns the stream of its answer.
    pub async fn open(&self, case: &Case) -> anyhow::Result<AnswerStream> {
        let response = self.inference.clone().generate(case.to_wire()).await;
        let messages = response.with_context(|| format!("refused: {}", case.name))?.into_inner();
        Ok(AnswerStream { name: case.name.clone(), messages, answer: Answer::default() })
    }
}

/// [`Answer::check_same`] for every case; `who` names the source of the answers in errors.
pub fn check_all_same(
    cases: &[Case],
    (expected, got): (&[Answer], &[Answer]),
    who: &str,
) -> anyhow::Result<()> {
    ensure!(!cases.is_empty(), "{who}: nothing was compared");
    let (num_expected, num_got) = (expected.len(), got.len());
    ensure!(
        num_expected == cases.len() && num_got == cases.len(),
        "{who}: {} cases, {num_expected} expected answers, {num_got} answers",
        cases.len()
    );
    for ((case, expected), got) in cases.iter().zip(expected).zip(got) {
        got.check_same(&format!("{who}, {}", case.name), expected)?;
    }
    Ok(())
}

/// A streaming answer. Dropping it disconnects the client.
#[derive(Debug)]
pub struct AnswerStream {
    name: String,
    messages: Streaming<v1::GenerateResponse>,
    answer: Answer,
}

impl AnswerStream {
    /// The answer so far.
    pub fn so_far(&self) -> &Answer {
        &self.answer
    }

    /// Reads until there are at least `count` tokens; fails if the text ends before.
    pub async fn read_tokens(&mut self, count: usize) -> anyhow::Result<()> {
        while self.answer.token_ids.len() < count {
            ensure!(
                self.read_message().await?,
                "{}: ended after {} tokens",
                self.name,
                self.answer.token_ids.len()
            );
        }
        Ok(())
    }

    /// Reads to the end, which must have a finish reason.
    pub async fn rest(mut self) -> anyhow::Result<Answer> {
        while self.read_message().await? {}
        ensure!(self.answer.finish != v1::FinishReason::Unspecified, "{}: ended without a reason", self.name);
        Ok(self.answer)
    }

    /// Reads one message; returns false at the end of the stream.
    pub async fn read_message(&mut self) -> anyhow::Result<bool> {
        let message = tokio::time::timeout(WAIT_TIMEOUT, self.messages.message()).await;
        let message = message.with_context(|| format!("{}: silence for {WAIT_TIMEOUT:?}", self.name))?;
        let Some(message) = message.with_context(|| format!("{}: the stream broke", self.name))? else {
            return Ok(false);
        };
        let answer = &mut self.answer;
        if message.finish != i32::from(v1::FinishReason::Unspecified) {
            answer.finish = message.finish();
        }
        answer.text.push_str(&message.text);
        answer.token_ids.extend(message.token_ids);
        answer.logprobs.extend(message.logprobs);
        answer.system_fingerprint = message.system_fingerprint;
        if let Some(usage) = message.usage {
            answer.usage = usage;
        }
        Ok(true)
    }
}
