//! Client events and the trace span of each round. Events are queued here until the steps of the same
//! dispatch have been sent: workers are waiting for the steps, and writing to clients wakes threads on the
//! same cores. A client's channel is touched only then: with hundreds of clients it is no longer in the cache
//! when it is touched a second time.

use rustc_hash::FxHashMap;
use scheduling::scheduler::events::{ClientEvent, CommittedRound, SequenceFailure};
use speculation::SequenceId;
use speculation::sequence::Commit;

use crate::error::RouterError;
use crate::generation::{CommittedTokens, GenerationEvent, GenerationSink};

/// The client of one sequence.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) sink: GenerationSink,
    pub(super) choice: u32,
    /// The request's span, parent of the rounds' spans.
    pub(super) span: tracing::Span,
    /// Span of the current round, if the request is traced, and its id (0: not traced).
    round: tracing::Span,
    round_span_id: u64,
}

impl Client {
    /// Whether a stop string of the client ended the output.
    pub(super) fn is_stopped(&self) -> bool {
        self.sink.is_stopped(self.choice)
    }
}

#[derive(Debug, Default)]
pub(super) struct Clients {
    clients: FxHashMap<SequenceId, Client>,
    pending: Vec<ClientEvent>,
    /// Number of rounds being traced. At 0 no step looks up its span.
    num_traced_rounds: usize,
}

impl Clients {
    pub(super) fn insert(&mut self, id: SequenceId, sink: GenerationSink, choice: u32, span: tracing::Span) {
        let client = Client { sink, choice, span, round: tracing::Span::none(), round_span_id: 0 };
        self.clients.insert(id, client);
    }

    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Client> {
        let client = self.clients.remove(&id)?;
        self.num_traced_rounds -= usize::from(client.round_span_id != 0);
        Some(client)
    }

    /// Returns the span of the sequence's request.
    pub(super) fn span(&self, id: SequenceId) -> tracing::Span {
        self.clients.get(&id).map_or_else(tracing::Span::none, |client| client.span.clone())
    }

    /// Opens the span of a round, if the request is traced.
    pub(super) fn begin_round(&mut self, id: SequenceId, num_draft_tokens: u32) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.round = tracing::info_span!(
            parent: &client.span,
            "round",
            outrider.spec.k = num_draft_tokens,
            outrider.spec.drafted = tracing::field::Empty,
            outrider.spec.accepted = tracing::field::Empty,
        );
        self.num_traced_rounds -= usize::from(client.round_span_id != 0);
        client.round_span_id = service::telemetry::span_id_of(&client.round);
        self.num_traced_rounds += usize::from(client.round_span_id != 0);
    }

    /// Id of the span that is the parent of the sequence's steps; 0 if not traced.
    pub(super) fn round_span_id(&self, id: SequenceId) -> u64 {
        match self.num_traced_rounds {
            0 => 0,
            _ => self.clients.get(&id).map_or(0, |client| client.round_span_id),
        }
    }

    /// Reports that the sequence has its first target, so that the response may begin.
    pub(super) fn target_assigned(&self, id: SequenceId) {
        if let Some(client) = self.clients.get(&id) {
            client.sink.mark_started();
        }
    }

    /// Queues an event for [`Self::flush`].
    pub(super) fn push(&mut self, event: ClientEvent) {
        if let ClientEvent::Commit(round) = &event
            && self.num_traced_rounds > 0
        {
            self.end_round(round.id, &round.commit);
        }
        self.pending.push(event);
    }

    /// Closes the span of a round.
    fn end_round(&mut self, id: SequenceId, commit: &Commit) {
        let Some(client) = self.clients.get_mut(&id).filter(|client| client.round_span_id != 0) else {
            return;
        };
        client.round.record("outrider.spec.drafted", commit.num_draft_tokens);
        client.round.record("outrider.spec.accepted", commit.num_accepted);
        (client.round, client.round_span_id) = (tracing::Span::none(), 0);
        self.num_traced_rounds -= 1;
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Sends the queued events in order.
    pub(super) fn flush(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        for event in pending.drain(..) {
            self.send(event);
        }
        self.pending = pending;
    }

    /// Sends an event. One that is no longer wanted is dropped: the driver hears of a client that has left,
    /// or is too far behind, by the cancellation of its sequence.
    fn send(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Commit(CommittedRound { id, commit, usage, .. }) => {
                let Some(client) = self.clients.get(&id) else { return };
                let tokens = CommittedTokens {
                    choice: client.choice,
                    token_ids: commit.token_ids.as_slice().into(),
                    num_drafted: commit.num_accepted,
                    logprobs: commit.logprobs,
                    usage,
                };
                client.sink.send(GenerationEvent::Tokens(tokens));
            }
            ClientEvent::PromptLogprobs(id, scores) => {
                if let Some(client) = self.clients.get(&id) {
                    client.sink.send(GenerationEvent::PromptLogprobs(scores));
                }
            }
            ClientEvent::Finish(id, reason, usage) => {
                let Some(Client { sink, choice, .. }) = self.remove(id) else { return };
                sink.send(GenerationEvent::Finished { choice, reason, usage });
            }
            ClientEvent::Fail(id, failure) => {
                let Some(Client { sink, .. }) = self.remove(id) else { return };
                sink.send(GenerationEvent::Failed(failure_to_error(failure)));
            }
        }
    }
}

fn failure_to_error(failure: SequenceFailure) -> RouterError {
    match failure {
        SequenceFailure::Refused(reason) => RouterError::Refused { reason },
        SequenceFailure::Unsupported(message) => RouterError::InvalidRequest { message, param: None },
        SequenceFailure::Quarantined(reason) => RouterError::Quarantined { reason },
        SequenceFailure::Expired(waited) => {
            RouterError::WaitedTooLong { what: "the model's target workers", waited }
        }
        SequenceFailure::Unavailable(reason) => RouterError::Unavailable { reason },
    }
}
