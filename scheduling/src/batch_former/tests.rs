//! Unit tests of single rules, and the scenarios of `testdata/batch_former`.

use super::*;
use crate::testdata::{Line, run_folder};

const MS: Duration = Duration::from_millis(1);

fn flat() -> BatchFormer<char> {
    BatchFormer::new(StepTimes::of_rows(&[(1, 10_000), (64, 10_000)]), GroupRules::default())
}

/// Running a forward without a limit on prompt rows.
fn run(members: &[bool]) -> Decision {
    Decision::Run(Batch { members: members.to_vec(), prompt_rows: u32::MAX })
}

fn step(key: char, rows: (u32, u32)) -> ReadyStep<char> {
    let rows = StepRows { context: rows.0, tail: rows.1 };
    ReadyStep { key, lane: 0, rows, context_len: 100, is_verify: true }
}

/// Each of `keys` takes 5 ms to return after an answer, and was answered last at 10 ms.
fn away(former: &mut BatchFormer<char>, keys: &str) {
    let rows = StepRows { context: 1, tail: 0 };
    for key in keys.chars() {
        former.arrived(Duration::ZERO, key, rows);
        former.answered(MS, &key);
        former.arrived(6 * MS, key, rows);
        former.answered(10 * MS, &key);
    }
}

#[test]
fn the_delay_is_counted_from_the_first_wait_and_ends_with_a_forward() {
    let mut former = flat();
    away(&mut former, "ab");
    let ready = [step('a', (1, 0))];
    former.arrived(11 * MS, 'a', ready[0].rows);
    assert_eq!(former.decide(11 * MS, &ready), Decision::Wait(4 * MS));
    assert_eq!(former.decide(12 * MS, &ready), Decision::Wait(3 * MS));
    assert_eq!(former.decide(22 * MS, &ready), run(&[true]), "b did not return");
    assert_eq!(former.delayed_since, Some(11 * MS));
    former.forward_done(CompletedForward { rows: 1, sequences: 1, ..CompletedForward::default() }, 10 * MS);
    assert_eq!(former.delayed_since, None);
}

#[test]
fn a_delay_is_never_shorter_than_a_thread_needs_to_wake_up() {
    let mut former = flat();
    away(&mut former, "ab");
    let at = 15 * MS - Duration::from_micros(1);
    assert_eq!(former.decide(at, &[step('a', (1, 0))]), Decision::Wait(MIN_DELAY));
}

#[test]
fn a_tree_runs_more_rows_per_forward_where_they_are_free() {
    let rows = |points: &[(u32, u64)], num_sequences| {
        let former: BatchFormer<char> = BatchFormer::new(StepTimes::of_rows(points), GroupRules::default());
        former.tree_rows(num_sequences, 100)
    };
    let (free, dear) = (&[(1, 4_000), (64, 4_000), (512, 32_000)][..], &[(1, 4_000), (8, 5_600)][..]);
    assert_eq!([1, 8, 16, 64].map(|num_sequences| rows(free, num_sequences)), [8, 8, 4, 2]);
    assert_eq!((rows(dear, 1), rows(&[], 1)), (2, 2));
}

#[test]
fn drafts_wait_for_decode_steps_unless_they_are_away_for_long() {
    let decide = |drafted_at| {
        let times = [(1, 16_000), (6, 16_000), (7, 30_000), (64, 30_000)];
        let mut former = BatchFormer::new(StepTimes::of_rows(&times), GroupRules::default());
        away(&mut former, "abcdef");
        let drafts = ['g', 'h'].map(|key| step(key, (1, 2)));
        for draft in drafts {
            former.arrived(Duration::ZERO, draft.key, draft.rows);
            former.answered(MS, &draft.key);
            former.arrived(drafted_at, draft.key, draft.rows);
        }
        former.decide(14 * MS, &drafts)
    };
    assert_eq!(decide(3 * MS), Decision::Wait(MS));
    assert_eq!(decide(14 * MS), run(&[true, true]));
}

#[test]
fn a_forgotten_sequence_is_not_waited_for() {
    let mut former = flat();
    away(&mut former, "ab");
    former.forget(&'b');
    assert_eq!(former.decide(14 * MS, &[step('c', (1, 0))]), Decision::Wait(MS), "a is away");
    former.forget(&'a');
    assert_eq!(former.decide(14 * MS, &[step('c', (1, 0))]), run(&[true]));
}

#[test]
fn without_profiled_times_nothing_is_delayed() {
    let mut former = BatchFormer::new(StepTimes::new(&[]), GroupRules::default());
    away(&mut former, "ab");
    assert_eq!(former.decide(14 * MS, &[step('a', (1, 0))]), run(&[true]));
    assert_eq!(former.decide(14 * MS, &[]), run(&[]));
}

#[test]
fn forwards_with_prompts_teach_nothing() {
    let mut former = flat();
    let before = former.cost.step_us(8.0, 0.0);
    let forward = CompletedForward { rows: 8, prefill_rows: 8, sequences: 1, kv_tokens: 8 };
    former.forward_done(forward, 50 * MS);
    assert_eq!(former.cost.step_us(8.0, 0.0), before);
    former.forward_done(CompletedForward { prefill_rows: 0, ..forward }, 50 * MS);
    assert!(former.cost.step_us(8.0, 0.0) > before);
}

#[test]
fn the_mean_context_divides_by_sequences_and_not_by_answers() {
    let forward = ForwardShape::measured(12, 3, 600);
    assert_eq!((forward.rows, forward.sequences, forward.context), (12.0, 3.0, 200.0));
    assert_eq!(
        mean_context(&[step('a', (1, 0)), ReadyStep { context_len: 300, ..step('b', (1, 0)) }]),
        200.0
    );
}

#[test]
fn scenarios() {
    run_folder("batch_former", flat, |former, line| run_line(former, line).unwrap_or_default());
}

/// One line of a scenario:
///
/// - `worker times=(1:10000,64:10000)`: a new batch former; rows and microseconds of its step times
/// - `arrived a b at=1ms rows=1+3`: steps with one context id and three drafted ids
/// - `answered a b at=1ms`, `forget a b`
/// - `ran rows=8 sequences=2 kv=200 took=10ms`
/// - `next at=1ms ready=(a:1+3, b@2:1+0)`: prints the decision; `@` is the lane
///
/// With the word `draft` the ready steps belong to a draft worker.
fn run_line(former: &mut BatchFormer<char>, line: &Line) -> Option<String> {
    let at = line.duration("at").unwrap_or_default();
    let keys = || line.words.iter().filter_map(|word| word.chars().next());
    match line.verb.as_str() {
        "worker" => {
            let points: Vec<String> = line.list("times");
            let points: Vec<(u32, u64)> = points.iter().map(|point| pair(point, ':')).collect();
            *former = BatchFormer::new(StepTimes::of_rows(&points), GroupRules::default());
        }
        "arrived" => keys().for_each(|key| former.arrived(at, key, rows(&line.need::<String>("rows")))),
        "answered" => keys().for_each(|key| former.answered(at, &key)),
        "forget" => keys().for_each(|key| former.forget(&key)),
        "ran" => {
            let forward = CompletedForward {
                rows: line.need("rows"),
                prefill_rows: line.get("prefill").unwrap_or_default(),
                sequences: line.need("sequences"),
                kv_tokens: line.get("kv").unwrap_or_default(),
            };
            former.forward_done(forward, line.duration("took")?);
        }
        "next" => {
            let is_verify = !line.has("draft");
            let entries: Vec<String> = line.list("ready");
            let ready: Vec<ReadyStep<char>> =
                entries.iter().map(|entry| ReadyStep { is_verify, ..ready_step(entry) }).collect();
            return Some(match former.decide(at, &ready) {
                Decision::Wait(delay) => format!("wait {:.2}ms", delay.as_secs_f64() * 1e3),
                Decision::Run(Batch { members, prompt_rows }) => {
                    let ran = ready.iter().zip(members).filter(|(_, is_member)| *is_member);
                    let text = ran.fold("run".to_owned(), |text, (step, _)| format!("{text} {}", step.key));
                    match prompt_rows {
                        u32::MAX => text,
                        rows => format!("{text}, {rows} prompt rows"),
                    }
                }
            });
        }
        _ => line.unknown(),
    }
    None
}

/// `a@2:1+3`: sequence, lane, rows; the lane is optional.
fn ready_step(entry: &str) -> ReadyStep<char> {
    let (name, rows_text) = entry.split_once(':').expect("each entry of ready has rows");
    let (key, lane) = name.split_once('@').unwrap_or((name, "0"));
    ReadyStep {
        key: key.chars().next().expect("each entry of ready has a name"),
        lane: lane.parse().unwrap(),
        rows: rows(rows_text),
        context_len: 100,
        is_verify: true,
    }
}

fn rows(text: &str) -> StepRows {
    let (context, tail) = pair(text, '+');
    StepRows { context, tail }
}

fn pair<A: std::str::FromStr, B: std::str::FromStr>(text: &str, separator: char) -> (A, B) {
    let parts = text.split_once(separator).and_then(|(a, b)| a.parse().ok().zip(b.parse().ok()));
    parts.unwrap_or_else(|| panic!("{text} must be two numbers separated by {separator}"))
}
