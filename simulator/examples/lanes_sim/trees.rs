//! Token trees: compares a lane with trees, a lane without, and no speculation, by the number of sequences.

use scheduling::profile::Profile;
use simulator::{Experiment, Policy, Setup, Traffic, plain, run_with};

use crate::map::{CONTEXT, duration, rounds};
use crate::{MAX_K, SEEDS, one_kind, print_line};

/// Probability that the draft's best token is the target's: two kinds of text, and a trained pair at
/// temperature 1.
const KINDS: [(&str, f64); 3] = [("chat-like", 0.4), ("chat-like, trained pair", 0.556), ("code-like", 0.8)];

const SEQUENCES: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Prints tokens per second per user and per GPU.
pub(crate) fn print(profile: &Profile, experiment: &Experiment) {
    let gpus = f64::from(gpus_of(&profile.target.device) * profile.target.workers);
    print_line(&format!(
        "\nTokens/s per user: no drafts, chains, trees; trees / chains; tokens/s per target GPU ({gpus} GPUs): no drafts, chains, trees"
    ));
    for (kind, acceptance) in KINDS {
        let profile = profile.with_acceptance(acceptance);
        print_line(&format!("{kind}, {acceptance}"));
        for sequences in SEQUENCES {
            let mean = |of: &dyn Fn(u64) -> f64| (1..=SEEDS).map(of).sum::<f64>() / SEEDS as f64;
            let lanes = |supports_trees| {
                let experiment = Experiment { supports_trees, ..*experiment };
                let setup = |seed| Setup {
                    profile: &profile,
                    traffic: Traffic::Closed { sequences, kinds: one_kind(CONTEXT) },
                    policy: Policy::Lanes { max_k: MAX_K },
                    seed,
                    duration: duration(&profile, sequences),
                    warm_up: std::time::Duration::ZERO,
                };
                mean(&|seed| run_with(&setup(seed), &experiment).tokens_per_second())
            };
            let none = mean(&|seed| {
                plain::tokens_per_second(&profile, (sequences, CONTEXT), rounds(sequences), seed)
            });
            let (chains, trees) = (lanes(false), lanes(true));
            let each = |over: f64| [none, chains, trees].map(|all| format!("{:>7.1}", all / over)).concat();
            print_line(&format!(
                "{sequences:>4} sequences:{}  {:.2}  |{}",
                each(sequences.into()),
                trees / chains,
                each(gpus)
            ));
        }
    }
}

/// Number of GPUs of a worker, from the name of its device: `8 x H100 SXM`; one if the name has no number.
fn gpus_of(device: &str) -> u32 {
    device.split_once(" x ").and_then(|(count, _)| count.trim().parse().ok()).unwrap_or(1)
}
