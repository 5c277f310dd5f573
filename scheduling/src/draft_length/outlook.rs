//! Prediction for each k at a load: expected tokens, the size of the tree, and the time of a round.

use std::cell::LazyCell;

use super::price::{Price, RoundPricer};
use super::{DraftLength, Load, Outlook};
use crate::cost::WorkerCost;
use crate::tree_size::{Leaf, TreeSize, tree_size};

impl DraftLength {
    /// Computes the outlook of each k.
    pub(super) fn compute_outlook(
        &self,
        load: &Load,
        (target, draft): (&WorkerCost, &WorkerCost),
    ) -> Vec<Outlook> {
        let accepted_by_position = self.acceptance.cumulative(self.max_k);
        let supply = self.supply.cumulative(self.max_k);
        let prices = self.prices(load, target, draft);
        let leaves = LazyCell::new(|| self.siblings.leaves(&accepted_by_position));
        let mut plain_us = 0.0;
        let (mut chain_tokens, mut rows_each) = (1.0, 1.0);
        let mut outlook = Vec::with_capacity(self.max_k as usize + 1);
        for k in 0..=self.max_k {
            if k > 0 {
                let (survived, supplied) = (accepted_by_position[k as usize - 1], supply[k as usize - 1]);
                chain_tokens += supplied * survived;
                rows_each += supplied;
            }
            let chain = prices.round(k, rows_each);
            let factor = self.residuals.factor(k);
            let chain_us = chain.round_us() * factor;
            if k == 0 {
                plain_us = chain_us;
            }
            // Other trees that are slower than k = 0 even if their leaves take no time need no price.
            let has_leaves = k > 0 && load.supports_trees && {
                let left = 1.0 - accepted_by_position[k as usize - 1];
                k == self.k || (chain_tokens + self.siblings.worth_limit(k, left)) * plain_us > chain_us
            };
            let TreeSize { num_leaves, expected_tokens } = match has_leaves {
                true => {
                    let draft = ChainDraft { k, tokens: chain_tokens, rows_each };
                    size_of_tree(&prices, draft, &chain, &leaves)
                }
                false => TreeSize { num_leaves: 0, expected_tokens: chain_tokens },
            };
            let price = match num_leaves {
                0 => chain,
                _ => prices.round(k, rows_of((k, rows_each), num_leaves)),
            };
            let priced = Outlook {
                k,
                num_leaves,
                expected_tokens,
                table_draft_us: price.draft_us,
                table_verify_us: price.verify_us,
                others_delay: price.forwards.mean_added_us(factor / self.residuals.factor(0)),
                ..Outlook::default()
            };
            outlook.push(priced.corrected(factor, load.sequences));
        }
        // Rounds of other lanes wait for this lane's rows. The round time of lanes that have just moved is
        // unknown; assume at least one forward.
        let plain_added_us = outlook[0].others_delay;
        let others_round_us = load.others_round_us.max(outlook[0].table_verify_us);
        for at in &mut outlook {
            at.others_delay = (at.others_delay - plain_added_us) / others_round_us;
        }
        outlook
    }
}

/// A chain of `k` drafted tokens.
#[derive(Debug, Clone, Copy)]
struct ChainDraft {
    k: u32,
    /// Expected number of committed tokens per round.
    tokens: f64,
    /// Expected rows of the verify step.
    rows_each: f64,
}

/// Number of `leaves` that pay beside a chain whose round has this price.
/// Leaves must not delay other lanes.
fn size_of_tree(prices: &RoundPricer<'_>, draft: ChainDraft, chain: &Price, leaves: &[Leaf]) -> TreeSize {
    let ChainDraft { k, tokens, rows_each } = draft;
    let added_us = |price: &Price| price.forwards.mean_added_us(1.0);
    let worth = leaves.iter().filter(|leaf| leaf.position < k).map(|leaf| leaf.worth);
    tree_size((tokens, chain.round_us()), worth, |num_leaves| {
        let price = prices.round(k, rows_of((k, rows_each), num_leaves));
        let delays_others = added_us(&price) > added_us(chain);
        (!delays_others).then(|| price.round_us())
    })
}

/// Rows in a verify step: on average `chain_rows` for a chain, which may be proposed only in part. A tree has
/// all tokens that were requested.
fn rows_of((k, chain_rows): (u32, f64), num_leaves: u32) -> f64 {
    if num_leaves == 0 { chain_rows } else { f64::from(1 + k + num_leaves) }
}
