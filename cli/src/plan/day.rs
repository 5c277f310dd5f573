//! Simulates a day's traffic on autoscaled pools: number of workers, their cost, and the latency for clients.
//! Pure; simulated, nothing is measured.
//!
//! A fluid model in steps of one second over the closed form of [`super::round`]: requests arrive at the
//! day's rate, are spread evenly over the targets, and finish as fast as the pools commit their tokens. Pools
//! follow the same rule as the router's gauges ([`scheduling::pool_size`]), through an autoscaler: it reads
//! the gauges every [`Autoscaler::poll_every_s`] seconds, new workers serve after a start-up time, and no
//! worker is removed while the highest wanted size of the last [`Autoscaler::stabilization_s`] seconds is
//! higher.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

use scheduling::pool_size::{CurrentPools, Demand, desired_workers};

use super::round::{Drafting, RoundModel};

/// Seconds per day.
const DAY: u32 = 86_400;

/// The arriving traffic.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    /// Requests per second at the quietest and at the busiest hour.
    pub rate: (f64, f64),
    /// A burst: the second of the day at which it begins, its duration in seconds, and the factor on the
    /// rate.
    pub burst: (u32, u32, f64),
    /// Tokens generated per request.
    pub output_tokens: f64,
}

impl Traffic {
    /// Requests per second: lowest at 4:00, highest at 16:00.
    fn rate_at(&self, second: u32) -> f64 {
        let (night, peak) = self.rate;
        let phase = (f64::from(second) / f64::from(DAY) - 4.0 / 24.0) * std::f64::consts::TAU;
        let (from, lasts, factor) = self.burst;
        let burst = if (from..from + lasts).contains(&second) { factor } else { 1.0 };
        burst * (night + (peak - night) * (0.5 - 0.5 * phase.cos()))
    }
}

/// How a pool is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// A fixed number of workers.
    Fixed(u32),
    /// The wanted number of workers, within these bounds.
    Autoscaled {
        /// Minimum number.
        min: u32,
        /// Maximum number.
        max: u32,
    },
}

/// Parameters of a pool's autoscaler.
#[derive(Debug, Clone, Copy)]
pub struct Autoscaler {
    /// Seconds between two reads of the gauges.
    pub poll_every_s: u32,
    /// Seconds from the scaling decision until a worker serves.
    pub startup_s: u32,
    /// Stabilization window, seconds: a pool stays at the largest size wanted within it.
    pub stabilization_s: u32,
}

/// State of one pool during the day.
#[derive(Debug)]
struct Pool {
    scaling: Scaling,
    ready: u32,
    /// Starting workers: the second in which they begin to serve, and their number.
    starting: VecDeque<(u32, u32)>,
    /// Recent wanted sizes: time and number of workers.
    desired_sizes: VecDeque<(u32, u32)>,
    /// Sum over all workers, including starting ones.
    worker_seconds: f64,
}

impl Pool {
    fn new(scaling: Scaling) -> Self {
        let ready = match scaling {
            Scaling::Fixed(count) => count,
            Scaling::Autoscaled { min, .. } => min,
        };
        Self {
            scaling,
            ready,
            starting: VecDeque::new(),
            desired_sizes: VecDeque::new(),
            worker_seconds: 0.0,
        }
    }

    fn num_paid(&self) -> u32 {
        self.ready + self.starting.iter().map(|(_, count)| count).sum::<u32>()
    }

    fn tick(&mut self, now: u32) {
        while self.starting.front().is_some_and(|&(at, _)| at <= now) {
            self.ready += self.starting.pop_front().map_or(0, |(_, count)| count);
        }
        self.worker_seconds += f64::from(self.num_paid());
    }

    fn scale(&mut self, now: u32, desired: f64, autoscaler: &Autoscaler) {
        let Scaling::Autoscaled { min, max } = self.scaling else { return };
        self.desired_sizes.push_back((now, (desired.ceil() as u32).clamp(min, max)));
        while self.desired_sizes.front().is_some_and(|&(at, _)| at + autoscaler.stabilization_s < now) {
            self.desired_sizes.pop_front();
        }
        let desired = self.desired_sizes.iter().map(|&(_, desired)| desired).max().unwrap_or(min);
        let num_paid = self.num_paid();
        if desired > num_paid {
            self.starting.push_back((now + autoscaler.startup_s, desired - num_paid));
        }
        // Starting workers are removed first.
        let mut surplus = num_paid.saturating_sub(desired);
        while let Some((_, count)) = self.starting.back_mut().filter(|_| surplus > 0) {
            let cut = surplus.min(*count);
            (*count, surplus) = (*count - cut, surplus - cut);
            if *count == 0 {
                self.starting.pop_back();
            }
        }
        self.ready -= surplus;
    }
}

/// The speed of the pools, from the closed form.
pub struct Pools<'a> {
    /// The rounds of one target with one draft worker.
    pub rounds: RoundModel<'a>,
    /// Sequences that fit into the KV memory of one target.
    pub concurrency: f64,
    /// Wanted maximum time per output token, milliseconds.
    pub tpot_ms: f64,
    speeds: RefCell<HashMap<(u32, u32), f64>>,
}

/// Resolution of draft workers per target: 1/16.
const DRAFT_RESOLUTION: f64 = 16.0;

impl<'a> Pools<'a> {
    /// Creates the model of one target.
    pub fn new(rounds: RoundModel<'a>, concurrency: f64, tpot_ms: f64) -> Self {
        Self { rounds, concurrency, tpot_ms, speeds: RefCell::default() }
    }

    /// Tokens per second that one target commits for this number of sequences and draft workers, at the best
    /// k.
    pub fn speed(&self, sequences: f64, drafts: f64) -> f64 {
        let key = (sequences.ceil().max(1.0) as u32, (drafts * DRAFT_RESOLUTION).round() as u32);
        let known = self.speeds.borrow().get(&key).copied();
        let speed =
            known.unwrap_or_else(|| self.speed_of(f64::from(key.0), f64::from(key.1) / DRAFT_RESOLUTION));
        self.speeds.borrow_mut().insert(key, speed);
        speed * sequences / f64::from(key.0)
    }

    fn speed_of(&self, sequences: f64, drafts: f64) -> f64 {
        let Drafting::Apart { draft, wire_us, .. } = self.rounds.drafting else {
            return self.rounds.best(sequences).tokens_per_second;
        };
        if drafts <= 0.0 {
            return self.rounds.at(sequences, 0).tokens_per_second;
        }
        let drafting = Drafting::Apart { draft, workers: drafts, wire_us };
        RoundModel { drafting, ..self.rounds }.best(sequences).tokens_per_second
    }
}

/// Results of a day.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DayResult {
    /// Paid hours of target workers.
    pub target_hours: f64,
    /// Paid hours of draft workers.
    pub draft_hours: f64,
    /// The largest number of target workers and of draft workers at the same time.
    pub peak_workers: (u32, u32),
    /// Hours without a draft worker.
    pub hours_without_drafts: f64,
    /// Share of requests that arrived while the time per token exceeded the wanted one.
    pub slow_share: f64,
    /// Share of requests that arrived while sequences waited for KV memory.
    pub waited_share: f64,
    /// Mean time per output token over the day's requests, milliseconds.
    pub tpot_ms: f64,
    /// Number of requests in the day.
    pub requests: f64,
}

/// Simulates a day after a warm-up day that is not counted.
pub fn simulate(
    pools: &Pools<'_>,
    traffic: &Traffic,
    (targets, drafts): (Scaling, Scaling),
    autoscaler: &Autoscaler,
) -> DayResult {
    let (mut targets, mut drafts) = (Pool::new(targets), Pool::new(drafts));
    let mut outcome = DayResult::default();
    let mut sequences = 0.0_f64;
    for now in 0..2 * DAY {
        if now == DAY {
            (targets.worker_seconds, drafts.worker_seconds) = (0.0, 0.0);
            outcome = DayResult::default();
        }
        targets.tick(now);
        drafts.tick(now);
        let serving = f64::from(targets.ready.max(1));
        let running = sequences.min(serving * pools.concurrency);
        let each = running / serving;
        let speed =
            if running > 0.0 { serving * pools.speed(each, f64::from(drafts.ready) / serving) } else { 0.0 };
        let arrive = traffic.rate_at(now % DAY);
        outcome.count(arrive, (running, sequences), speed, pools.tpot_ms);
        outcome.peak_workers =
            (outcome.peak_workers.0.max(targets.num_paid()), outcome.peak_workers.1.max(drafts.num_paid()));
        outcome.hours_without_drafts += if drafts.ready == 0 { 1.0 / 3600.0 } else { 0.0 };
        sequences = (sequences + arrive - speed / traffic.output_tokens).max(0.0);
        if now.is_multiple_of(autoscaler.poll_every_s) {
            let demand = Demand { sequences, kv_blocks: sequences };
            let current = CurrentPools {
                targets: serving,
                drafts: f64::from(drafts.ready),
                kv_blocks_each: pools.concurrency,
                tpot_us: Some(pools.tpot_ms * 1e3),
            };
            let desired =
                desired_workers(demand, current, &|sequences, drafts| pools.speed(sequences, drafts));
            targets.scale(now, desired.targets, autoscaler);
            drafts.scale(now, desired.drafts, autoscaler);
        }
    }
    outcome.finish(&targets, &drafts)
}

impl DayResult {
    fn count(&mut self, arrive: f64, (running, sequences): (f64, f64), speed: f64, wanted_ms: f64) {
        let tpot_ms = if speed > 0.0 { 1e3 * running / speed } else { 0.0 };
        self.requests += arrive;
        self.tpot_ms += arrive * tpot_ms;
        self.slow_share += if tpot_ms > wanted_ms { arrive } else { 0.0 };
        self.waited_share += if sequences > running { arrive } else { 0.0 };
    }

    fn finish(self, targets: &Pool, drafts: &Pool) -> Self {
        Self {
            target_hours: targets.worker_seconds / 3600.0,
            draft_hours: drafts.worker_seconds / 3600.0,
            slow_share: self.slow_share / self.requests,
            waited_share: self.waited_share / self.requests,
            tpot_ms: self.tpot_ms / self.requests,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::step_time::{ForwardBatch, StepCost};

    struct Line(f64, f64);

    impl StepCost for Line {
        fn micros(&self, forward: ForwardBatch) -> f64 {
            self.0 + self.1 * forward.sequences * forward.rows_each
        }
    }

    const TRAFFIC: Traffic = Traffic { rate: (2.0, 40.0), burst: (0, 0, 1.0), output_tokens: 200.0 };
    const AUTOSCALER: Autoscaler = Autoscaler { poll_every_s: 15, startup_s: 120, stabilization_s: 300 };
    const FREE: Scaling = Scaling::Autoscaled { min: 1, max: 64 };

    fn day(drafts: Scaling, targets: Scaling, traffic: &Traffic) -> DayResult {
        let (target, draft) = (Line(10_000.0, 200.0), Line(1_000.0, 50.0));
        let rounds = RoundModel {
            target: &target,
            known: &target,
            target_wire_us: 0.0,
            router_us: 0.0,
            target_rows_max: 512.0,
            drafting: Drafting::Apart { draft: &draft, workers: 1.0, wire_us: 0.0 },
            acceptance: &[0.8],
            context: 0.0,
            prompt_us_per_token: 0.0,
        };
        simulate(&Pools::new(rounds, 16.0, 12.0), traffic, (targets, drafts), &AUTOSCALER)
    }

    #[test]
    fn the_day_has_its_rates() {
        let burst = Traffic { burst: (7 * 3600, 60, 3.0), ..TRAFFIC };
        assert!((burst.rate_at(4 * 3600) - 2.0).abs() < 1e-9);
        assert!((burst.rate_at(16 * 3600) - 40.0).abs() < 1e-9);
        let (before, within) = (burst.rate_at(7 * 3600 - 1), burst.rate_at(7 * 3600));
        assert!((within / before - 3.0).abs() < 0.01);
    }

    #[test]
    fn pools_that_follow_serve_as_well_as_fixed_ones_and_run_for_less_time() {
        let following = day(FREE, FREE, &TRAFFIC);
        let fixed =
            day(Scaling::Fixed(following.peak_workers.1), Scaling::Fixed(following.peak_workers.0), &TRAFFIC);
        assert_eq!(fixed.target_hours, 24.0 * f64::from(following.peak_workers.0));
        assert!(following.target_hours < 0.8 * fixed.target_hours, "{following:?} {fixed:?}");
        assert!(following.waited_share < 0.02 && fixed.waited_share < 0.02, "{following:?} {fixed:?}");
        assert!((following.requests - 21.0 * f64::from(DAY)).abs() < 1.0, "{following:?}");
    }

    #[test]
    fn a_day_without_requests_keeps_the_least() {
        let silence = Traffic { rate: (0.0, 0.0), ..TRAFFIC };
        let least = Scaling::Autoscaled { min: 2, max: 9 };
        let idle = day(Scaling::Autoscaled { min: 0, max: 9 }, least, &silence);
        assert_eq!(
            (idle.target_hours, idle.draft_hours, idle.hours_without_drafts.round()),
            (48.0, 0.0, 24.0)
        );
    }

    #[test]
    fn a_worker_serves_once_it_has_started_and_stays_while_it_was_wanted_lately() {
        let mut pool = Pool::new(Scaling::Autoscaled { min: 0, max: 4 });
        pool.scale(0, 2.4, &AUTOSCALER);
        pool.tick(119);
        assert_eq!((pool.ready, pool.num_paid()), (0, 3));
        pool.tick(120);
        pool.scale(300, 0.0, &AUTOSCALER);
        assert_eq!(pool.ready, 3, "wanted 300 s ago");
        pool.scale(315, 0.0, &AUTOSCALER);
        assert_eq!(pool.ready, 0);
        pool.scale(330, 9.0, &AUTOSCALER);
        assert_eq!(pool.num_paid(), 4, "no more than the most");
    }
}
