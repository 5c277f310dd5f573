//! The choice of k on a virtual clock: many sequences, one target, some draft workers, wires, and the same controller
//! code that the router runs. Prints, for each profile, acceptance and number of sequences, committed tokens per second of the lane's own
//! choice against the best fixed k and against no speculation, and ends with the smallest of both ratios. All numbers are
//! simulated.
//!
//! `cargo run -p outrider-speculation --example lanes_sim [quick]`
//!
//! What is simulated: workers take whatever waits into their next forward, as the real ones do; draft workers go on token by token,
//! and sequences join and leave at each; every forward takes its table's time with 5% noise; acceptance is independent by
//! position. What is not: prompts, arrivals and departures, KV growth, stalls. `off` is a loop of its own, without
//! lanes, drafts, or events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use speculation::cost::{StepTimePoint, StepTimes, WorkerCost};
use speculation::draft_length::{DraftLength, Load, Pace, RoundTimes};
use speculation::gather::joining_pays;

const MAX_K: u32 = 10;
const SEEDS: u64 = 5;
const ACCEPTANCE: [f64; 6] = [0.2, 0.35, 0.5, 0.65, 0.8, 0.95];
const SEQUENCES: [u32; 6] = [1, 4, 16, 64, 256, 512];

/// Rounds of each sequence; a cold start is part of them.
const ROUNDS: u64 = 400;

/// A pool of workers. The controller never reads it: it sees what real workers would tell.
#[derive(Clone, Copy)]
struct Profile {
    name: &'static str,
    target_us: fn(f64) -> f64,
    draft_us: fn(f64) -> f64,
    draft_workers: u32,
    wire_us: f64,
}

/// Shapes in the manner of published step times, not measurements: a flat memory-bound part, then a slope past the knee.
const PROFILES: [Profile; 3] = [
    Profile {
        name: "70B on 8 x H100, 8 draft workers on L4 (assumed: 25 ms flat to 200 rows, draft 5 ms a token)",
        target_us: |rows| 25_000.0 * (rows / 200.0).max(1.0) + 500.0 * (rows / 64.0).floor(),
        draft_us: |rows| 5_000.0 + 12.0 * rows,
        draft_workers: 8,
        wire_us: 400.0,
    },
    Profile {
        name: "8B on one H100, 1 draft worker beside it (assumed: 7 ms flat to 160 rows, draft 1.2 ms a token)",
        target_us: |rows| 7_000.0 * (rows / 160.0).max(1.0),
        draft_us: |rows| 1_200.0 + 3.0 * rows,
        draft_workers: 1,
        wire_us: 200.0,
    },
    Profile {
        name: "two CPU cores (assumed: target 0.7 ms and 0.18 ms a row, draft 0.15 ms and 0.03 ms a row)",
        target_us: |rows| 700.0 + 180.0 * rows,
        draft_us: |rows| 150.0 + 30.0 * rows,
        draft_workers: 1,
        wire_us: 250.0,
    },
];

/// A keyed sequence of chances.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64) / ((1_u64 << 53) as f64)
    }

    fn noise(&mut self) -> f64 {
        0.95 + 0.1 * self.next()
    }
}

/// Who decides k.
enum Policy {
    Fixed(u32),
    Adaptive(Box<DraftLength>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The router hears that a sequence may begin a round.
    Ready(u32),
    /// A step reaches a draft worker.
    AtDraft(u32),
    /// A draft worker's forward is done.
    Drafted(u32),
    /// A proposal reaches the router.
    Proposed(u32),
    /// A step reaches the target.
    AtTarget(u32),
    /// The target's forward is done.
    Verified,
}

#[derive(Clone, Copy, Default)]
struct Round {
    k: u32,
    drafted: u32,
    accepted: u32,
    begun_at: u64,
    verify_at: u64,
    is_plain_in_flight: bool,
    is_chosen: bool,
}

#[derive(Default)]
struct Worker {
    waiting: Vec<u32>,
    running: Vec<u32>,
    busy: bool,
    began_at: u64,
}

struct Simulation {
    profile: Profile,
    acceptance: f64,
    policy: Policy,
    chance: Chance,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    num_events: u64,
    rounds: Vec<Round>,
    /// Sequences that wait for a round, and how many plain ones the target has.
    ready: Vec<u32>,
    plain_in_flight: u32,
    target: Worker,
    drafts: Vec<Worker>,
    target_cost: WorkerCost,
    draft_cost: WorkerCost,
    committed: u64,
}

impl Simulation {
    fn new(profile: Profile, acceptance: f64, sequences: u32, (policy, seed): (Policy, u64)) -> Self {
        let table = |times: fn(f64) -> f64| {
            let point =
                |rows: u32| StepTimePoint { rows, kv_tokens: 0, micros: times(f64::from(rows)) as u64 };
            WorkerCost::new(StepTimes::new(&[1, 2, 4, 8, 16, 32, 64].map(point)))
        };
        let mut simulation = Self {
            profile,
            acceptance,
            policy,
            chance: Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(sequences)),
            now: 0,
            events: BinaryHeap::new(),
            num_events: 0,
            rounds: vec![Round::default(); sequences as usize],
            ready: Vec::new(),
            plain_in_flight: 0,
            target: Worker::default(),
            drafts: (0..profile.draft_workers).map(|_| Worker::default()).collect(),
            target_cost: table(profile.target_us),
            draft_cost: table(profile.draft_us),
            committed: 0,
        };
        (0..sequences).for_each(|sequence| simulation.after(0.0, Event::Ready(sequence)));
        simulation
    }

    fn after(&mut self, micros: f64, event: Event) {
        self.num_events += 1;
        self.events.push(Reverse((self.now + (micros * 1e3) as u64, self.num_events, event)));
    }

    /// Tokens per second over so many committed tokens' worth of rounds.
    fn run(&mut self, verifications: u64) -> f64 {
        let mut left = verifications;
        while left > 0 {
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            self.now = at;
            if event == Event::Verified {
                left = left.saturating_sub(self.target.running.len() as u64);
            }
            self.handle(event);
            // Whatever happens at one moment is one frame: workers start when all of it was heard.
            if self.events.peek().is_none_or(|Reverse((next, ..))| *next > at) {
                self.begin_rounds();
                self.start_workers();
            }
        }
        self.committed as f64 * 1e9 / self.now.max(1) as f64
    }

    fn handle(&mut self, event: Event) {
        let wire = self.profile.wire_us;
        match event {
            Event::Ready(sequence) => {
                let round = &mut self.rounds[sequence as usize];
                self.plain_in_flight -= u32::from(round.is_plain_in_flight);
                *round = Round { begun_at: self.now, ..Round::default() };
                self.ready.push(sequence);
            }
            Event::AtDraft(sequence) => self.draft_of(sequence).waiting.push(sequence),
            Event::Drafted(worker) => self.drafted(worker),
            Event::Proposed(sequence) => {
                let round = &mut self.rounds[sequence as usize];
                round.verify_at = self.now;
                if let Policy::Adaptive(lane) = &mut self.policy {
                    lane.observe_proposal(round.k, round.k);
                }
                self.after(wire / 2.0, Event::AtTarget(sequence));
            }
            Event::AtTarget(sequence) => self.target.waiting.push(sequence),
            Event::Verified => self.verified(),
        }
    }

    fn draft_of(&mut self, sequence: u32) -> &mut Worker {
        let worker = sequence as usize % self.drafts.len();
        &mut self.drafts[worker]
    }

    /// As the router does: plain steps wait for those in flight, where joining them pays.
    fn begin_rounds(&mut self) {
        let mut plain = Vec::new();
        for sequence in std::mem::take(&mut self.ready) {
            let round = self.rounds[sequence as usize];
            let k = if round.is_chosen { round.k } else { self.choose() };
            let now = self.now;
            let round = &mut self.rounds[sequence as usize];
            (round.k, round.is_chosen) = (k, true);
            if k == 0 {
                plain.push(sequence);
            } else {
                round.verify_at = now;
                self.after(self.profile.wire_us / 2.0, Event::AtDraft(sequence));
            }
        }
        if joining_pays(plain.len() as u32, self.plain_in_flight, 0.0, &self.target_cost) {
            self.ready = plain;
            return;
        }
        self.plain_in_flight += plain.len() as u32;
        for sequence in plain {
            let round = &mut self.rounds[sequence as usize];
            (round.verify_at, round.is_plain_in_flight) = (round.begun_at, true);
            self.after(self.profile.wire_us / 2.0, Event::AtTarget(sequence));
        }
    }

    fn choose(&mut self) -> u32 {
        let sequences = self.rounds.len() as u32;
        let load = Load {
            sequences,
            other_rows: 0,
            draft_sequences: sequences.div_ceil(self.profile.draft_workers),
            context: 0.0,
            others: Pace::default(),
        };
        match &mut self.policy {
            Policy::Fixed(k) => *k,
            Policy::Adaptive(lane) => lane.choose(load, &self.target_cost, &self.draft_cost).num_draft_tokens,
        }
    }

    fn start_workers(&mut self) {
        for i in 0..self.drafts.len() {
            let worker = &mut self.drafts[i];
            worker.running.append(&mut worker.waiting);
            if worker.busy || worker.running.is_empty() {
                continue;
            }
            (worker.busy, worker.began_at) = (true, self.now);
            let took = (self.profile.draft_us)(worker.running.len() as f64) * self.chance.noise();
            self.after(took, Event::Drafted(i as u32));
        }
        if !self.target.busy && !self.target.waiting.is_empty() {
            self.target.running = std::mem::take(&mut self.target.waiting);
            (self.target.busy, self.target.began_at) = (true, self.now);
            let took = (self.profile.target_us)(self.target_rows()) * self.chance.noise();
            self.after(took, Event::Verified);
        }
    }

    fn target_rows(&self) -> f64 {
        self.target.running.iter().map(|sequence| f64::from(self.rounds[*sequence as usize].k + 1)).sum()
    }

    /// One more token for all that shared a draft worker's forward.
    fn drafted(&mut self, worker: u32) {
        let (now, wire) = (self.now, self.profile.wire_us);
        let draft = &mut self.drafts[worker as usize];
        draft.busy = false;
        let took = Duration::from_nanos(now - draft.began_at);
        let rows = draft.running.len() as u32;
        let rounds = &mut self.rounds;
        draft.running.iter().for_each(|sequence| rounds[*sequence as usize].drafted += 1);
        let is_done = |sequence: &mut u32| rounds[*sequence as usize].drafted >= rounds[*sequence as usize].k;
        let done: Vec<u32> = draft.running.extract_if(.., is_done).collect();
        if !done.is_empty() {
            self.draft_cost.observe_step(rows, 0.0, took);
        }
        for sequence in done {
            let round = self.rounds[sequence as usize];
            let waited = Duration::from_nanos(now - round.begun_at) + Duration::from_secs_f64(wire / 2e6);
            self.draft_cost.observe_wire(waited.saturating_sub(took * round.k));
            self.after(wire / 2.0, Event::Proposed(sequence));
        }
    }

    fn verified(&mut self) {
        let (now, wire) = (self.now, self.profile.wire_us);
        let rows = self.target_rows() as u32;
        let took = Duration::from_nanos(now - self.target.began_at);
        self.target.busy = false;
        self.target_cost.observe_step(rows, 0.0, took);
        self.target_cost.observe_wire(Duration::from_secs_f64(wire / 1e6));
        for sequence in std::mem::take(&mut self.target.running) {
            let round = &mut self.rounds[sequence as usize];
            round.accepted = (0..round.k).take_while(|_| self.chance.next() < self.acceptance).count() as u32;
            let round = *round;
            self.committed += u64::from(round.accepted + 1);
            if let Policy::Adaptive(lane) = &mut self.policy {
                lane.observe_verdict(round.k, round.accepted);
                let times = RoundTimes {
                    num_draft_tokens: round.k,
                    draft_wait: Duration::from_nanos(round.verify_at - round.begun_at),
                    verify: Duration::from_nanos(now - round.verify_at) + Duration::from_secs_f64(wire / 2e6),
                    committed: round.accepted + 1,
                };
                lane.observe_round(&times, &self.target_cost, &self.draft_cost);
            }
            self.after(wire / 2.0, Event::Ready(sequence));
        }
    }
}

/// A continuous batch of its own: all sequences in every forward, one token each.
fn off(profile: &Profile, sequences: u32, seed: u64) -> f64 {
    let mut chance = Chance(seed);
    let micros: f64 = (0..ROUNDS)
        .map(|_| profile.wire_us + (profile.target_us)(f64::from(sequences)) * chance.noise())
        .sum();
    ROUNDS as f64 * f64::from(sequences) * 1e6 / micros
}

/// Tokens per second of a policy, over the seeds, with its changes of k.
fn measure(profile: Profile, acceptance: f64, sequences: u32, fixed: Option<u32>) -> (f64, f64, u32) {
    let (mut speed, mut changes, mut k) = (0.0, 0.0, 0);
    for seed in 0..SEEDS {
        let policy = match fixed {
            Some(k) => Policy::Fixed(k),
            None => Policy::Adaptive(Box::new(DraftLength::new(MAX_K))),
        };
        let mut simulation = Simulation::new(profile, acceptance, sequences, (policy, seed + 1));
        let rounds = if sequences > 64 { ROUNDS / 2 } else { ROUNDS };
        speed += simulation.run(rounds * u64::from(sequences)) / SEEDS as f64;
        if let Policy::Adaptive(lane) = &simulation.policy {
            let explanation = lane.explain();
            let late =
                explanation.changes.iter().filter(|change| change.lane_round > explanation.lane_rounds / 2);
            changes += late.count() as f64 / SEEDS as f64;
            k = explanation.k;
        }
    }
    (speed, changes, k)
}

#[expect(clippy::print_stdout, reason = "the map is what this program is for")]
fn main() {
    let quick = std::env::args().nth(1).is_some_and(|word| word == "quick");
    let sequences: &[u32] = if quick { &[1, 16, 256] } else { &SEQUENCES };
    let (mut min_best, mut min_off) = (f64::MAX, f64::MAX);
    println!(
        "Simulated, nothing here was measured. Each cell: adaptive / best fixed k in 0..={MAX_K}, adaptive / off,"
    );
    println!(
        "then the best fixed k, the k chosen at the end, and the changes of k in the second half of a run."
    );
    for profile in PROFILES {
        println!("\n{}\n", profile.name);
        let heads: BTreeMap<u32, String> = sequences.iter().map(|n| (*n, format!("{n} seq"))).collect();
        let heads: Vec<String> = heads.values().map(|head| format!("{head:>25}")).collect();
        println!("acceptance {}", heads.join(" "));
        for acceptance in ACCEPTANCE {
            let mut cells = Vec::new();
            for &n in sequences {
                let fixed = |k| (measure(profile, acceptance, n, Some(k)).0, k);
                let best = (0..=MAX_K).map(fixed).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
                let off = (0..SEEDS).map(|seed| off(&profile, n, seed + 1)).sum::<f64>() / SEEDS as f64;
                let (adaptive, changes, k) = measure(profile, acceptance, n, None);
                (min_best, min_off) = (min_best.min(adaptive / best.0), min_off.min(adaptive / off));
                let cell = format!(
                    "{:.2} {:.2} k={}/{} ({changes:.1})",
                    adaptive / best.0,
                    adaptive / off,
                    best.1,
                    k
                );
                cells.push(format!("{cell:>25}"));
            }
            println!("{acceptance:>10} {}", cells.join(" "));
        }
    }
    println!("\nmin_ratio_vs_best={min_best:.2} min_ratio_vs_off={min_off:.2}");
}
