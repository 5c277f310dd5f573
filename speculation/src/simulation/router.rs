//! The router's part: lanes with their controllers, what it heard of its workers, rounds that begin. It reads no profile but to know how
//! many workers there are and what these would profile of themselves at their start.

use std::time::Duration;

use super::outcome::LaneOutcome;
use super::worker::{Timing, Work};
use super::{Experiment, Kind, Policy, Setup};
use crate::Role;
use crate::agreement::Agreement;
use crate::cost::{Forward, WorkerCost};
use crate::draft_length::{DraftLength, LaneView, Load, RoundTimes};
use crate::gather::{joining_pays, longest_wait};

/// Rounds that a lane's mean context remembers.
const CONTEXT_MEMORY: f64 = 64.0;

/// A frame of replies.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) role: Role,
    pub(super) worker: usize,
    /// Sequence, what was asked, how many guesses were accepted.
    pub(super) verdicts: Vec<(usize, Work, u32)>,
    pub(super) timing: Timing,
}

/// Rounds that leave now, with their k, and when to look again at those that were held back.
#[derive(Debug, Default)]
pub(super) struct Begun {
    pub(super) rounds: Vec<(usize, u32)>,
    pub(super) wake_at: Option<Duration>,
}

struct Lane {
    name: String,
    controller: DraftLength,
    sequences: u32,
    context: f64,
    k: u32,
    rounds: u64,
    drafted: u64,
}

struct Peer {
    cost: WorkerCost,
    sequences: u32,
    /// Plain rounds that it has not answered.
    plain_in_flight: u32,
}

struct Routed {
    kind: usize,
    lane: usize,
    target: usize,
    draft: usize,
    len: u32,
    begun_at: Duration,
    verify_at: Duration,
    k: Option<u32>,
    has_prompt: bool,
    is_plain_in_flight: bool,
    gone: bool,
    agreement: Agreement,
    rounds: u32,
    accepted: u32,
}

pub(super) struct Router {
    policy: Policy,
    lanes: Vec<Lane>,
    targets: Vec<Peer>,
    drafts: Vec<Peer>,
    sequences: Vec<Routed>,
    num_sequences: u32,
    ready: Vec<usize>,
}

impl Router {
    pub(super) fn new(setup: &Setup<'_>, experiment: &Experiment, kinds: &[Kind]) -> Self {
        let max_k = match setup.policy {
            Policy::Fixed(k) => k,
            Policy::Lanes { max_k } | Policy::OneLane { max_k } => max_k,
        };
        let lane = |name: &str| Lane {
            name: name.to_owned(),
            controller: DraftLength::with_rules(max_k, experiment.rules),
            sequences: 0,
            context: 0.0,
            k: 0,
            rounds: 0,
            drafted: 0,
        };
        let lanes = match setup.policy {
            Policy::OneLane { .. } => vec![lane("all")],
            Policy::Fixed(_) | Policy::Lanes { .. } => {
                kinds.iter().map(|kind| lane(&kind.task_type)).collect()
            }
        };
        let peers = |pool: &crate::profile::Pool| {
            let cost = WorkerCost::new(pool.curve.profiled_times());
            let peer = || Peer { cost: cost.clone(), sequences: 0, plain_in_flight: 0 };
            (0..pool.workers).map(|_| peer()).collect()
        };
        Self {
            policy: setup.policy,
            lanes,
            targets: peers(&setup.profile.target),
            drafts: peers(&setup.profile.draft),
            sequences: Vec::new(),
            num_sequences: 0,
            ready: Vec::new(),
        }
    }

    /// A new sequence, at the least loaded workers.
    pub(super) fn join(&mut self, kind: usize, id: usize, len: u32) {
        let least = |peers: &mut Vec<Peer>| {
            let least = (0..peers.len()).min_by_key(|&i| peers[i].sequences).unwrap_or_default();
            peers[least].sequences += 1;
            least
        };
        let lane = if self.lanes.len() == 1 { 0 } else { kind };
        self.lanes[lane].sequences += 1;
        if self.lanes[lane].context == 0.0 {
            self.lanes[lane].context = f64::from(len);
        }
        self.num_sequences += 1;
        let routed = Routed {
            kind,
            lane,
            target: least(&mut self.targets),
            draft: least(&mut self.drafts),
            len,
            begun_at: Duration::ZERO,
            verify_at: Duration::ZERO,
            k: None,
            has_prompt: false,
            is_plain_in_flight: false,
            gone: false,
            agreement: Agreement::default(),
            rounds: 0,
            accepted: 0,
        };
        match self.sequences.get_mut(id) {
            Some(before) => *before = routed,
            None => self.sequences.push(routed),
        }
    }

    pub(super) fn leave(&mut self, id: usize) {
        let routed = &mut self.sequences[id];
        routed.gone = true;
        self.lanes[routed.lane].sequences -= 1;
        self.targets[routed.target].sequences -= 1;
        self.drafts[routed.draft].sequences -= 1;
        self.num_sequences -= 1;
    }

    pub(super) fn num_sequences(&self) -> u32 {
        self.num_sequences
    }

    pub(super) fn workers_of(&self, id: usize) -> (usize, usize) {
        (self.sequences[id].target, self.sequences[id].draft)
    }

    pub(super) fn kind_of(&self, id: usize) -> usize {
        self.sequences[id].kind
    }

    /// As `Sequence` tells its target: one and what was accepted a round so far.
    pub(super) fn expected_tokens(&self, id: usize) -> f64 {
        let routed = &self.sequences[id];
        1.0 + f64::from(routed.accepted) / f64::from(routed.rounds.max(1))
    }

    /// The first round of a sequence, whose prompt is under way.
    pub(super) fn prompted(&mut self, now: Duration, id: usize) {
        let routed = &mut self.sequences[id];
        (routed.begun_at, routed.verify_at, routed.has_prompt) = (now, now, true);
    }

    pub(super) fn ready(&mut self, now: Duration, id: usize) {
        let routed = &mut self.sequences[id];
        (routed.begun_at, routed.k, routed.has_prompt) = (now, None, false);
        self.ready.push(id);
    }

    /// What a frame says of a worker's forwards and of the wire to it.
    pub(super) fn measure(&mut self, now: Duration, reply: &Reply) {
        self.observe_wire(now, reply);
        let peer = match reply.role {
            Role::Target => &mut self.targets[reply.worker],
            Role::Draft => &mut self.drafts[reply.worker],
        };
        let Timing { rows, prefill_rows, kv_tokens, sequences, took, .. } = reply.timing;
        if prefill_rows > 0 {
            return;
        }
        let sequences = f64::from(sequences.max(1));
        let context = kv_tokens as f64 / sequences;
        peer.cost.observe_forward(Forward { rows: f64::from(rows), sequences, context }, took);
    }

    fn observe_wire(&mut self, now: Duration, reply: &Reply) {
        for &(id, work, _) in &reply.verdicts {
            let routed = &self.sequences[id];
            let (since, forwards, peer) = match work {
                Work::Propose { k } => (routed.begun_at, k, &mut self.drafts[routed.draft]),
                Work::Verify { .. } if !routed.has_prompt => {
                    (routed.verify_at, 1, &mut self.targets[routed.target])
                }
                Work::Verify { .. } | Work::Feed => continue,
            };
            let worked = reply.timing.queue + reply.timing.took * forwards;
            peer.cost.observe_wire(now.saturating_sub(since), worked);
        }
    }

    /// What a draft worker says of the committed tokens that it was sent.
    pub(super) fn heard(&mut self, id: usize, agreed: &[bool]) {
        let routed = &mut self.sequences[id];
        for (positions, accepted) in routed.agreement.told(agreed) {
            self.lanes[routed.lane].controller.observe_agreement(positions, accepted);
        }
    }

    pub(super) fn proposed(&mut self, now: Duration, id: usize, k: u32) {
        let routed = &mut self.sequences[id];
        routed.verify_at = now;
        self.lanes[routed.lane].controller.observe_proposal(k, k);
    }

    /// A round that begins with its verification.
    pub(super) fn undrafted(&mut self, id: usize) {
        let routed = &mut self.sequences[id];
        routed.verify_at = routed.begun_at;
    }

    /// A round is over: k drafted, `accepted` accepted, `committed` committed.
    pub(super) fn verified(
        &mut self,
        now: Duration,
        id: usize,
        (k, accepted, committed): (u32, u32, u32),
        len: u32,
    ) {
        let routed = &mut self.sequences[id];
        routed.len = len;
        routed.rounds += 1;
        routed.accepted += accepted;
        routed.agreement.judged(k, accepted);
        let (target, draft) = (&mut self.targets[routed.target], &self.drafts[routed.draft]);
        if std::mem::take(&mut routed.is_plain_in_flight) {
            target.plain_in_flight -= 1;
        }
        let lane = &mut self.lanes[routed.lane];
        lane.rounds += 1;
        lane.drafted += u64::from(k);
        lane.controller.observe_verdict(k, accepted);
        lane.context += (f64::from(len) - lane.context) / CONTEXT_MEMORY;
        if !routed.has_prompt {
            let times = RoundTimes {
                num_draft_tokens: k,
                draft_wait: routed.verify_at - routed.begun_at,
                verify: now - routed.verify_at,
                committed,
            };
            lane.controller.observe_round(&times, &target.cost, &draft.cost);
        }
    }

    /// Begins the rounds of all that is ready; plain ones leave target by target, all or none.
    pub(super) fn begin_rounds(&mut self, now: Duration) -> Begun {
        let mut begun = Begun::default();
        let mut plain: Vec<Vec<usize>> = vec![Vec::new(); self.targets.len()];
        for id in std::mem::take(&mut self.ready) {
            if self.sequences[id].gone {
                continue;
            }
            let k = match self.sequences[id].k {
                Some(k) => k,
                None => self.choose(id),
            };
            let routed = &mut self.sequences[id];
            routed.k = Some(k);
            match k {
                0 => plain[routed.target].push(id),
                _ => {
                    routed.begun_at = now;
                    begun.rounds.push((id, k));
                }
            }
        }
        for (target, ids) in plain.into_iter().enumerate().filter(|(_, ids)| !ids.is_empty()) {
            match self.hold_until(target, &ids) {
                Some(until) if now < until => {
                    begun.wake_at = Some(begun.wake_at.map_or(until, |at: Duration| at.min(until)));
                    self.ready.extend(ids);
                }
                _ => {
                    self.targets[target].plain_in_flight += ids.len() as u32;
                    for id in ids {
                        let routed = &mut self.sequences[id];
                        (routed.verify_at, routed.is_plain_in_flight) = (routed.begun_at, true);
                        begun.rounds.push((id, 0));
                    }
                }
            }
        }
        begun
    }

    /// As the router holds plain rounds back for those that their target runs.
    fn hold_until(&self, target: usize, ids: &[usize]) -> Option<Duration> {
        let peer = &self.targets[target];
        let held: u32 = ids.iter().map(|&id| self.sequences[id].len).sum();
        let context = f64::from(held) / ids.len() as f64;
        if !joining_pays(ids.len() as u32, peer.plain_in_flight, context, &peer.cost) {
            return None;
        }
        let since = ids.iter().map(|&id| self.sequences[id].begun_at).min()?;
        Some(since + longest_wait(peer.plain_in_flight, context, &peer.cost))
    }

    fn choose(&mut self, id: usize) -> u32 {
        if let Policy::Fixed(k) = self.policy {
            return k;
        }
        let routed = &self.sequences[id];
        let views: Vec<LaneView> = self.lanes.iter().map(Lane::view).collect();
        let (target, draft) = (&self.targets[routed.target], &self.drafts[routed.draft]);
        let load = Load::of(&views, routed.lane, (self.targets.len() as u32, draft.sequences));
        let lane = &mut self.lanes[routed.lane];
        let choice = lane.controller.choose(load, &target.cost, &draft.cost);
        if !choice.is_probe {
            lane.k = choice.num_draft_tokens;
        }
        choice.num_draft_tokens
    }

    pub(super) fn explain(&self) -> Vec<LaneOutcome> {
        let explained = |lane: &Lane| LaneOutcome {
            name: lane.name.clone(),
            mean_k: lane.drafted as f64 / lane.rounds.max(1) as f64,
            explanation: lane.controller.explain(),
        };
        self.lanes.iter().map(explained).collect()
    }
}

impl Lane {
    fn view(&self) -> LaneView {
        LaneView {
            sequences: self.sequences,
            k: self.k,
            context: self.context,
            pace: self.controller.pace(self.sequences),
        }
    }
}
