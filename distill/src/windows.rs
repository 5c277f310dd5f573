//! Cuts answered prompts into windows for training, and determines their order.

use engine::TokenId;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

/// A part of a prompt with its answer. The answer tokens are learnt; the ids before them are context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The ids, at least two.
    pub ids: Vec<TokenId>,
    /// Index of the first learnt id; at least 1.
    pub first_label: usize,
}

impl Window {
    /// Inputs of the models: all ids but the last, after which nothing is learnt.
    pub fn inputs(&self) -> &[TokenId] {
        &self.ids[..self.ids.len() - 1]
    }

    /// Ids that the models should predict after the last [`Self::num_labels`] inputs.
    pub fn labels(&self) -> &[TokenId] {
        &self.ids[self.first_label..]
    }

    /// Number of learnt ids.
    pub fn num_labels(&self) -> usize {
        self.ids.len() - self.first_label
    }
}

/// The windows of a prompt and its answer, of at most `context` ids each. Every answer token is learnt once,
/// with at least half a window before it if available. The prompt must not be empty.
pub fn cut(prompt_ids: &[TokenId], answer_ids: &[TokenId], context: usize) -> Vec<Window> {
    let ids = [prompt_ids, answer_ids].concat();
    let mut windows = Vec::new();
    let mut begin = prompt_ids.len();
    while begin < ids.len() {
        let max_labels = if ids.len() <= context { context } else { (context / 2).max(1) };
        let end = (begin + max_labels).min(ids.len());
        let start = end.saturating_sub(context);
        windows.push(Window { ids: ids[start..end].to_vec(), first_label: begin - start });
        begin = end;
    }
    windows
}

/// An endless sequence of windows, shuffled for each pass.
pub struct WindowOrder {
    rng: StdRng,
    pass: Vec<usize>,
    num_windows: usize,
}

impl WindowOrder {
    /// Creates an order of `num_windows` windows; there must be at least one.
    pub fn new(seed: u64, num_windows: usize) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), pass: Vec::new(), num_windows }
    }
}

impl Iterator for WindowOrder {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.pass.is_empty() {
            self.pass = (0..self.num_windows).collect();
            self.pass.shuffle(&mut self.rng);
        }
        self.pass.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(prompt: u32, answer: u32) -> Vec<Window> {
        let ids: Vec<u32> = (0..prompt + answer).collect();
        let (prompt, answer) = ids.split_at(prompt as usize);
        cut(prompt, answer, 16)
    }

    #[test]
    fn a_short_row_is_one_window() {
        let windows = windows(3, 4);
        assert_eq!(windows, [Window { ids: (0..7).collect(), first_label: 3 }]);
        assert_eq!((windows[0].inputs().len(), windows[0].labels()), (6, [3, 4, 5, 6].as_slice()));
    }

    #[test]
    fn every_answer_token_is_learnt_once() {
        for (prompt, completion) in [(1, 1), (1, 40), (3, 30), (20, 5), (40, 40), (16, 1), (15, 2)] {
            let windows = windows(prompt, completion);
            let learnt: Vec<u32> = windows.iter().flat_map(|window| window.labels().to_vec()).collect();
            assert_eq!(learnt, (prompt..prompt + completion).collect::<Vec<_>>(), "{prompt}, {completion}");
            for window in &windows {
                assert!(window.ids.len() <= 16 && window.first_label >= 1, "{window:?}");
                assert!(window.first_label >= 8 || window.ids[0] == 0, "too little stands before {window:?}");
            }
        }
    }

    #[test]
    fn a_pass_has_every_window_once_and_a_seed_its_order() {
        let order = |seed| WindowOrder::new(seed, 5).take(10).collect::<Vec<_>>();
        let first = order(3);
        for pass in first.chunks(5) {
            let mut sorted = pass.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        assert_eq!(first, order(3));
        assert_ne!(first, order(4));
    }
}
