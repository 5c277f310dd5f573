//! What the measurements share: a cluster that takes little time for anything else, and its clients.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::{bail, ensure};
use outrider_cli::cluster::ClusterSpec;
use outrider_cli::load::prompts::Content;
use outrider_cli::load::{Access, Client, Endpoint, Prompt, Request, Schedule, Settings};
use tests::metrics::Page;
use tests::wait::until;

/// Drafts of this task type are accepted with probability 0.82 per position in the profiles: at k = 4, 3.5
/// tokens per verification.
const TASK_TYPE: &str = "easy";

/// The cluster with one thread per worker, without logs below errors, and stopped within a second.
pub(crate) fn quiet(spec: ClusterSpec) -> ClusterSpec {
    ClusterSpec {
        threads: Some(NonZeroUsize::MIN),
        log: Some("error".to_owned()),
        grace: Duration::from_secs(1),
        ..spec
    }
}

/// Requests with one k and one length, and a client for them.
pub(crate) struct Streams {
    client: Client,
    requests: Vec<Request>,
}

impl Streams {
    /// Prepares `count` requests for `max_tokens` tokens each.
    pub(crate) async fn new(url: &str, count: usize, (k, max_tokens): (u32, u32)) -> anyhow::Result<Self> {
        let endpoint = Endpoint::connect(url, Access::default()).await?;
        let fields = [("ignore_eos".to_owned(), true.into())].into_iter().collect();
        let settings = Settings { max_tokens, num_draft_tokens: Some(k), fields, ..Settings::default() };
        let prompt = |i: usize| Prompt {
            task: TASK_TYPE.to_owned(),
            content: Content::Prompt(format!("stream number {i} of many")),
        };
        let requests = (0..count).map(|i| settings.request(&endpoint, &prompt(i))).collect();
        Ok(Self { client: Client::new(endpoint), requests })
    }

    /// Sends all requests, at most `concurrency` at a time, and waits until they are answered.
    pub(crate) async fn finish(&self, concurrency: usize) -> anyhow::Result<()> {
        let run = self.client.drive(&self.requests, &Schedule::Closed { concurrency }, |_| ()).await;
        let samples = run.samples(&self.requests);
        let failed = samples.iter().find(|sample| !sample.is_completed());
        let failure = failed.map(|sample| sample.outcome.explain());
        ensure!(failure.is_none(), "a request failed: {failure:?}");
        Ok(())
    }

    /// Sends all requests at once and returns what `window` measures, which must end before they do.
    pub(crate) async fn run_during<T>(
        &self,
        window: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            ended = self.finish(self.requests.len()) => bail!("the streams ended before the window did: {ended:?}"),
            measured = window => measured,
        }
    }
}

/// Waits until the router at this admin URL runs all streams, which have `tokens_each` tokens in the mean.
pub(crate) async fn until_under_way(router: &str, streams: u64, tokens_each: u64) -> anyhow::Result<()> {
    until("all streams are under way", async || {
        let page = Page::scrape(router).await?;
        let is_running = page.sum("vllm:num_requests_running") == streams;
        Ok(is_running && page.sum("vllm:generation_tokens_total") > tokens_each * streams)
    })
    .await
}
