//! Compares the simulator with results computed by hand, and with the plain server.

use super::*;
use scheduling::profile::{Acceptance, Profile};
use scheduling::scheduler::Command;

const PROFILE: &str = r#"
name = "flat"
vocab_size = 1024
max_model_len = 4096
wire_us = 500
[target]
device = "one"
max_batch_rows = 512
kv_blocks = 10000
kv_block_size = 16
[target.step]
micros_by_rows = [[1, 9000], [64, 9000], [128, 18000]]
prefill_tokens_per_second = 20000
[draft]
device = "one"
max_batch_rows = 512
kv_blocks = 10000
kv_block_size = 16
[draft.step]
micros_by_rows = [[1, 1000], [64, 1000], [128, 2000]]
prefill_tokens_per_second = 200000
[[acceptance]]
by_position = [0.8]
"#;

fn kind(task_type: &str, share: f64) -> RequestKind {
    RequestKind { task_type: task_type.to_owned(), share, prompt_tokens: 100, output_tokens: 64 }
}

fn closed(profile: &Profile, sequences: u32, policy: Policy) -> RunOutcome {
    closed_with(profile, (sequences, policy), &Experiment::default())
}

fn closed_with(profile: &Profile, (sequences, policy): (u32, Policy), experiment: &Experiment) -> RunOutcome {
    let setup = Setup {
        profile,
        traffic: Traffic::Closed {
            sequences,
            kinds: vec![RequestKind { output_tokens: ENDLESS, ..kind("", 1.0) }],
        },
        policy,
        seed: 1,
        duration: Duration::from_secs(20),
        warm_up: Duration::from_secs(2),
    };
    run_with(&setup, experiment)
}

#[test]
fn lanes_use_trees_where_rows_are_free_and_chains_where_they_are_not() {
    let pace = |rows: &str, sequences, supports_trees| {
        let text = PROFILE.replace("[0.8]", "[0.5]").replace("[[1, 9000], [64, 9000], [128, 18000]]", rows);
        let profile = Profile::parse(&text).unwrap();
        let experiment = Experiment { supports_trees, ..Experiment::default() };
        closed_with(&profile, (sequences, Policy::Lanes { max_k: 8 }), &experiment).tokens_per_second()
    };
    let (free, dear) = ("[[1, 9000], [64, 9000], [128, 18000]]", "[[1, 9000], [2, 18000], [128, 1152000]]");
    for sequences in [1, 4] {
        let gain = pace(free, sequences, true) / pace(free, sequences, false);
        assert!(gain > 1.1, "{sequences} sequences, rows cost nothing: {gain}");
    }
    for sequences in [1, 4] {
        let gain = pace(dear, sequences, true) / pace(dear, sequences, false);
        assert!((0.98..1.02).contains(&gain), "{sequences} sequences, each row costs a step: {gain}");
    }
}

#[test]
fn one_sequence_takes_the_time_of_its_steps() {
    let profile = Profile::parse(PROFILE).unwrap();
    // Plain: 9 ms and 1 ms of network time per token.
    let plain = closed(&profile, 1, Policy::Fixed(0)).tokens_per_second();
    assert!((plain - 100.0).abs() < 1.0, "{plain}");
    // k = 2: 1 + 0.8 + 0.64 tokens in 9 + 1 + 2 * 1 + 1 ms.
    let drafted = closed(&profile, 1, Policy::Fixed(2)).tokens_per_second();
    assert!((drafted / (2.44 / 0.013) - 1.0).abs() < 0.05, "{drafted}");
}

#[test]
fn plain_rounds_of_many_are_as_fast_as_a_loop_over_all_of_them() {
    let profile = Profile::parse(PROFILE).unwrap();
    for sequences in [1, 16, 100] {
        let simulated = closed(&profile, sequences, Policy::Fixed(0)).tokens_per_second();
        let plain = plain::tokens_per_second(&profile, (sequences, 100), 1_000, 1);
        assert!((simulated / plain - 1.0).abs() < 0.01, "{sequences}: {simulated} {plain}");
    }
}

#[test]
fn a_lane_finds_the_k_that_pays_and_equal_seeds_make_equal_runs() {
    let profile = Profile::parse(PROFILE).unwrap();
    let fixed = |k| closed(&profile, 8, Policy::Fixed(k)).tokens_per_second();
    let best = (0..=8).map(fixed).fold(0.0, f64::max);
    let lanes = closed(&profile, 8, Policy::Lanes { max_k: 8 }).tokens_per_second();
    assert!(lanes > 0.95 * best, "{lanes} of {best}");
    assert_eq!(lanes, closed(&profile, 8, Policy::Lanes { max_k: 8 }).tokens_per_second());
}

#[test]
fn requests_come_are_served_and_go() {
    let profile = Profile::parse(PROFILE).unwrap();
    let outcome = run(&Setup {
        profile: &profile,
        traffic: Traffic::Open {
            per_second: 5.0,
            kinds: vec![kind("easy", 0.6), kind("hard", 0.4)],
            sequences_max: 1_000,
        },
        policy: Policy::Lanes { max_k: 8 },
        seed: 1,
        duration: Duration::from_secs(60),
        warm_up: Duration::from_secs(10),
    });
    let finished: Vec<usize> = outcome.kinds.iter().map(|kind| kind.tpot_ms.len()).collect();
    let total = finished.iter().sum::<usize>();
    assert!((200..300).contains(&total) && outcome.num_rejected == 0, "{finished:?}");
    assert!((1.2..1.9).contains(&(finished[0] as f64 / finished[1] as f64)), "{finished:?}");
    assert!(outcome.sequences_at_end < 20, "{}", outcome.sequences_at_end);
    for kind in &outcome.kinds {
        let (ttft, tpot) = (&kind.ttft_ms, &kind.tpot_ms);
        // A prompt of 100 takes 5 ms beside 9 ms for other sequences, plus the network round trip.
        assert!(ttft.iter().all(|ms| (9.9..80.0).contains(ms)), "{ttft:?}");
        assert!(tpot.iter().all(|ms| (1.0..30.0).contains(ms)), "{tpot:?}");
        assert!(kind.worst_wait < Duration::from_millis(100), "{:?}", kind.worst_wait);
    }
}

/// Probes of lanes at k = 0 reach draft workers that lack up to 60 ids. Time to catch up is not time of the
/// draft length.
#[test]
fn lanes_that_were_rarely_fed_begin_to_draft() {
    let types: Vec<(String, f64)> =
        (0..11).map(|i| (format!("type {i}"), 0.54 + 0.032 * f64::from(i))).collect();
    let rates: Vec<(&str, f64)> = types.iter().map(|(name, rate)| (name.as_str(), *rate)).collect();
    let profile = Profile::parse(include_str!("../../deploy/profiles/cpu-pair.toml")).unwrap();
    let profile = Profile { acceptance: Acceptance::by_task(&rates), ..profile };
    let speed = |policy| {
        let kinds = types.iter().map(|(name, _)| kind(name, 1.0 / 11.0)).collect();
        let outcome = run(&Setup {
            profile: &profile,
            traffic: Traffic::Closed { sequences: 2, kinds },
            policy,
            seed: 1,
            duration: Duration::from_secs(60),
            warm_up: Duration::ZERO,
        });
        outcome.tokens_per_second()
    };
    let (lanes, plain) = (speed(Policy::Lanes { max_k: 8 }), speed(Policy::Fixed(0)));
    assert!(lanes > 1.08 * plain, "{lanes} of {plain}");
}

#[test]
fn a_quantile_of_nothing_is_no_number() {
    assert_eq!(outcome::percentile(&[3.0, 1.0, 2.0], 0.5), 2.0);
    assert!(outcome::percentile(&[], 0.99).is_nan());
}

#[test]
fn sequences_that_draft_alike_stay_together() {
    let profile = Profile { noise: 0.05, ..Profile::parse(PROFILE).unwrap() };
    for k in [0, 1, 3] {
        let outcome = closed(&profile, 16, Policy::Fixed(k));
        let each = outcome.kinds[0].rounds as f64 / outcome.target_forwards as f64;
        assert!(each > 15.0, "k = {k}: {each:.1} of 16 sequences in a forward");
    }
}

/// A second scheduler with the same events at the same times returns the same commands, so it depends on
/// nothing else.
#[test]
fn a_recorded_run_is_replayed_command_by_command() {
    let profile = Profile::parse(PROFILE).unwrap();
    let open = Traffic::Open {
        per_second: 5.0,
        kinds: vec![kind("easy", 0.6), kind("hard", 0.4)],
        sequences_max: 1_000,
    };
    for traffic in [open, Traffic::Closed { sequences: 24, kinds: vec![kind("", 1.0)] }] {
        let setup = Setup {
            profile: &profile,
            traffic,
            policy: Policy::Lanes { max_k: 8 },
            seed: 7,
            duration: Duration::from_secs(10),
            warm_up: Duration::ZERO,
        };
        let (outcome, recording) = run_recorded(&setup);
        assert_eq!(outcome.tokens_per_second(), run(&setup).tokens_per_second());
        let replayed = recording.replay();
        assert_eq!(replayed.len(), recording.entries.len());
        for (entry, commands) in recording.entries.iter().zip(&replayed) {
            assert_eq!(&entry.commands, commands, "{:?} at {:?}", entry.event, entry.at);
        }
        let sends = |command: &&Command| matches!(command, Command::Send(..));
        let sent = replayed.iter().flatten().filter(sends).count();
        assert!(sent > 1_000, "{sent} steps");
    }
}
