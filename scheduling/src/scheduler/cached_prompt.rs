//! Counts how much of a sequence's prompt its target had cached from other sequences: `cached_tokens` of the
//! API.
//!
//! A worker reports with each reply how much of the step's context it had cached, and does not know which
//! sequence computed it. So each part of a prompt is counted once per target, when it is first sent there. A
//! step that is sent again, or a sequence that returns to a target, would find its own KV.

use speculation::{Reply, ReplyBody};

use super::events::WorkerKey;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct CachedPrompt {
    /// Targets that the sequence was assigned to, with the cached tokens of each.
    targets: Vec<(WorkerKey, u64)>,
    /// Index of the current target in `targets`.
    current: usize,
    /// End of the prompt part that has been counted at the current target.
    counted_to: u32,
}

impl CachedPrompt {
    /// Records an assignment to a target.
    pub(super) fn assigned(&mut self, target: WorkerKey) {
        let known = self.targets.iter().position(|(key, _)| *key == target);
        // A sequence that returns finds its own KV there.
        self.counted_to = if known.is_some() { u32::MAX } else { 0 };
        self.current = known.unwrap_or(self.targets.len());
        if known.is_none() {
            self.targets.push((target, 0));
        }
    }

    /// Records an answer of the current target, to the latest step or to one that was sent again since.
    pub(super) fn answered(&mut self, reply: &Reply) {
        let end = match &reply.body {
            ReplyBody::Fed { cached_len, .. } => *cached_len,
            ReplyBody::Span(span) => span.start,
            ReplyBody::NeedContext { .. } | ReplyBody::Refused(_) | ReplyBody::Proposal(_) => return,
        };
        let Some((_, tokens)) = self.targets.get_mut(self.current).filter(|_| end > self.counted_to) else {
            return;
        };
        self.counted_to = end;
        *tokens += u64::from(reply.num_cached);
    }

    /// Tokens that the current target had cached.
    pub(super) fn tokens(&self) -> u64 {
        self.targets.get(self.current).map_or(0, |(_, tokens)| *tokens)
    }
}

#[cfg(test)]
mod tests {
    use speculation::{SequenceId, TokenSpan};

    use super::*;

    fn reply(body: ReplyBody, num_cached: u32) -> Reply {
        let agreed = Vec::new();
        Reply { sequence_id: SequenceId(1), epoch: 1, step_seq: 1, body, agreed, num_cached, num_ahead: 0 }
    }

    fn fed(cached_len: u32, num_cached: u32) -> Reply {
        reply(ReplyBody::Fed { cached_len, prompt_logprobs: None }, num_cached)
    }

    fn span(start: u32, num_cached: u32) -> Reply {
        reply(ReplyBody::Span(TokenSpan { start, ..TokenSpan::default() }), num_cached)
    }

    const A: WorkerKey = WorkerKey(1);
    const B: WorkerKey = WorkerKey(2);

    #[test]
    fn parts_of_a_prompt_add_up() {
        let mut cached = CachedPrompt::default();
        assert_eq!(cached.tokens(), 0);
        cached.assigned(A);
        for answer in [fed(8_192, 8_192), fed(16_384, 400), span(20_000, 0)] {
            cached.answered(&answer);
        }
        assert_eq!(cached.tokens(), 8_592);
    }

    #[test]
    fn a_step_that_is_sent_again_finds_its_own_work() {
        let mut cached = CachedPrompt::default();
        cached.assigned(A);
        cached.answered(&span(448, 400));
        cached.answered(&span(448, 432));
        assert_eq!(cached.tokens(), 400);
        // The first step never ran, so the lost answer counts nothing.
        cached.assigned(B);
        cached.answered(&reply(ReplyBody::NeedContext { cached_len: 0, has_spec: false }, 0));
        cached.answered(&span(448, 416));
        assert_eq!(cached.tokens(), 416);
    }

    #[test]
    fn a_sequence_that_comes_back_finds_its_own_work() {
        let mut cached = CachedPrompt::default();
        cached.assigned(A);
        cached.answered(&fed(8_192, 96));
        cached.assigned(B);
        cached.answered(&fed(8_192, 32));
        assert_eq!(cached.tokens(), 32, "tokens cached at the second target");
        cached.assigned(A);
        cached.answered(&fed(8_192, 8_192));
        cached.answered(&span(9_000, 800));
        assert_eq!(cached.tokens(), 96);
    }
}
