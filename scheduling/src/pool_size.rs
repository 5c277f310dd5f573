//! Number of workers per pool that the load requires. One rule for the ratio that `outrider plan` prints, the
//! gauges that autoscalers read, and the simulated day of `outrider plan --day`.
//!
//! Callers pass the speed of a target as a function: the planner computes it from data sheets, the scheduler
//! from measurements of its workers. Pure and stateless: the autoscaler decides how fast pools follow.

/// Share of the speed with unlimited draft workers at which their number is sufficient.
const ENOUGH_SPEED: f64 = 0.95;

/// Share of the targets' KV that may be reserved before more targets are wanted.
const MAX_KV_SHARE: f64 = 0.8;

/// Share of the TPOT objective that targets are sized for. The rest covers drafts that are only
/// [`ENOUGH_SPEED`], and load that grows while a worker starts.
const TPOT_SHARE: f64 = 0.85;

/// Demand on the pools.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// Active sequences and sequences that wait for a target.
    pub sequences: f64,
    /// KV blocks that all of them need.
    pub kv_blocks: f64,
}

/// Present pools and the objective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurrentPools {
    /// Targets that share the sequences now.
    pub targets: f64,
    /// Draft workers now.
    pub drafts: f64,
    /// KV blocks of one target; 0 if not counted.
    pub kv_blocks_each: f64,
    /// Wanted maximum time per output token, microseconds; without it, the number of targets follows KV
    /// alone.
    pub tpot_us: Option<f64>,
}

/// Number of workers wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DesiredWorkers {
    /// Target workers, as a fraction: the sum over several routers is rounded up.
    pub targets: f64,
    /// Draft workers.
    pub drafts: f64,
}

/// Computes the wanted number of workers. `speed(sequences, drafts)` is the tokens per second that one target
/// commits at the best k for that number of sequences and draft workers (a fraction if several targets share
/// one; 0: none).
pub fn desired_workers(
    demand: Demand,
    supply: CurrentPools,
    speed: &dyn Fn(f64, f64) -> f64,
) -> DesiredWorkers {
    if demand.sequences <= 0.0 {
        return DesiredWorkers { targets: 0.0, drafts: 0.0 };
    }
    let by_kv = match supply.kv_blocks_each {
        blocks if blocks > 0.0 => demand.kv_blocks / (MAX_KV_SHARE * blocks),
        _ => 0.0,
    };
    let by_speed = supply.tpot_us.and_then(|tpot_us| {
        let meets_objective =
            |sequences: f64| sequences * 1e6 <= TPOT_SHARE * tpot_us * speed(sequences, sequences);
        let most = max_sequences(demand.sequences, meets_objective)?;
        // With fewer targets each is slower and holds sequences longer, so their number grows. The current
        // throughput therefore counts too, or a pool would shrink as soon as it has grown.
        let sharing = supply.targets.max(1.0);
        let served = sharing * speed((demand.sequences / sharing).max(1.0), supply.drafts / sharing);
        Some((demand.sequences / most).max(served / speed(most, most)))
    });
    // One sequence or more needs at least one target.
    let targets = by_kv.max(by_speed.unwrap_or(0.0)).max(1.0_f64.min(demand.sequences));
    // Size drafts for the targets that are about to start: the sequences that accumulate before would make
    // drafts look useless.
    let sharing = supply.targets.max(targets.ceil()).max(1.0);
    let each = (demand.sequences / sharing).max(1.0);
    let drafts = desired_drafts(demand.sequences.ceil() as u64, |drafts| speed(each, drafts / sharing));
    DesiredWorkers { targets, drafts: drafts.unwrap_or(0) as f64 }
}

/// Smallest number of draft workers, at most `most`, that gives [`ENOUGH_SPEED`] of the speed of
/// `most`; `None` if zero gives that too, because drafting does not pay then. Assumes that more drafts are
/// never slower.
pub fn desired_drafts(most: u64, speed: impl Fn(f64) -> f64) -> Option<u64> {
    let enough = ENOUGH_SPEED * speed(most as f64);
    let is_enough = |drafts: u64| speed(drafts as f64) >= enough;
    if most == 0 || is_enough(0) {
        return None;
    }
    let mut high = 1;
    while high < most && !is_enough(high) {
        high = (2 * high).min(most);
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if is_enough(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

/// Largest number of sequences at one target, at most `all`, for which `meets_objective` holds; `None` if it
/// does not hold for one, since more targets would not help.
fn max_sequences(all: f64, meets_objective: impl Fn(f64) -> bool) -> Option<f64> {
    if !meets_objective(1.0) {
        return None;
    }
    let (mut low, mut high) = (1, all.ceil() as u64 + 1);
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if meets_objective(middle as f64) { low = middle } else { high = middle }
    }
    Some(low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Speed of a target whose step takes 10 ms and 0.1 ms per sequence. A draft yields three tokens per
    /// step, and takes 2 ms and 0.5 ms per sequence of a draft worker. Without drafts a step yields one
    /// token.
    fn speed(sequences: f64, drafts: f64) -> f64 {
        let step_us = 10_000.0 + 100.0 * sequences;
        let plain = sequences * 1e6 / step_us;
        if drafts == 0.0 {
            return plain;
        }
        let drafting = 3.0 * sequences * 1e6 / (step_us + 2_000.0 + 500.0 * sequences / drafts);
        plain.max(drafting)
    }

    fn demand(sequences: f64, kv_blocks: f64) -> Demand {
        Demand { sequences, kv_blocks }
    }

    const SUPPLY: CurrentPools =
        CurrentPools { targets: 1.0, drafts: 0.0, kv_blocks_each: 1_000.0, tpot_us: None };

    #[test]
    fn nobody_asks_and_nothing_is_wanted() {
        let none = DesiredWorkers { targets: 0.0, drafts: 0.0 };
        assert_eq!(desired_workers(demand(0.0, 0.0), SUPPLY, &speed), none);
    }

    #[test]
    fn targets_follow_the_kv_that_is_needed() {
        for (blocks, expected) in [(10.0, 1.0), (800.0, 1.0), (1_600.0, 2.0), (2_000.0, 2.5)] {
            assert_eq!(
                desired_workers(demand(20.0, blocks), SUPPLY, &speed).targets,
                expected,
                "{blocks} blocks"
            );
        }
        let uncounted = CurrentPools { kv_blocks_each: 0.0, ..SUPPLY };
        assert_eq!(desired_workers(demand(20.0, 1e9), uncounted, &speed).targets, 1.0);
    }

    #[test]
    fn targets_follow_the_time_per_token_that_is_wanted() {
        // With a draft worker for each: (12,500 + 100 n) / 3 us per token, so 130 sequences meet 8.5 of 10
        // ms.
        let with = |tpot_us| CurrentPools { tpot_us: Some(tpot_us), ..SUPPLY };
        assert_eq!(desired_workers(demand(130.0, 0.0), with(10_000.0), &speed).targets, 1.0);
        assert_eq!(desired_workers(demand(520.0, 0.0), with(10_000.0), &speed).targets, 4.0);
        // 400 sequences at four targets with drafts are as much work as 520 at fewer targets: 4 targets stay,
        // though 400 sequences alone would want 3.1.
        let four = CurrentPools { targets: 4.0, drafts: 400.0, ..with(10_000.0) };
        let stays = desired_workers(demand(400.0, 0.0), four, &speed).targets;
        assert!(
            (stays - 4.0 * speed(100.0, 100.0) / speed(130.0, 130.0)).abs() < 1e-9 && stays > 3.4,
            "{stays}"
        );
        // The stricter limit decides.
        assert_eq!(desired_workers(demand(520.0, 4_000.0), with(10_000.0), &speed).targets, 5.0);
        // No number of targets decodes faster than one sequence alone, so KV decides.
        assert_eq!(desired_workers(demand(100.0, 1_600.0), with(1_000.0), &speed).targets, 2.0);
    }

    #[test]
    fn drafts_are_enough_where_more_add_little_and_none_where_they_do_not_pay() {
        // One sequence needs one draft worker. 100 at one target: steps of 20 ms beside 50 ms / drafts.
        assert_eq!(desired_workers(demand(1.0, 0.0), SUPPLY, &speed).drafts, 1.0);
        let drafts = desired_workers(demand(100.0, 0.0), SUPPLY, &speed).drafts;
        let reaches = |drafts: f64| speed(100.0, drafts) >= ENOUGH_SPEED * speed(100.0, 100.0);
        assert!(reaches(drafts) && !reaches(drafts - 1.0), "{drafts}");
        // Four targets share the same sequences, so each draft worker is shared by four targets as well.
        let shared =
            desired_workers(demand(100.0, 0.0), CurrentPools { targets: 4.0, ..SUPPLY }, &speed).drafts;
        assert!(shared > drafts && shared <= 100.0, "{shared} of 4 targets, {drafts} of one");
        let useless = |sequences: f64, _: f64| sequences;
        assert_eq!(desired_workers(demand(100.0, 0.0), SUPPLY, &useless).drafts, 0.0);
    }

    #[test]
    fn the_fewest_are_found_whatever_their_number() {
        for fewest in 1..=40_u32 {
            let speed = |drafts: f64| if drafts >= f64::from(fewest) { 1.0 } else { 0.5 };
            assert_eq!(desired_drafts(40, speed), Some(fewest.into()));
        }
        assert_eq!(desired_drafts(0, |_| 1.0), None);
    }
}
