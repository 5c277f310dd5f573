//! How rounds begin: k is chosen, drafted rounds leave at once, plain ones together with those of the same target where joining pays
//! (`speculation::gather`). No sequence waits here longer than that rule's longest wait.

use std::collections::BTreeMap;

use speculation::gather::{joining_pays, longest_wait};

use super::*;
use crate::lane::controllers::Controllers;
use crate::lane::policy::settled_num_draft_tokens;

impl Owner {
    /// Begins what may begin of all that is ready.
    pub(super) fn begin_rounds(&mut self) {
        while let Some(id) = self.ready.pop_front() {
            let Some(running) = self.sequences.get_mut(&id) else { continue };
            if running.clock.is_held {
                // It lost its target while it waited for its turn there: it begins at its new one.
                continue;
            }
            let k = choose_k(&self.config.policy, running, &self.pool, &mut self.controllers);
            let has_prompt = running.sequence.counters().rounds == 0;
            let is_plain = k == 0 && !has_prompt;
            running.clock = RoundClock {
                begun_at: self.began.elapsed(),
                chosen: k,
                has_prompt,
                is_held: is_plain,
                ..RoundClock::default()
            };
            if !running.sequence.spec().traceparent.is_empty() {
                running.round = tracing::info_span!(
                    parent: &running.span,
                    "round",
                    outrider.spec.k = k,
                    outrider.spec.drafted = tracing::field::Empty,
                    outrider.spec.accepted = tracing::field::Empty,
                );
            }
            match is_plain {
                true => self.plain.push(id),
                false => self.begin_round(id),
            }
        }
        if !self.plain.is_empty() {
            self.begin_plain_rounds();
        }
    }

    /// Plain rounds leave target by target, all or none.
    fn begin_plain_rounds(&mut self) {
        let now = self.now();
        let mut by_target: BTreeMap<Option<WorkerKey>, Vec<SequenceId>> = BTreeMap::new();
        for id in std::mem::take(&mut self.plain) {
            if let Some(running) = self.sequences.get(&id) {
                by_target.entry(running.target).or_default().push(id);
            }
        }
        for (target, ids) in by_target {
            match self.hold_until(target, &ids) {
                Some(until) if now < until => {
                    self.timers.push(Reverse((until, ids[0])));
                    self.plain.extend(ids);
                }
                _ => ids.into_iter().for_each(|id| self.begin_plain_round(id)),
            }
        }
    }

    /// Until when these wait for what their target runs, if that pays.
    fn hold_until(&self, target: Option<WorkerKey>, ids: &[SequenceId]) -> Option<Duration> {
        let pooled = self.pool.get(target?)?;
        let sequences = || ids.iter().filter_map(|id| self.sequences.get(id));
        let context =
            sequences().map(|running| running.sequence.ids().len()).sum::<usize>() as f64 / ids.len() as f64;
        if !joining_pays(ids.len() as u32, pooled.plain_in_flight, context, &pooled.cost) {
            return None;
        }
        let since = sequences().map(|running| running.clock.begun_at).min()?;
        Some(since + longest_wait(pooled.plain_in_flight, context, &pooled.cost))
    }

    fn begin_plain_round(&mut self, id: SequenceId) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        running.clock.is_held = false;
        // Without a target nothing is in flight; the sequence is ready again once it has one.
        if let Some(pooled) = running.target.and_then(|key| self.pool.get_mut(key)) {
            pooled.plain_in_flight += 1;
            running.clock.is_plain_in_flight = true;
        }
        self.begin_round(id);
    }

    fn begin_round(&mut self, id: SequenceId) {
        let Some(running) = self.sequences.get(&id) else { return };
        let num_draft_tokens = running.clock.chosen;
        let pooled = running.draft.and_then(|key| self.pool.get(key));
        let draft_wait = pooled.map_or(Duration::ZERO, |pooled| pooled.draft_time.wait());
        self.drive(id, Event::BeginRound { num_draft_tokens, draft_wait });
    }

    /// The plain round of a sequence is over at its target, one way or another.
    pub(super) fn landed(&mut self, id: SequenceId) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        if std::mem::take(&mut running.clock.is_plain_in_flight)
            && let Some(pooled) = running.target.and_then(|key| self.pool.get_mut(key))
        {
            pooled.plain_in_flight = pooled.plain_in_flight.saturating_sub(1);
        }
    }
}

/// k for the next round of a sequence, and why it is 0 if it is.
fn choose_k(policy: &PolicyConfig, running: &mut Running, pool: &Pool, controllers: &mut Controllers) -> u32 {
    let settled = settled_num_draft_tokens(policy, &running.request);
    let workers = pool.costs(&running.lane.model, running.target, running.draft);
    let k = match (settled, &workers) {
        (Some(k), _) => k,
        (None, Some(workers)) => controllers.choose(&running.lane, workers).num_draft_tokens,
        (None, None) => 0,
    };
    running.disabled_reason = match () {
        () if running.refuses_drafts() => Some("request"),
        () if settled == Some(0) => Some("policy"),
        () if running.sequence.draft_refusal().is_some() => Some("draft_refused"),
        () if running.draft.is_none() => Some("no_draft_worker"),
        () if k == 0 => Some("does_not_pay"),
        () => None,
    };
    k
}
