//! The clients: their requests and results.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use scheduling::profile::text::{SyntheticText, mix};
use scheduling::scheduler::events::{ClientEvent, CommittedRound, Prompt};
use speculation::{SequenceId, SequenceSpec, TokenId};

use crate::{RequestKind, Rng, RunOutcome, Setup, Traffic};

/// A request of a client.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: SequenceId,
    pub(super) task_type: String,
    pub(super) spec: SequenceSpec,
    pub(super) prompt: Arc<Prompt>,
}

/// One request in progress.
#[derive(Debug)]
struct Client {
    kind: usize,
    arrived_at: Duration,
    first_token_at: Option<Duration>,
    last_token_at: Duration,
    output: u32,
}

/// All clients of a run and their results.
pub(super) struct Clients<'a> {
    setup: &'a Setup<'a>,
    /// Random source for requests only, so that every way of serving gets the same requests.
    rng: Rng,
    in_progress: BTreeMap<SequenceId, Client>,
    num_sent: u64,
    /// Clients of closed traffic without a token so far.
    num_without_token: u32,
    /// When the run's time began.
    began_at: Option<Duration>,
    /// Drafted tokens and rounds, by kind, over the whole run.
    drafted: Vec<(u64, u64)>,
    pub(super) outcome: RunOutcome,
}

impl<'a> Clients<'a> {
    pub(super) fn new(setup: &'a Setup<'a>) -> Self {
        let kinds = setup.kinds();
        let (num_without_token, began_at) = match setup.traffic {
            Traffic::Closed { sequences, .. } => (sequences, None),
            Traffic::Open { .. } => (0, Some(Duration::ZERO)),
        };
        Self {
            setup,
            rng: Rng { state: mix(!setup.seed) },
            in_progress: BTreeMap::new(),
            num_sent: 0,
            num_without_token,
            began_at,
            drafted: vec![(0, 0); kinds.len()],
            outcome: RunOutcome::new(kinds),
        }
    }

    /// Time since the run began; zero before.
    pub(super) fn elapsed(&self, now: Duration) -> Duration {
        self.began_at.map_or(Duration::ZERO, |began_at| now - began_at)
    }

    /// Start of the measured part of the run, if known.
    pub(super) fn counts_from(&self) -> Option<Duration> {
        Some(self.began_at? + self.setup.warm_up)
    }

    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.elapsed(now) >= self.setup.duration
    }

    pub(super) fn num_in_progress(&self) -> u32 {
        self.in_progress.len() as u32
    }

    /// The first requests of closed traffic.
    pub(super) fn first_requests(&mut self) -> Vec<Request> {
        let Traffic::Closed { sequences, .. } = self.setup.traffic else { return Vec::new() };
        let first = |i: u32| {
            let kind = self.kind_of((f64::from(i) + 0.5) / f64::from(sequences));
            self.request(Duration::ZERO, kind)
        };
        (0..sequences).map(first).collect()
    }

    /// Time until the next request of open traffic.
    pub(super) fn next_arrival(&mut self) -> Option<Duration> {
        let Traffic::Open { per_second, .. } = self.setup.traffic else { return None };
        let wait = -(1.0 - self.rng.next()).ln() / per_second;
        Some(Duration::from_secs_f64(wait))
    }

    /// Creates a request of open traffic; `None` if too many are in progress.
    pub(super) fn arrive(&mut self, now: Duration) -> Option<Request> {
        let Traffic::Open { sequences_max, .. } = self.setup.traffic else { return None };
        if self.num_in_progress() >= sequences_max {
            self.outcome.num_rejected += 1;
            return None;
        }
        let at = self.rng.next();
        let kind = self.kind_of(at);
        Some(self.request(now, kind))
    }

    /// Processes an event for a client. Returns its next request, if it sends one.
    pub(super) fn on_event(&mut self, now: Duration, event: ClientEvent) -> Option<Request> {
        match event {
            ClientEvent::Commit(round) => {
                self.committed(now, &round);
                None
            }
            ClientEvent::PromptLogprobs(..) => None,
            ClientEvent::Finish(id, ..) => self.finished(now, id),
            ClientEvent::Fail(id, failure) => panic!("{id:?} failed: {failure:?}"),
        }
    }

    /// Mean drafted tokens per round of a kind, over the whole run.
    pub(super) fn mean_k(&self, task_type: &str) -> f64 {
        let of_kind = |kind: &RequestKind| kind.task_type == task_type;
        let index = self.setup.kinds().iter().position(of_kind).unwrap_or_default();
        let (drafted, rounds) = self.drafted[index];
        drafted as f64 / rounds.max(1) as f64
    }

    fn committed(&mut self, now: Duration, round: &CommittedRound) {
        let counts = self.counts_from().is_some_and(|from| now >= from);
        let Some(client) = self.in_progress.get_mut(&round.id) else { return };
        let num_tokens = round.commit.token_ids.len() as u32;
        client.output += num_tokens;
        if counts {
            self.outcome.committed(client.kind, num_tokens, now - client.last_token_at);
        }
        client.last_token_at = now;
        let is_first = client.first_token_at.is_none();
        client.first_token_at.get_or_insert(now);
        let (drafted, rounds) = &mut self.drafted[client.kind];
        (*drafted, *rounds) = (*drafted + u64::from(round.commit.num_draft_tokens), *rounds + 1);
        if is_first && self.num_without_token > 0 {
            self.num_without_token -= 1;
            self.began_at = (self.num_without_token == 0).then_some(now);
        }
    }

    fn finished(&mut self, now: Duration, id: SequenceId) -> Option<Request> {
        let Client { kind, arrived_at, first_token_at, output, .. } = self.in_progress.remove(&id)?;
        if let Some(first) =
            first_token_at.filter(|_| self.counts_from().is_some_and(|from| arrived_at >= from))
        {
            self.outcome.finished(kind, (arrived_at, first, now), output);
        }
        match self.setup.traffic {
            Traffic::Open { .. } => None,
            Traffic::Closed { .. } => Some(self.request(now, kind)),
        }
    }

    fn request(&mut self, now: Duration, kind: usize) -> Request {
        let RequestKind { task_type, prompt_tokens, output_tokens, .. } = &self.setup.kinds()[kind];
        let spread = 0.5 + self.rng.next();
        let output = ((f64::from(*output_tokens) * spread) as u32).max(1);
        let prompt_len = (*prompt_tokens).max(1);
        self.num_sent += 1;
        let id = SequenceId(self.num_sent);
        let client = Client { kind, arrived_at: now, first_token_at: None, last_token_at: now, output: 0 };
        self.in_progress.insert(id, client);
        let seed = mix(self.setup.seed ^ (self.num_sent << 32));
        let text = SyntheticText { seed, choice: 0, vocab_size: self.setup.profile.vocab_size };
        let prompt_ids: Vec<TokenId> = (0..prompt_len).map(|position| text.token(position)).collect();
        let spec = SequenceSpec {
            seed,
            prompt_len,
            max_len: prompt_len.saturating_add(output),
            ..SequenceSpec::default()
        };
        let prompt = Arc::new(Prompt::new(&prompt_ids, spec.isolation_key));
        Request { id, task_type: task_type.clone(), spec, prompt }
    }

    /// The kind at point `at` of the cumulative shares.
    fn kind_of(&self, at: f64) -> usize {
        let kinds = self.setup.kinds();
        let total: f64 = kinds.iter().map(|kind| kind.share).sum();
        let mut end = 0.0;
        let found = kinds.iter().position(|kind| {
            end += kind.share / total;
            at < end
        });
        found.unwrap_or(kinds.len() - 1)
    }
}
