//! How rounds begin: k is chosen, drafted rounds leave at once, plain ones together with those of the same target where joining pays
//! (`speculation::gather`). No sequence waits here longer than that rule's longest wait. How long a round waits for its draft, and whether it asks for
//! one at all, is the draft worker's health (`speculation::draft_health`).

use std::collections::BTreeMap;

use speculation::draft_health::{Access, PROBE_TOKENS, predicted_proposal};
use speculation::gather::{joining_pays, longest_wait};

use super::*;

/// How a round begins.
struct Opening {
    num_draft_tokens: u32,
    /// Ask the draft worker, which is out, without waiting for it.
    is_probing: bool,
    /// Why nothing is drafted, if nothing is.
    disabled_reason: Option<&'static str>,
}

impl Opening {
    fn plain(reason: &'static str) -> Self {
        Self { num_draft_tokens: 0, is_probing: false, disabled_reason: Some(reason) }
    }
}

impl Owner {
    /// Begins what may begin of all that is ready.
    pub(super) fn begin_rounds(&mut self) {
        while let Some(id) = self.around.ready.pop_front() {
            // Where it is held it lost its target while it waited for its turn there: it begins at its new one. Where it is not ready it lost
            // its target meanwhile, and comes again or came twice.
            let begins = |running: &Running| running.sequence.is_ready() && !running.clock.is_held;
            if !self.sequences.get(&id).is_some_and(begins) {
                continue;
            }
            self.around.look_at_clock();
            self.seat_draft(id);
            let Some(running) = self.sequences.get_mut(&id) else { continue };
            self.around.open_round(running);
            match running.clock.is_held {
                true => self.around.plain.push(id),
                false => self.begin_round(id),
            }
        }
        if !self.around.plain.is_empty() {
            self.begin_plain_rounds();
        }
    }

    /// Plain rounds leave target by target, all or none.
    fn begin_plain_rounds(&mut self) {
        let now = self.around.now();
        self.around.plain_until = None;
        let mut by_target: BTreeMap<Option<WorkerKey>, Vec<SequenceId>> = BTreeMap::new();
        for id in std::mem::take(&mut self.around.plain) {
            if let Some(running) = self.sequences.get(&id) {
                by_target.entry(running.worker(Role::Target)).or_default().push(id);
            }
        }
        for (target, ids) in by_target {
            match self.hold_until(target, &ids) {
                Some(until) if now < until => {
                    let earliest = self.around.plain_until.map_or(until, |other| other.min(until));
                    self.around.plain_until = Some(earliest);
                    self.around.plain.extend(ids);
                }
                _ => ids.into_iter().for_each(|id| self.begin_plain_round(id)),
            }
        }
    }

    /// Until when these wait for what their target runs, if that pays.
    fn hold_until(&self, target: Option<WorkerKey>, ids: &[SequenceId]) -> Option<Duration> {
        let pooled = self.around.pool.get(target?)?;
        let sequences = || ids.iter().filter_map(|id| self.sequences.get(id));
        let context = sequences().map(|running| f64::from(running.len())).sum::<f64>() / ids.len() as f64;
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
        if let Some(pooled) = running.worker(Role::Target).and_then(|key| self.around.pool.get_mut(key)) {
            pooled.plain_in_flight += 1;
            running.clock.is_plain_in_flight = true;
        }
        self.begin_round(id);
    }

    fn begin_round(&mut self, id: SequenceId) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        let (num_draft_tokens, draft_wait) = match running.clock {
            RoundClock { is_probing: true, .. } => (PROBE_TOKENS, Duration::ZERO),
            RoundClock { chosen: k, .. } => (k, self.around.draft_wait(running, k)),
        };
        self.drive(id, Event::BeginRound { num_draft_tokens, draft_wait });
    }
}

impl Surroundings {
    /// Chooses how the next round of a sequence begins.
    fn open_round(&mut self, running: &mut Running) {
        let opening = self.choose_opening(running);
        let Opening { num_draft_tokens: k, is_probing, disabled_reason } = opening;
        running.disabled_reason = disabled_reason;
        let has_prompt = running.sequence.counters().rounds == 0;
        running.clock = RoundClock {
            begun_at: self.now(),
            chosen: k,
            has_prompt,
            is_held: k == 0 && !has_prompt,
            is_probing,
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
            running.round_span_id = service::telemetry::span_id_of(&running.round);
        }
    }

    fn choose_opening(&mut self, running: &Running) -> Opening {
        let now = self.now();
        let settled =
            self.config.policy.settled_num_draft_tokens(&running.lane.key.task_type, &running.request);
        match settled {
            _ if running.refuses_drafts() => return Opening::plain("request"),
            Some(0) => return Opening::plain("policy"),
            _ if running.sequence.draft_refusal().is_some() => return Opening::plain("draft_refused"),
            _ => {}
        }
        let (target, draft) = (running.worker(Role::Target), running.worker(Role::Draft));
        let Some(draft_worker) = draft.and_then(|key| self.pool.get_mut(key)) else {
            return Opening::plain("no_draft_worker");
        };
        match draft_worker.health.access(now, Duration::ZERO) {
            Access::Wait(_) => {}
            Access::Probe if running.sequence.may_ask_draft(now) => {
                draft_worker.health.probed(now);
                return Opening { is_probing: true, ..Opening::plain("draft_silent") };
            }
            Access::Probe | Access::Leave => return Opening::plain("draft_silent"),
        }
        let workers = self.pool.costs(&running.lane.key.model, target, draft);
        let (k, held_back) = match (settled, workers) {
            (Some(k), _) => (k, None),
            (None, Some(workers)) => {
                let chosen = self.controllers.choose(&running.lane, &workers);
                (chosen.num_draft_tokens, chosen.held_back)
            }
            (None, None) => (0, None),
        };
        let disabled_reason = (k == 0).then_some(held_back.unwrap_or("does_not_pay"));
        Opening { num_draft_tokens: k, is_probing: false, disabled_reason }
    }

    /// How long a round of the sequence may wait for `k` tokens.
    fn draft_wait(&self, running: &Running, k: u32) -> Duration {
        let predicted = self.predicted_proposal(running, k);
        let pooled = running.worker(Role::Draft).and_then(|key| self.pool.get(key));
        pooled.map_or(Duration::ZERO, |pooled| pooled.health.deadline(predicted))
    }

    /// How long `k` tokens for the sequence take its draft worker by what is known of it.
    pub(super) fn predicted_proposal(&self, running: &Running, k: u32) -> Duration {
        let pooled = running.worker(Role::Draft).and_then(|key| self.pool.get(key));
        let context = f64::from(running.len());
        pooled.map_or(Duration::ZERO, |pooled| predicted_proposal(k, pooled.load, context, &pooled.cost))
    }

    /// The plain round of a sequence is over at its target, one way or another.
    pub(super) fn landed(&mut self, running: &mut Running) {
        if std::mem::take(&mut running.clock.is_plain_in_flight)
            && let Some(pooled) = running.worker(Role::Target).and_then(|key| self.pool.get_mut(key))
        {
            pooled.plain_in_flight = pooled.plain_in_flight.saturating_sub(1);
        }
    }
}
