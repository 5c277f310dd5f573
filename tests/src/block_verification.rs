//! Block verification (Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444):
//! rejection sampling that judges a drafted chain as a whole, so that a token which the target prefers makes
//! up for an earlier one that it does not. No sequence is served this way; the example `tree_shapes` compares
//! it with the modes that are.
//!
//! The committed text follows the target's law only if every round has noise of its own: how many tokens are
//! accepted depends on all drafted tokens, so those behind the accepted ones are no longer distributed as the
//! draft's when the next round drafts their positions again.

use speculation::TokenId;

/// A drafted chain and the probabilities along it, indexed by token id.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// The drafted tokens.
    pub token_ids: &'a [TokenId],
    /// M_s of the paper; row i is the distribution that token i was drawn from.
    pub draft: &'a [Vec<f64>],
    /// M_b of the paper; row i is the target's distribution at the position of token i, and one more row is
    /// for the position after the last token.
    pub target: &'a [Vec<f64>],
}

impl Block<'_> {
    /// The probability that exactly n tokens are accepted, for each n from 0 to the number of tokens.
    ///
    /// The paper accepts each prefix with its own probability h and commits the longest accepted one.
    pub fn chances(&self) -> Vec<f64> {
        let len = self.token_ids.len();
        let ratios = self.ratios();
        let mut chances = vec![0.0; len + 1];
        let mut none_longer = 1.0;
        for n in (1..=len).rev() {
            let h = if n == len { ratios[n] } else { self.prefix_chance(n, ratios[n]) };
            chances[n] = none_longer * h;
            none_longer *= 1.0 - h;
        }
        chances[0] = none_longer;
        chances
    }

    /// Weights, by id, from which the target draws the token after exactly n accepted ones. They need not sum
    /// to 1.
    pub fn next_weights(&self, n: usize) -> Vec<f64> {
        if n < self.token_ids.len() {
            let excess: Vec<f64> = self.excess(n, self.ratios()[n]).collect();
            // Without any excess the block ends here only by a rounding error.
            if excess.iter().any(|&weight| weight > 0.0) {
                return excess;
            }
        }
        self.target[n].clone()
    }

    /// `p_i = min(p_(i-1) M_b(X_i) / M_s(X_i), 1)` with `p_0 = 1`.
    fn ratios(&self) -> Vec<f64> {
        let mut ratios: Vec<f64> = vec![1.0];
        for (i, &id) in self.token_ids.iter().enumerate() {
            let ratio = self.target[i][id as usize] / self.draft[i][id as usize];
            ratios.push((ratios[i] * ratio).min(1.0));
        }
        ratios
    }

    /// `h_n = S / (S + 1 - p_n)`, S being the sum of the excess, for a prefix that is not the whole block.
    fn prefix_chance(&self, n: usize, ratio: f64) -> f64 {
        let sum: f64 = self.excess(n, ratio).sum();
        if sum > 0.0 { sum / (sum + 1.0 - ratio) } else { 0.0 }
    }

    /// `max(p_n M_b - M_s, 0)` of each token after the first n.
    fn excess(&self, n: usize, ratio: f64) -> impl Iterator<Item = f64> {
        let pairs = self.target[n].iter().zip(&self.draft[n]);
        pairs.map(move |(&of_target, &of_draft)| (ratio * of_target - of_draft).max(0.0))
    }
}

/// The index that `uniform`, a number in (0, 1), selects if each has its weight's share of the interval. At
/// least one weight must be positive; an index without weight is never selected.
pub fn pick(weights: &[f64], uniform: f64) -> usize {
    let mut left = uniform * weights.iter().sum::<f64>();
    let mut picked = 0;
    for (i, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            picked = i;
            left -= weight;
        }
        if left < 0.0 {
            break;
        }
    }
    picked
}

#[cfg(test)]
mod tests {
    use speculation::noise::{Noise, Purpose};

    use super::*;

    const VOCAB: usize = 3;
    const MAX_DRAFTED: usize = 3;
    const NUM_CONTEXTS: usize = 2 * VOCAB.pow(MAX_DRAFTED as u32);

    /// The next token's distribution after each context of at most [`MAX_DRAFTED`] ids.
    type Model = Vec<Vec<f64>>;

    /// A different number for each context: its ids as digits, after a 1.
    fn number(context: &[TokenId]) -> usize {
        context.iter().fold(1, |number, &id| number * VOCAB + id as usize)
    }

    /// Excludes some tokens, but never token 0.
    fn random_model(seed: u64, choice: u32) -> Model {
        let noise = Noise { seed, choice };
        let weight = |context: usize, id: TokenId| {
            let least = if id == 0 { 0.05 } else { 0.0 };
            (noise.uniform(context as u32, id, Purpose::Draw) - 0.25).max(least)
        };
        let row = |context: usize| {
            let weights = [0, 1, 2].map(|id| weight(context, id));
            let sum: f64 = weights.iter().sum();
            weights.map(|weight| weight / sum).to_vec()
        };
        (0..NUM_CONTEXTS).map(row).collect()
    }

    fn texts(len: usize) -> Vec<Vec<TokenId>> {
        let longer = |text: &Vec<TokenId>| [0, 1, 2].map(|id| [&text[..], &[id]].concat());
        (0..len).fold(vec![Vec::new()], |texts, _| texts.iter().flat_map(longer).collect())
    }

    /// Probability of `text[from..]` after the ids before it.
    fn probability(model: &Model, text: &[TokenId], from: usize) -> f64 {
        (from..text.len()).map(|i| model[number(&text[..i])][text[i] as usize]).product()
    }

    /// The distributions at the first `len` positions of a text.
    fn along(model: &Model, text: &[TokenId], len: usize) -> Vec<Vec<f64>> {
        (0..len).map(|i| model[number(&text[..i])].clone()).collect()
    }

    /// Expected number of accepted tokens if each is judged alone, by `min(1, M_b / M_s)`.
    fn accepted_singly(block: &Block<'_>) -> f64 {
        let (mut reached, mut accepted) = (1.0, 0.0);
        for (i, &id) in block.token_ids.iter().enumerate() {
            reached *= (block.target[i][id as usize] / block.draft[i][id as usize]).min(1.0);
            accepted += reached;
        }
        accepted
    }

    /// Enumerates all drafts of `len` tokens and all their outcomes, and checks that texts of one more token
    /// have the target's law. Returns the expected number of accepted tokens, and that of single judgements.
    fn check(draft: &Model, target: &Model, len: usize) -> (f64, f64) {
        let texts_of_target = texts(len + 1);
        let mut law = vec![0.0; texts_of_target.len()];
        let (mut accepted, mut singly) = (0.0, 0.0);
        for ids in texts(len) {
            let drafted = probability(draft, &ids, 0);
            if drafted == 0.0 {
                continue;
            }
            let (of_draft, of_target) = (along(draft, &ids, len), along(target, &ids, len + 1));
            let block = Block { token_ids: &ids, draft: &of_draft, target: &of_target };
            singly += drafted * accepted_singly(&block);
            for (n, chance) in block.chances().into_iter().enumerate() {
                accepted += drafted * chance * n as f64;
                let weights = block.next_weights(n);
                let sum: f64 = weights.iter().sum();
                for (text, sum_of_text) in texts_of_target.iter().zip(&mut law) {
                    if text[..n] == ids[..n] {
                        let next = weights[text[n] as usize] / sum;
                        // Later rounds follow the target's law, as this one does.
                        *sum_of_text += drafted * chance * next * probability(target, text, n + 1);
                    }
                }
            }
        }
        for (text, found) in texts_of_target.iter().zip(law) {
            let expected = probability(target, text, 0);
            assert!((found - expected).abs() < 1e-12, "{text:?}: {found} instead of {expected}");
        }
        (accepted, singly)
    }

    #[track_caller]
    fn assert_close(found: (f64, f64), expected: (f64, f64)) {
        let distance = (found.0 - expected.0).abs().max((found.1 - expected.1).abs());
        assert!(distance < 1e-12, "{found:?} instead of {expected:?}");
    }

    #[test]
    fn the_example_of_the_paper_accepts_eleven_ninths_instead_of_ten() {
        let draft = vec![vec![2.0 / 3.0, 1.0 / 3.0, 0.0]; NUM_CONTEXTS];
        let target = vec![vec![1.0 / 3.0, 2.0 / 3.0, 0.0]; NUM_CONTEXTS];
        assert_close(check(&draft, &target, 2), (11.0 / 9.0, 10.0 / 9.0));
    }

    #[test]
    fn the_text_has_the_targets_law_and_no_fewer_tokens_are_accepted_than_singly() {
        let mut largest_gain: f64 = 0.0;
        for seed in 0..60 {
            let (draft, target) = (random_model(seed, 0), random_model(seed, 1));
            let one = check(&draft, &target, 1);
            assert_close(one, (one.1, one.1));
            for len in 2..=MAX_DRAFTED {
                let (accepted, singly) = check(&draft, &target, len);
                assert!(accepted > singly - 1e-12, "seed {seed}, {len} drafted: {accepted} below {singly}");
                largest_gain = largest_gain.max(accepted - singly);
            }
        }
        assert!(largest_gain > 0.05, "judging the block gains at most {largest_gain}");
    }

    #[test]
    fn a_draft_with_the_targets_law_is_accepted_whole() {
        let model = random_model(7, 0);
        assert_close(check(&model, &model, 3), (3.0, 3.0));
    }

    #[test]
    fn nothing_drafted_is_an_ordinary_draw() {
        let model = random_model(8, 0);
        assert_close(check(&model, &model, 0), (0.0, 0.0));
    }

    #[test]
    fn an_index_is_picked_by_its_share() {
        let weights = [0.0, 1.0, 0.0, 3.0, 0.0];
        for (uniform, expected) in [(1e-16, 1), (0.24, 1), (0.26, 3), (1.0 - 1e-16, 3)] {
            assert_eq!(pick(&weights, uniform), expected, "{uniform}");
        }
        // A rounded sum may leave something behind the last weight.
        assert_eq!(pick(&weights, 1.1), 3);
    }
}
