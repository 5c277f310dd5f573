//! Explains one point of the map: for every k, the speed with that k fixed, the lane's price and its
//! prediction; and for the lane's own choice, the result and every move.

use std::time::Duration;

use scheduling::profile::Profile;
use simulator::{Experiment, Policy, RunOutcome, Setup, Traffic, run_with};
use speculation::Role;

use crate::{MAX_K, SEEDS, one_kind, print_line};

/// Prints the point with this number of sequences and this acceptance.
pub(crate) fn print(profile: &Profile, experiment: &Experiment, (sequences, acceptance): (u32, f64)) {
    let profile = profile.with_acceptance(acceptance);
    let play = |policy, seed| {
        let setup = Setup {
            profile: &profile,
            traffic: Traffic::Closed { sequences, kinds: one_kind(crate::map::CONTEXT) },
            policy,
            seed,
            duration: crate::map::duration(&profile, sequences),
            warm_up: Duration::ZERO,
        };
        run_with(&setup, experiment)
    };
    let all = |policy| (1..=SEEDS).map(|seed| play(policy, seed)).collect::<Vec<_>>();
    let own = all(Policy::Lanes { max_k: MAX_K });
    let fixed: Vec<Vec<RunOutcome>> = (0..=MAX_K).map(|k| all(Policy::Fixed(k))).collect();
    let speed =
        |runs: &[RunOutcome]| runs.iter().map(RunOutcome::tokens_per_second).sum::<f64>() / runs.len() as f64;
    let best = fixed.iter().map(|runs| speed(runs)).fold(0.0, f64::max);
    print_line(&format!("\n{sequences} sequences at acceptance {acceptance}, {SEEDS} seeds"));
    let last = &own[SEEDS as usize - 1].lanes[0].explanation;
    for (at, runs) in last.outlook.iter().zip(&fixed) {
        let (reached, priced) = (speed(runs), at.table_draft_us + at.table_verify_us);
        let forwards: u64 = runs.iter().map(|run| run.target_forwards).sum();
        let rounds: u64 = runs.iter().map(|run| run.kinds[0].rounds).sum();
        print_line(&format!(
            "  k {:>2}: fixed {reached:>7.0} tokens/s ({:.3} of the best), {:>5.1} sequences per forward, target busy {:.2}; \
             priced {:>7.0} + {:>7.0} us: {:.3} of that, predicted {:>7.0} tokens/s: {:.3}",
            at.k,
            reached / best,
            rounds as f64 / forwards.max(1) as f64,
            runs[0].busy(Role::Target),
            at.table_draft_us,
            at.table_verify_us,
            f64::from(sequences) * at.expected_tokens * 1e6 / priced / reached,
            at.tokens_per_second,
            at.tokens_per_second / reached,
        ));
    }
    (1..).zip(&own).for_each(|(seed, run)| print_own_choice(run, seed, best));
}

/// Prints the result of the lane's own choice in one run.
fn print_own_choice(run: &RunOutcome, seed: u64, best: f64) {
    let (lane, chosen) = (&run.lanes[0], &run.lanes[0].explanation);
    print_line(&format!(
        "own choice, seed {seed}: {:.3} of the best, mean k {:.2}, {} lane rounds, at the end k = {}",
        run.tokens_per_second() / best,
        lane.mean_k,
        chosen.lane_rounds,
        chosen.k
    ));
    let rounds: u64 = run.kinds[0].rounds;
    let rates: Vec<String> = chosen.acceptance.iter().map(|rate| format!("{rate:.2}")).collect();
    print_line(&format!(
        "  {:.1} sequences per forward, {} probes, estimated acceptance {} from {:.0} judged",
        rounds as f64 / run.target_forwards.max(1) as f64,
        chosen.probes,
        rates.join(" "),
        chosen.judged,
    ));
    let outlook: Vec<String> = chosen
        .outlook
        .iter()
        .map(|at| {
            let (priced, believed) =
                (at.table_draft_us + at.table_verify_us, at.draft_wait_us + at.verify_us);
            format!("{}: {:.0} us x {:.2}, {:.0}/s", at.k, priced, believed / priced, at.tokens_per_second)
        })
        .collect();
    print_line(&format!("  predictions at the end: {}", outlook.join(", ")));
    let moves: Vec<String> = chosen
        .changes
        .iter()
        .map(|change| format!("{}: {}->{} {:+.3}", change.lane_round, change.from, change.to, change.gain))
        .collect();
    print_line(&format!("  {}", moves.join(", ")));
}
