//! Pools of a [`Profile`] on a virtual clock: many sequences, workers and wires around the very code that routers and workers run.
//!
//! Decided by the shared code: how far a lane drafts ([`crate::draft_length`], [`crate::survival`], [`crate::cost`]), when plain rounds leave
//! a router ([`crate::gather`]), who shares a forward, which lane goes first and when a forward waits for more ([`mod@crate::batch`]). Played
//! here: the clock, the wires, forwards that take their curve's time with noise, guesses that are right by chance, requests that come and go.
//! The router's part reads no profile: it hears what workers would tell. What is left out: lost workers and messages, late drafts,
//! preemption for want of KV, the time that the processes themselves take.
//!
//! [`router`] and [`worker`] are the two ends, [`plain`] is a server without any of this to compare with, [`outcome`] what came out.

mod events;
pub mod outcome;
pub mod plain;
mod router;
mod setup;
#[cfg(test)]
mod tests;
mod worker;

use std::time::Duration;

pub use outcome::{KindOutcome, LaneOutcome, Outcome};
pub use setup::{Experiment, Kind, Policy, Setup, Sharing, Traffic};

use crate::Role;
use crate::agreement::Agreement;
use crate::profile::text::{mix, unit};
use crate::sequence::{FEED_LAG, IDLE_FEED_LAG};
use crate::spec::lane_number;
use events::{Event, Events};
use router::{Reply, Router};
use worker::{Start, Task, Work, Worker};

/// Runs it to its end.
pub fn run(setup: &Setup<'_>) -> Outcome {
    run_with(setup, &Experiment::default())
}

/// The same by other rules than those of routers and workers.
pub fn run_with(setup: &Setup<'_>, experiment: &Experiment) -> Outcome {
    let mut simulation = Simulation::new(setup, experiment);
    simulation.begin();
    while let Some((at, event)) = simulation.events.pop() {
        if at >= setup.duration {
            break;
        }
        simulation.now = at;
        simulation.handle(event);
        // Whatever happens at one moment is one frame: rounds and forwards begin when all of it was heard.
        if simulation.events.next_at().is_none_or(|next| next > at) {
            simulation.begin_rounds();
            simulation.start_workers();
        }
    }
    simulation.finish()
}

struct Simulation<'a> {
    setup: &'a Setup<'a>,
    now: Duration,
    events: Events,
    chance: Chance,
    /// Of the requests alone, so that every way of serving gets the same ones.
    requests: Chance,
    tells_agreement: bool,
    router: Router,
    targets: Vec<Worker>,
    drafts: Vec<Worker>,
    /// Workers at which something happened.
    touched: Vec<(Role, usize)>,
    sequences: Vec<Sequence>,
    /// Those that may be taken by others.
    free: Vec<usize>,
    opened: u64,
    outcome: Outcome,
}

/// What the world knows of a sequence.
struct Sequence {
    lane: u32,
    len: u32,
    /// Output tokens still to come.
    left: u32,
    /// Committed tokens that the draft worker was not sent.
    unfed: u32,
    /// Whether it will find that it would have drawn them, those whose draft it did not make: not sent, and under way.
    agreed: Vec<bool>,
    agreed_under_way: Vec<bool>,
    /// Which tokens of a draft these stand for.
    agreement: Agreement,
    /// Whether the draft worker has not answered what it was fed: it is sent nothing meanwhile.
    is_fed: bool,
    /// It ended; another takes its place in the list as soon as nothing of it is under way.
    is_gone: bool,
    /// How many came before it: what its text is keyed by.
    number: u64,
    came_at: Duration,
    first_token_at: Option<Duration>,
    output: u32,
    asked_at: Duration,
}

impl<'a> Simulation<'a> {
    fn new(setup: &'a Setup<'a>, experiment: &Experiment) -> Self {
        let workers = |role: Role| {
            let pool = if role == Role::Target { &setup.profile.target } else { &setup.profile.draft };
            (0..pool.workers)
                .map(|_| Worker::new(role, pool, (setup.sharing, experiment.groups)))
                .collect::<Vec<_>>()
        };
        let kinds = match &setup.traffic {
            Traffic::Closed { kinds, .. } | Traffic::Open { kinds, .. } => kinds,
        };
        Self {
            setup,
            now: Duration::ZERO,
            events: Events::default(),
            chance: Chance { state: mix(setup.seed) },
            requests: Chance { state: mix(!setup.seed) },
            tells_agreement: experiment.tells_agreement,
            router: Router::new(setup, experiment, kinds),
            targets: workers(Role::Target),
            drafts: workers(Role::Draft),
            touched: Vec::new(),
            sequences: Vec::new(),
            free: Vec::new(),
            opened: 0,
            outcome: Outcome::new(kinds),
        }
    }

    fn kinds(&self) -> &'a [Kind] {
        match &self.setup.traffic {
            Traffic::Closed { kinds, .. } | Traffic::Open { kinds, .. } => kinds,
        }
    }

    fn begin(&mut self) {
        match self.setup.traffic {
            Traffic::Closed { sequences, .. } => {
                for i in 0..sequences {
                    let kind = self.kind_of((f64::from(i) + 0.5) / f64::from(sequences));
                    self.open(kind);
                    let id = i as usize;
                    self.sequences[id].left = u32::MAX;
                    self.router.ready(self.now, id);
                }
                self.begin_rounds();
                self.start_workers();
            }
            Traffic::Open { .. } => self.next_arrival(),
        }
    }

    /// The kind at a point of the shares laid side by side.
    fn kind_of(&self, at: f64) -> usize {
        let kinds = self.kinds();
        let total: f64 = kinds.iter().map(|kind| kind.share).sum();
        let mut end = 0.0;
        let found = kinds.iter().position(|kind| {
            end += kind.share / total;
            at < end
        });
        found.unwrap_or(kinds.len() - 1)
    }

    fn open(&mut self, kind: usize) -> usize {
        let wanted = &self.kinds()[kind];
        let spread = 0.5 + self.requests.next();
        self.opened += 1;
        let sequence = Sequence {
            lane: lane_number(&wanted.task_type),
            len: wanted.prompt_tokens,
            left: ((f64::from(wanted.output_tokens) * spread) as u32).max(1),
            unfed: 1,
            agreed: Vec::new(),
            agreed_under_way: Vec::new(),
            agreement: Agreement::default(),
            is_fed: false,
            is_gone: false,
            number: self.opened,
            came_at: self.now,
            first_token_at: None,
            output: 0,
            asked_at: self.now,
        };
        let id = self.free.pop().unwrap_or(self.sequences.len());
        if id == self.sequences.len() {
            self.sequences.push(sequence);
        } else {
            self.sequences[id] = sequence;
        }
        self.router.join(kind, id, wanted.prompt_tokens);
        id
    }

    fn next_arrival(&mut self) {
        if let Traffic::Open { per_second, .. } = self.setup.traffic {
            let wait = -(1.0 - self.requests.next()).ln() / per_second;
            self.events.push(self.now + Duration::from_secs_f64(wait), Event::Arrival);
        }
    }

    fn wire(&self) -> Duration {
        Duration::from_secs_f64(self.setup.profile.wire_us / 1e6)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival => self.arrival(),
            Event::Steps(role, worker, tasks) => {
                let now = self.now;
                for task in tasks {
                    self.worker(role, worker).arrive(now, task);
                }
                self.touched.push((role, worker));
            }
            Event::Done(role, worker) => self.forward_done(role, worker),
            Event::Wake(role, worker) => self.touched.push((role, worker)),
            Event::Replies(reply) => self.replies(reply),
            Event::RouterWake => {}
        }
    }

    /// A request: its prompt goes to both of its workers, and its first token is drawn at the end of it.
    fn arrival(&mut self) {
        self.next_arrival();
        let Traffic::Open { sequences_max, .. } = self.setup.traffic else { return };
        if self.router.num_sequences() >= sequences_max {
            self.outcome.turned_away += 1;
            return;
        }
        let at = self.requests.next();
        let kind = self.kind_of(at);
        let id = self.open(kind);
        let sequence = &self.sequences[id];
        let (target, draft) = self.router.workers_of(id);
        let (lane, context, at) = (sequence.lane, sequence.len, self.now + self.wire());
        let prompt = |work| Task { sequence: id, lane, context, holds: context, work, expected_tokens: 1.0 };
        self.events.push(at, Event::Steps(Role::Target, target, vec![prompt(Work::Verify { k: 0 })]));
        self.events.push(at, Event::Steps(Role::Draft, draft, vec![prompt(Work::Feed)]));
        self.sequences[id].is_fed = true;
        self.router.prompted(self.now, id);
    }

    fn worker(&mut self, role: Role, worker: usize) -> &mut Worker {
        match role {
            Role::Target => &mut self.targets[worker],
            Role::Draft => &mut self.drafts[worker],
        }
    }

    /// Starts what may start at the workers at which something happened.
    fn start_workers(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable_by_key(|(role, worker)| (*role == Role::Draft, *worker));
        touched.dedup();
        for (role, worker) in touched {
            let now = self.now;
            match self.worker(role, worker).start(now) {
                Start::Nothing => {}
                Start::Waits(wait) => self.events.push(now + wait, Event::Wake(role, worker)),
                Start::Runs(micros) => {
                    let took = self.setup.profile.with_noise(micros, self.chance.next());
                    self.events.push(now + Duration::from_secs_f64(took / 1e6), Event::Done(role, worker));
                }
            }
        }
    }

    fn forward_done(&mut self, role: Role, worker: usize) {
        let now = self.now;
        let (done, timing) = self.worker(role, worker).finish(now);
        if now >= self.setup.warm_up {
            self.outcome.forward(role, timing.took, self.setup.warm_up, now);
        }
        self.touched.push((role, worker));
        let mut verdicts = Vec::new();
        for task in &done {
            let accepted = match task.work {
                Work::Verify { k } => self.judge(task.sequence, k),
                Work::Feed | Work::Propose { .. } => 0,
            };
            verdicts.push((task.sequence, task.work, accepted));
        }
        if !verdicts.is_empty() {
            let reply = Reply { role, worker, verdicts, timing };
            self.events.push(now + self.wire(), Event::Replies(reply));
        }
    }

    /// How many of k guesses are right.
    fn judge(&self, id: usize, k: u32) -> u32 {
        let output = self.sequences[id].output;
        (0..k).take_while(|&i| self.is_guessed(id, output + i, i)).count() as u32
    }

    /// Whether the draft worker guesses output token `at` of a sequence, as the one at `position` of a draft. That is the text's: it hangs on
    /// nothing that was drafted before, so that the same requests are as hard however they are served.
    fn is_guessed(&self, id: usize, at: u32, position: u32) -> bool {
        let chance = unit(mix(mix(self.setup.seed ^ (self.sequences[id].number << 32)) ^ u64::from(at)));
        let lane = self.sequences[id].lane;
        chance < self.setup.profile.acceptance.rate(lane, position as usize, self.now.as_secs_f64())
    }

    /// A frame of replies reaches the router.
    fn replies(&mut self, reply: Reply) {
        self.router.measure(self.now, &reply);
        for &(id, work, accepted) in &reply.verdicts {
            match work {
                Work::Feed => self.fed(id),
                Work::Propose { k } => self.proposed(id, k),
                Work::Verify { k } => self.verified(id, (k, accepted)),
            }
        }
    }

    /// A draft worker says what it would have drawn of the committed tokens that it was sent.
    fn heard(&mut self, id: usize) {
        let agreed = std::mem::take(&mut self.sequences[id].agreed_under_way);
        if !self.tells_agreement {
            return;
        }
        self.router.heard(id, &agreed);
    }

    /// A draft worker runs what it was fed; much may have come since.
    fn fed(&mut self, id: usize) {
        self.heard(id);
        self.sequences[id].is_fed = false;
        if self.sequences[id].is_gone {
            return self.free.push(id);
        }
        if self.sequences[id].unfed > FEED_LAG {
            self.feed(id);
        }
    }

    fn proposed(&mut self, id: usize, k: u32) {
        self.heard(id);
        self.router.proposed(self.now, id, k);
        self.verify(id, k);
    }

    fn verify(&mut self, id: usize, k: u32) {
        let sequence = &self.sequences[id];
        let (target, _) = self.router.workers_of(id);
        let task = Task {
            sequence: id,
            lane: sequence.lane,
            context: 1,
            holds: sequence.len,
            work: Work::Verify { k },
            expected_tokens: self.router.expected_tokens(id),
        };
        self.events.push_step(self.now + self.wire(), (Role::Target, target), task);
    }

    fn verified(&mut self, id: usize, (k, accepted): (u32, u32)) {
        let now = self.now;
        let sequence = &mut self.sequences[id];
        let committed = (accepted + 1).min(sequence.left);
        sequence.len += if sequence.left == u32::MAX { 0 } else { committed };
        sequence.left = if sequence.left == u32::MAX { u32::MAX } else { sequence.left - committed };
        sequence.output += committed;
        sequence.unfed = match k {
            0 => sequence.unfed + 1,
            _ => 1 + u32::from(accepted == k),
        };
        let first_token_at = *sequence.first_token_at.get_or_insert(now);
        let kind = self.router.kind_of(id);
        if now >= self.setup.warm_up {
            let waited = now - sequence.asked_at;
            self.outcome.committed(kind, committed, waited);
        }
        sequence.asked_at = now;
        self.router.verified(now, id, (k, accepted, committed), sequence.len);
        self.agree(id, (k, accepted));
        let sequence = &self.sequences[id];
        if sequence.left > 0 {
            return self.router.ready(now, id);
        }
        if sequence.came_at >= self.setup.warm_up {
            let (came_at, output) = (sequence.came_at, sequence.output);
            self.outcome.finished(kind, (came_at, first_token_at, now), output);
        }
        let (target, draft) = self.router.workers_of(id);
        self.targets[target].forget(id);
        self.drafts[draft].forget(id);
        self.router.leave(id);
        self.sequences[id].is_gone = true;
        if !self.sequences[id].is_fed {
            self.free.push(id);
        }
    }

    /// Whether the draft worker would have drawn the target's own token of a round that drafted nothing, or whose draft was accepted whole.
    fn agree(&mut self, id: usize, (k, accepted): (u32, u32)) {
        let sequence = &mut self.sequences[id];
        sequence.agreement.judged(k, accepted);
        if k == 0 || accepted == k {
            let (mut next, last) = (sequence.agreement, sequence.output - 1);
            let position = next.next(true).0.start;
            let agreed = self.is_guessed(id, last, position);
            let sequence = &mut self.sequences[id];
            sequence.agreement.next(agreed);
            sequence.agreed.push(agreed);
        }
    }

    /// The committed tokens that go to the draft worker now.
    fn context_for_draft(&mut self, id: usize) -> u32 {
        let sequence = &mut self.sequences[id];
        let context = std::mem::take(&mut sequence.unfed);
        // What the first of them follows was run in an earlier step, and what would have been drawn there is forgotten.
        let unknown = (sequence.agreed.len() + 1).saturating_sub(context as usize);
        sequence.agreed_under_way.extend(sequence.agreed.drain(..).skip(unknown));
        context
    }

    /// As `Sequence` feeds a draft worker that nobody asks for drafts.
    fn feed(&mut self, id: usize) {
        let sequence = &self.sequences[id];
        let never_drafts = matches!(self.setup.policy, Policy::Fixed(0));
        if sequence.is_fed || sequence.unfed < IDLE_FEED_LAG || never_drafts {
            return;
        }
        let context = self.context_for_draft(id);
        let sequence = &self.sequences[id];
        let task = Task {
            sequence: id,
            lane: sequence.lane,
            context,
            holds: sequence.len,
            work: Work::Feed,
            expected_tokens: 1.0,
        };
        let (_, draft) = self.router.workers_of(id);
        self.events.push_step(self.now + self.wire(), (Role::Draft, draft), task);
        self.sequences[id].is_fed = true;
    }

    fn begin_rounds(&mut self) {
        let begun = self.router.begin_rounds(self.now);
        for (id, k) in begun.rounds {
            // A draft worker that is behind is asked for nothing.
            let sequence = &self.sequences[id];
            if k == 0 || sequence.is_fed || sequence.unfed > FEED_LAG {
                self.router.undrafted(id);
                self.verify(id, 0);
                self.feed(id);
                continue;
            }
            let context = self.context_for_draft(id).max(1);
            let sequence = &self.sequences[id];
            let (_, draft) = self.router.workers_of(id);
            let task = Task {
                sequence: id,
                lane: sequence.lane,
                context,
                holds: sequence.len,
                work: Work::Propose { k },
                expected_tokens: 1.0,
            };
            self.events.push_step(self.now + self.wire(), (Role::Draft, draft), task);
        }
        if let Some(at) = begun.wake_at {
            self.events.push(at.max(self.now + Duration::from_micros(1)), Event::RouterWake);
        }
        self.events.flush_steps();
    }

    fn finish(mut self) -> Outcome {
        self.outcome.seconds = (self.setup.duration - self.setup.warm_up).as_secs_f64();
        self.outcome.lanes = self.router.explain();
        self.outcome.sequences_at_end = self.router.num_sequences();
        self.outcome
    }
}

/// A keyed sequence of chances.
#[derive(Debug, Clone)]
pub(crate) struct Chance {
    state: u64,
}

impl Chance {
    /// The next one, in 0..1.
    pub(crate) fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        unit(mix(self.state))
    }
}
