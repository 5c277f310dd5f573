//! Tests of decisions from evidence, and of the sequences that a candidate serves.

use super::*;
use crate::draft_score::{Pair, PairSums};

fn settings(share: f64) -> RolloutSettings {
    let rules = RolloutRules { min_drafts: 300, min_sequences: 20, ..RolloutRules::default() };
    RolloutSettings { draft: "new".to_owned(), share, decides: true, rules }
}

/// Scores `sequences` of 20 pairs each. The serving draft has 2 accepted tokens per draft; `gains` are the
/// shadow's additional tokens, in a cycle.
fn pairs(sequences: u64, gains: &[i64]) -> PairedScore {
    let mut score = PairedScore::default();
    for i in 0..sequences {
        let gain = gains[i as usize % gains.len()];
        let mut sums = PairSums::default();
        (0..20).for_each(|_| sums.add(Pair { shadow: (2 + gain) as u32, serving: 2 }));
        score.add(&sums);
    }
    score
}

#[test]
fn a_better_draft_is_promoted_and_a_worse_one_taken_back() {
    for (sequences, gains, slowdown, verdict, ends) in [
        (40, &[1, 0, 1][..], None, RolloutVerdict::Better, Some(RolloutStage::Promoted)),
        (40, &[1, 0, 1][..], Some(1.2), RolloutVerdict::Better, Some(RolloutStage::Promoted)),
        (40, &[1, 0, 1][..], Some(1.3), RolloutVerdict::BetterAndSlower, None),
        (40, &[-1, 0, -1][..], None, RolloutVerdict::Worse, Some(RolloutStage::RolledBack)),
        (40, &[1, -1][..], None, RolloutVerdict::Undecided, None),
        (40, &[0][..], None, RolloutVerdict::Undecided, None),
        (19, &[1, 0, 1][..], None, RolloutVerdict::Undecided, None),
    ] {
        let mut rollout = Rollout::new(settings(0.5));
        let label = format!("{sequences} sequences that gain {gains:?}, slowdown {slowdown:?}");
        assert_eq!(rollout.evaluate(&pairs(sequences, gains), slowdown), ends, "{label}");
        let report = rollout.report(PairedReport::default(), slowdown);
        assert_eq!(
            (report.verdict, report.stage),
            (verdict, ends.unwrap_or(RolloutStage::Canary)),
            "{label}"
        );
        assert_eq!(
            report.paired.drafts > 0,
            ends.is_some(),
            "the report keeps the pairs that ended the rollout"
        );
    }
}

#[test]
fn a_gain_below_the_margin_promotes_nothing() {
    // One more token in every forty drafts: a certain gain of 1.25% of 2.
    let mut score = PairedScore::default();
    for _ in 0..100 {
        let mut sums = PairSums { pairs: 40, shadow: 81, serving: 80 };
        sums.add(Pair { shadow: 2, serving: 2 });
        score.add(&sums);
    }
    assert_eq!(Rollout::new(settings(0.5)).evaluate(&score, None), None);
    let mut lenient = settings(0.5);
    lenient.rules.margin = 0.01;
    assert_eq!(Rollout::new(lenient).evaluate(&score, None), Some(RolloutStage::Promoted));
}

#[test]
fn without_a_share_or_by_an_operators_word_evidence_only_speaks() {
    for settings in [settings(0.0), RolloutSettings { decides: false, ..settings(0.5) }] {
        let mut rollout = Rollout::new(settings);
        assert_eq!(rollout.evaluate(&pairs(40, &[1]), None), None);
        assert_eq!((rollout.verdict, rollout.stage()), (RolloutVerdict::Better, RolloutStage::Canary));
    }
}

#[test]
fn evidence_is_looked_at_when_it_has_doubled() {
    let mut rollout = Rollout::new(settings(0.5));
    assert_eq!(rollout.evaluate(&pairs(22, &[1, -1]), None), None);
    assert_eq!(rollout.evaluate(&pairs(43, &[1]), None), None, "860 drafts are fewer than twice 440");
    assert_eq!(rollout.evaluate(&pairs(44, &[1]), None), Some(RolloutStage::Promoted));
    assert_eq!(rollout.evaluate(&pairs(400, &[-1]), None), None, "the rollout has ended");
}

#[test]
fn a_candidate_that_serves_badly_is_taken_back_whatever_shadows_say() {
    let serve = |draft: &str, rollout: &mut Rollout, accepted: u64| {
        (0..40_u64).for_each(|i| rollout.on_served(draft, 20, accepted + i % 2));
    };
    let mut rollout = Rollout::new(settings(0.5));
    serve("old", &mut rollout, 12);
    assert_eq!(rollout.evaluate(&PairedScore::default(), None), None);
    serve("new", &mut rollout, 8);
    assert_eq!(rollout.evaluate(&pairs(40, &[1]), None), Some(RolloutStage::RolledBack));
    let report = rollout.report(PairedReport::default(), None);
    assert_eq!((report.candidate_acceptance, report.other_acceptance), (Some(0.425), Some(0.625)));
    let mut rollout = Rollout::new(settings(0.5));
    serve("old", &mut rollout, 12);
    serve("new", &mut rollout, 12);
    assert_eq!(rollout.evaluate(&PairedScore::default(), None), None);
}

#[test]
fn each_stage_says_who_serves_whom() {
    let (in_share, outside) =
        (0..1_000).map(SequenceId).partition::<Vec<_>, _>(|id| is_sampled(*id, 0.3, "canary"));
    assert!((250..350).contains(&in_share.len()), "{} of 1000", in_share.len());
    assert!(
        (0..1_000).map(SequenceId).all(|id| is_sampled(id, 1.0, "canary") && !is_sampled(id, 0.0, "canary"))
    );
    let larger = |id: &SequenceId| is_sampled(*id, 0.4, "canary");
    assert!(in_share.iter().all(larger), "a larger share contains the smaller one");
    let others = in_share.iter().filter(|id| is_sampled(**id, 0.3, "shadow")).count();
    assert!((40..150).contains(&others), "{others} of {}: purposes are independent", in_share.len());

    use Preference::{Fallback, Primary};
    let rollout = |stage| {
        let mut rollout = Rollout::new(settings(0.3));
        rollout.end(stage);
        rollout
    };
    // The worker; then its preferences without a rollout, in a canary inside and outside of the share,
    // promoted, rolled back.
    for (worker, expected) in [
        (("old", false), [Some(Primary), Some(Fallback), Some(Primary), Some(Fallback), Some(Primary)]),
        (("new", false), [Some(Primary), Some(Primary), None, Some(Primary), None]),
        (("new", true), [None, Some(Primary), None, Some(Primary), None]),
        (("other", true), [None; 5]),
    ] {
        let [canary, promoted, back] =
            [RolloutStage::Canary, RolloutStage::Promoted, RolloutStage::RolledBack].map(rollout);
        let preferences = [
            preference(None, worker, outside[0]),
            preference(Some(&canary), worker, in_share[0]),
            preference(Some(&canary), worker, outside[0]),
            preference(Some(&promoted), worker, outside[0]),
            preference(Some(&back), worker, in_share[0]),
        ];
        assert_eq!(preferences, expected, "{worker:?}");
        let scored = [None, Some(&canary), Some(&promoted), Some(&back)];
        let scored = scored.map(|rollout| is_scored(rollout, worker.0, worker.1));
        let (is_new, is_shadow) = (worker.0 == "new", worker.1);
        let expected = [is_shadow, is_new || is_shadow, !is_new && is_shadow, is_new || is_shadow];
        assert_eq!(scored, expected, "{worker:?}");
    }
}

#[test]
fn settings_say_what_is_wrong() {
    let fine = settings(0.3);
    assert_eq!(fine.fault(), None);
    let of = |margin, max_slowdown| {
        let rules = RolloutRules { margin, max_slowdown, ..fine.rules };
        RolloutSettings { rules, ..fine.clone() }.fault()
    };
    for (fault, expected) in [
        (
            RolloutSettings { draft: String::new(), ..fine.clone() }.fault(),
            "draft must be the model id of the candidate",
        ),
        (settings(1.5).fault(), "share must be between 0 and 1, not 1.5"),
        (settings(f64::NAN).fault(), "share must be between 0 and 1, not NaN"),
        (of(-1.0, 1.0), "margin must be between 0 and 10, not -1"),
        (of(0.0, 0.0), "max_slowdown must be above 0, not 0"),
    ] {
        assert_eq!(fault.as_deref(), Some(expected));
    }
}
