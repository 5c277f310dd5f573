//! Chooses the held-out prompts on which both drafts are compared, and names task types without one. Pure.

use std::collections::{BTreeMap, BTreeSet};

use engine::TokenId;

use super::args::DistillArgs;
use super::rows::{Row, Rows};
use crate::check_pair::error::CheckPairError;
use crate::check_pair::eval::{EvalPrompts, fits, left_out_text};
use crate::check_pair::measure::EvalPrompt;

/// The held-out prompts that are compared, for models with a window of `window` tokens.
pub(super) fn fitting_prompts(
    args: &DistillArgs,
    held_out: &[Row],
    window: u32,
) -> Result<EvalPrompts, CheckPairError> {
    let is_fitting = |prompt_ids: &[TokenId]| fits(prompt_ids.len(), args.max_tokens, window);
    let prompts = eval_prompts(held_out, args.num_prompts, is_fitting);
    EvalPrompts::new(prompts, rows_by_task(held_out), window)
}

/// Warnings about task types that are not compared: those of which no row is held out, and `left_out`.
pub(super) fn left_out_notes(rows: &Rows, left_out: &BTreeMap<String, usize>) -> Vec<String> {
    let held_out: BTreeSet<&str> = rows.held_out.iter().map(|row| row.task.as_str()).collect();
    let mut only_trained = rows_by_task(&rows.train);
    only_trained.retain(|task, _| !held_out.contains(task.as_str()));
    let counts: Vec<String> = only_trained.iter().map(|(task, count)| format!("{task} ({count})")).collect();
    let counts = counts.join(", ");
    let without_held_out = (!counts.is_empty())
        .then(|| format!("task types not compared, because none of their rows is held out (rows): {counts}"));
    let without_fitting = left_out_text(left_out).map(|text| format!("task types of the comparison {text}"));
    without_held_out.into_iter().chain(without_fitting).collect()
}

fn rows_by_task(rows: &[Row]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for row in rows {
        *counts.entry(row.task.clone()).or_default() += 1;
    }
    counts
}

/// Distinct held-out prompts for which `is_fitting` holds, up to `num_prompts` per task type.
fn eval_prompts(
    held_out: &[Row],
    num_prompts: usize,
    is_fitting: impl Fn(&[TokenId]) -> bool,
) -> Vec<EvalPrompt> {
    let mut asked: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in held_out.iter().filter(|row| is_fitting(&row.prompt_ids)) {
        let of_task = asked.entry(&row.task).or_default();
        let is_known = of_task.iter().any(|known| known.prompt_ids == row.prompt_ids);
        if of_task.len() < num_prompts && !is_known {
            of_task.push(row);
        }
    }
    let eval_prompt = |(seed, row): (u64, &&Row)| EvalPrompt {
        task: row.task.clone(),
        prompt_ids: row.prompt_ids.clone(),
        seed,
    };
    asked.values().flat_map(|rows| (0..).zip(rows).map(eval_prompt)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(task: &str, prompt: u32) -> Row {
        Row {
            task: task.to_owned(),
            model: "m".to_owned(),
            prompt_ids: vec![prompt],
            completion_ids: vec![1],
        }
    }

    #[test]
    fn different_prompts_of_each_task_type_are_asked() {
        let rows = [row("b", 1), row("a", 2), row("b", 1), row("b", 3), row("b", 4)];
        let asked: Vec<_> = eval_prompts(&rows, 2, |_| true)
            .into_iter()
            .map(|eval_prompt| (eval_prompt.task, eval_prompt.prompt_ids[0], eval_prompt.seed))
            .collect();
        let expected = [("a", 2, 0), ("b", 1, 0), ("b", 3, 1)];
        assert_eq!(asked, expected.map(|(task, id, seed)| (task.to_owned(), id, seed)));
    }

    #[test]
    fn prompts_that_do_not_fit_take_no_places() {
        let long = Row { prompt_ids: vec![9; 5], ..row("a", 9) };
        let rows = [long.clone(), long, row("b", 1), row("a", 2), row("a", 3)];
        let asked: Vec<_> = eval_prompts(&rows, 1, |prompt_ids| fits(prompt_ids.len(), 4, 8))
            .into_iter()
            .map(|eval_prompt| (eval_prompt.task, eval_prompt.prompt_ids))
            .collect();
        assert_eq!(asked, [("a".to_owned(), vec![2]), ("b".to_owned(), vec![1])]);
    }

    #[test]
    fn task_types_that_are_not_compared_are_named() {
        let long = Row { prompt_ids: vec![9; 5], ..row("long", 9) };
        let rows = Rows {
            train: vec![row("a", 1), row("rare", 2), row("rare", 3), long.clone()],
            held_out: vec![row("a", 4), long.clone(), long],
            ..Rows::default()
        };
        let prompts = eval_prompts(&rows.held_out, 4, |prompt_ids| fits(prompt_ids.len(), 4, 8));
        let prompts = EvalPrompts::new(prompts, rows_by_task(&rows.held_out), 8).unwrap();
        let notes = left_out_notes(&rows, &prompts.left_out);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].ends_with("none of their rows is held out (rows): rare (2)"), "{notes:?}");
        assert!(notes[1].ends_with("together with --max-tokens: long (2 prompts)"), "{notes:?}");
        assert!(left_out_notes(&Rows { train: vec![row("a", 1)], ..rows }, &BTreeMap::new()).is_empty());
    }
}
