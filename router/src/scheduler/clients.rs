//! What clients are to hear of their sequences, and the trace of each round. Events wait here until the steps of the
//! same dispatch are on their way: workers wait for steps, and writing to clients wakes threads on the same cores.

use rustc_hash::FxHashMap;
use scheduling::scheduler::events::{CommittedRound, Failure, SpeculationUsage};
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, SequenceId};

use crate::error::RouterError;
use crate::generation::{CommittedTokens, GenerationEvent, GenerationSink};

/// The client of one sequence.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) sink: GenerationSink,
    pub(super) choice: u32,
    /// The request's span; rounds are traced below it.
    pub(super) span: tracing::Span,
    /// The round under way, where the request is traced, and its span's id.
    round: tracing::Span,
    round_span_id: u64,
}

#[derive(Debug, Default)]
pub(super) struct Clients {
    clients: FxHashMap<SequenceId, Client>,
    pending: Vec<(GenerationSink, GenerationEvent)>,
    /// Sequences with an event that nobody wants: to be cancelled.
    unwanted: Vec<SequenceId>,
    /// Rounds that are traced now. Without any no step looks for its span.
    traced: usize,
}

impl Clients {
    pub(super) fn join(&mut self, id: SequenceId, sink: GenerationSink, choice: u32, span: tracing::Span) {
        let client = Client { sink, choice, span, round: tracing::Span::none(), round_span_id: 0 };
        self.clients.insert(id, client);
    }

    pub(super) fn leave(&mut self, id: SequenceId) -> Option<Client> {
        let client = self.clients.remove(&id)?;
        self.traced -= usize::from(client.round_span_id != 0);
        Some(client)
    }

    /// A round of a traced sequence begins.
    pub(super) fn begin_round(&mut self, id: SequenceId, num_draft_tokens: u32) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.round = tracing::info_span!(
            parent: &client.span,
            "round",
            outrider.spec.k = num_draft_tokens,
            outrider.spec.drafted = tracing::field::Empty,
            outrider.spec.accepted = tracing::field::Empty,
        );
        self.traced -= usize::from(client.round_span_id != 0);
        client.round_span_id = service::telemetry::span_id_of(&client.round);
        self.traced += usize::from(client.round_span_id != 0);
    }

    /// The span below which a step of the sequence is traced; 0: none.
    pub(super) fn round_span_id(&self, id: SequenceId) -> u64 {
        match self.traced {
            0 => 0,
            _ => self.clients.get(&id).map_or(0, |client| client.round_span_id),
        }
    }

    /// The sequence has its first target: its client may be answered.
    pub(super) fn begin(&self, id: SequenceId) {
        if let Some(client) = self.clients.get(&id) {
            client.sink.begin();
        }
    }

    pub(super) fn commit(&mut self, round: CommittedRound) {
        let CommittedRound { id, commit, usage, .. } = round;
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.round_span_id != 0 {
            client.round.record("outrider.spec.drafted", commit.num_draft_tokens);
            client.round.record("outrider.spec.accepted", commit.num_accepted);
            (client.round, client.round_span_id) = (tracing::Span::none(), 0);
            self.traced -= 1;
        }
        if client.sink.is_cancelled(client.choice) {
            return self.unwanted.push(id);
        }
        let tokens = CommittedTokens {
            choice: client.choice,
            token_ids: commit.token_ids.as_slice().into(),
            num_drafted: commit.num_accepted,
            logprobs: commit.logprobs,
            usage,
        };
        self.pending.push((client.sink.clone(), GenerationEvent::Tokens(tokens)));
    }

    pub(super) fn prompt_logprobs(&mut self, id: SequenceId, scores: PromptLogprobs) {
        let Some(client) = self.clients.get(&id) else { return };
        if client.sink.is_cancelled(client.choice) {
            self.unwanted.push(id);
        } else {
            self.pending.push((client.sink.clone(), GenerationEvent::PromptLogprobs(scores)));
        }
    }

    pub(super) fn finish(&mut self, id: SequenceId, reason: FinishReason, usage: SpeculationUsage) {
        let Some(client) = self.leave(id) else { return };
        let choice = client.choice;
        self.pending.push((client.sink, GenerationEvent::Finished { choice, reason, usage }));
    }

    pub(super) fn fail(&mut self, id: SequenceId, failure: Failure) {
        let Some(client) = self.leave(id) else { return };
        let error = match failure {
            Failure::Refused(reason) => RouterError::Refused { reason },
            Failure::Quarantined(reason) => RouterError::Quarantined { reason },
            Failure::Expired(_) => {
                RouterError::Overloaded { what: "the queue for target workers (the wait for one timed out)" }
            }
            Failure::Unavailable(reason) => RouterError::Unavailable { reason },
        };
        self.pending.push((client.sink, GenerationEvent::Failed(error)));
    }

    /// A sequence whose client does not want what it got.
    pub(super) fn next_unwanted(&mut self) -> Option<SequenceId> {
        self.unwanted.pop()
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Writes what waits, in order.
    pub(super) fn flush(&mut self) {
        for (sink, event) in self.pending.drain(..) {
            // A client that is too far behind is cut off here; its sequences are then cancelled like those of a client
            // that left.
            sink.send_last(event);
        }
    }
}
