//! One point of the map, explained: what every fixed k reaches, and what the lane's own choice believed of it.

use std::time::Duration;

use speculation::Role;
use speculation::profile::Profile;
use speculation::simulation::{Policy, Setup, Sharing, Traffic, run};

use crate::{MAX_K, one_kind, say};

/// Prints the point of so many sequences at an acceptance.
pub(crate) fn draw(profile: &Profile, (sequences, acceptance): (u32, f64)) {
    let profile = profile.with_acceptance(acceptance);
    let setup = |policy| Setup {
        profile: &profile,
        traffic: Traffic::Closed { sequences, kinds: one_kind(crate::map::CONTEXT) },
        policy,
        sharing: Sharing::ByCost,
        seed: 1,
        duration: crate::map::duration(&profile, sequences),
        warm_up: Duration::ZERO,
    };
    say(&format!("\n{sequences} sequences at acceptance {acceptance}, one seed"));
    for k in 0..=MAX_K {
        let outcome = run(&setup(Policy::Fixed(k)));
        let rows = outcome.kinds[0].rounds * u64::from(k + 1) / outcome.target_forwards.max(1);
        say(&format!(
            "fixed {k:>2}: {:>8.0} tokens/s, target busy {:.2}, {rows} rows a forward",
            outcome.tokens_per_second(),
            outcome.busy(Role::Target)
        ));
    }
    let outcome = run(&setup(Policy::Lanes { max_k: MAX_K }));
    let (lane, chosen) = (&outcome.lanes[0], &outcome.lanes[0].explanation);
    say(&format!(
        "own choice: {:.0} tokens/s, mean k {:.2}, {} lane rounds, at the end k = {}",
        outcome.tokens_per_second(),
        lane.mean_k,
        chosen.lane_rounds,
        chosen.k
    ));
    for at in &chosen.outlook {
        say(&format!(
            "  k {:>2}: {:.3} tokens, priced {:>7.0} + {:>7.0} us, believed {:>7.0} + {:>7.0} us: {:>7.0} tokens/s",
            at.k,
            at.expected_tokens,
            at.table_draft_us,
            at.table_verify_us,
            at.draft_wait_us,
            at.verify_us,
            at.tokens_per_second
        ));
    }
    for change in &chosen.changes {
        say(&format!(
            "  lane round {}: {} -> {} on the way to {}, believed gain {:.3}",
            change.lane_round, change.from, change.to, change.best, change.gain
        ));
    }
}
