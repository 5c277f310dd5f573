//! Which workers a sequence has. Sequences that want a target wait in turns (`speculation::turns`) until one has room: blocks within its credits, and not too many
//! prompts under way. New ones, preempted ones and those of a lost target wait in the same queue, so that a mass failover is worked off and
//! does not storm those who are left.

use std::collections::VecDeque;

use speculation::turns::Ticket;

use super::*;
use crate::lane::controllers::Controllers;
use crate::lane::pool::Wanted;

impl Owner {
    /// Gives targets to those whose turn it is, as long as there is room.
    pub(super) fn fill_seats(&mut self) {
        if !std::mem::take(&mut self.around.has_room) {
            return;
        }
        let models: Vec<String> = self.around.waiting.keys().cloned().collect();
        for model in models {
            while self.fill_seat(&model) {}
        }
        self.around.waiting.retain(|_, turns| !turns.is_empty());
        let waiting: usize = self.around.waiting.values().map(speculation::turns::Turns::len).sum();
        self.around.metrics.waiting_for_target(waiting);
    }

    /// One turn; false where nobody waits, or nobody has room for who is next. Nobody behind is let past: it would starve the large ones.
    fn fill_seat(&mut self, model: &str) -> bool {
        let now = self.around.now();
        let Some(turns) = self.around.waiting.get(model) else { return false };
        let Some(id) = turns.peek(now).copied() else { return false };
        let waits = self.sequences.get_mut(&id).filter(|running| running.target.is_none());
        let is_served = match waits.map(|running| self.around.take_target(running)) {
            None => false,
            Some(true) => true,
            Some(false) => return false,
        };
        if let Some(turns) = self.around.waiting.get_mut(model) {
            turns.pop(now, is_served);
        }
        if is_served {
            self.drive(id, Event::Assigned(Role::Target));
        }
        true
    }

    /// Sees to it that a sequence that is about to begin a round has the draft worker that it should have: one, if there is one, and another
    /// one in place of one that is silent.
    pub(super) fn seat_draft(&mut self, id: SequenceId) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        let event = match running.worker(Role::Draft) {
            None => self.around.take_draft(running, None).then_some(Event::Assigned(Role::Draft)),
            Some(key) => self.around.has_better_draft(running, key).then_some(Event::GiveUp(Role::Draft)),
        };
        if let Some(event) = event {
            self.drive(id, event);
        }
    }
}

impl Surroundings {
    /// Joins those that wait for a target.
    pub(super) fn wait_for_target(&mut self, running: &mut Running) {
        let ticket = Ticket {
            priority: running.sequence.spec().priority,
            weight: self.controllers.weight(&running.lane),
            cost: 1.0,
            since: running.submitted_at,
        };
        running.waits_since = self.now();
        let turns = self.waiting.entry(running.lane.key.model.clone()).or_default();
        turns.push(running.lane.number, ticket, running.id);
        self.has_room = true;
        running.target_by = self.now() + self.config.target_wait;
        self.arm(running);
    }

    /// Who waits for room may wait: it comes, in turn. Who waits for a target to exist may do so for a while.
    pub(super) fn may_go_on_waiting(&self, running: &mut Running, now: Duration) -> bool {
        if self.pool.vocab_size_of(&running.lane.key.model).is_some() {
            running.target_by = now + self.config.target_wait;
        }
        now < running.target_by
    }

    /// The sequence lost its worker of this role.
    pub(super) fn reassign(&mut self, running: &mut Running, role: Role, events: &mut VecDeque<Event>) {
        if role == Role::Target {
            self.landed(running);
        }
        let before = running.seat_mut(role).take().map(|seat| {
            let key = seat.key;
            self.pool.release(seat);
            key
        });
        match role {
            Role::Target => self.wait_for_target(running),
            Role::Draft => {
                running.asked = None;
                if self.take_draft(running, before) {
                    events.push_back(Event::Assigned(Role::Draft));
                }
            }
        }
    }

    fn take_target(&mut self, running: &mut Running) -> bool {
        let Self { pool, controllers, .. } = self;
        let wanted = wanted(controllers, running, None);
        let Some(seat) = pool.seat_at_target(&wanted, running.numerics_id.as_deref()) else { return false };
        let numerics_id = pool.hello_of(seat.key).map(|hello| hello.numerics_id.clone());
        if running.numerics_id.is_some() && running.numerics_id != numerics_id {
            tracing::warn!(
                sequence = running.id.0,
                "the text goes on at a target of other bits: it may differ from here on"
            );
        }
        running.numerics_id = numerics_id;
        running.target = Some(seat);
        let (priority, waited) =
            (running.sequence.spec().priority, self.now().saturating_sub(running.waits_since));
        self.target_waits.observe(priority, waited);
        self.metrics.waited_for_target(priority, waited);
        true
    }

    fn take_draft(&mut self, running: &mut Running, not: Option<WorkerKey>) -> bool {
        let Some(target) = running.worker(Role::Target).filter(|_| wants_draft(running)) else {
            return false;
        };
        let wanted = wanted(&self.controllers, running, not);
        running.draft = self.pool.seat_at_draft(&wanted, target);
        running.draft.is_some()
    }

    /// Whether the sequence's draft worker has been silent for so long that another one, which answers, is worth a prefill there.
    fn has_better_draft(&self, running: &Running, key: WorkerKey) -> bool {
        let now = self.now();
        if !self.pool.get(key).is_some_and(|pooled| pooled.health.is_given_up(now)) {
            return false;
        }
        let Some(target) = running.worker(Role::Target) else { return false };
        let best = self.pool.best_draft(&wanted(&self.controllers, running, Some(key)), target);
        best.and_then(|key| self.pool.get(key)).is_some_and(|pooled| !pooled.health.is_out())
    }

    /// The sequence's first step at its target is done, and it may have grown beyond what was counted on.
    pub(super) fn settle(&mut self, running: &mut Running) {
        let len = running.len();
        for seat in running.target.iter_mut().chain(&mut running.draft) {
            self.has_room |= self.pool.settle(seat, len);
        }
    }
}

fn wants_draft(running: &Running) -> bool {
    !running.refuses_drafts() && running.sequence.draft_refusal().is_none()
}

fn wanted<'a>(controllers: &Controllers, running: &'a Running, not: Option<WorkerKey>) -> Wanted<'a> {
    let (spec, len) = (running.sequence.spec(), running.len());
    Wanted {
        model: &running.lane.key.model,
        task_type: &running.lane.key.task_type,
        lane: running.lane.number,
        ids: controllers.expected_ids(&running.lane, (len, spec.prompt_len, spec.max_len)),
        len,
        marks: &running.marks,
        not,
    }
}
