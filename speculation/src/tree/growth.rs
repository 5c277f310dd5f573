//! Growth of a token tree at a draft that runs several rows per forward: which rows run next, and which tree
//! is proposed.
//!
//! Every known candidate has a probability that the target reaches it: the product of [`Candidates::chances`]
//! along its path. The tree consists of the likeliest candidates, up to the requested number. A candidate is
//! at most as likely as its parent, so they form a tree, and included siblings are the best ones (the dynamic
//! trees of Li et al., "EAGLE-2", arXiv 2406.16858). Between two forwards, the rows to run next are the
//! likeliest ones whose candidates could still enter the tree. So the tree is deep where the draft is certain
//! and wide where it is not.
//!
//! The choice of rows, and so the proposal, never changes a committed token. Nothing here uses logits.

use std::ops::RangeInclusive;

use super::{Candidates, MAX_TREE_TOKENS};
use crate::{Draft, TokenId};

/// Useful numbers of rows per forward. With one row, trees of the bundled pair are as good as with two but
/// take more forwards. With four, trees of 4 positions are up to 1.01 times as good, with eight no better
/// (docs/measurements/acceptance.md). Drafts whose candidates are less unequal gain more from further rows.
pub const ROWS_PER_FORWARD: RangeInclusive<usize> = 2..=8;

/// A growing tree. See the module documentation.
#[derive(Debug, Clone)]
pub struct TreeGrowth {
    /// Limits on its depth and on its number of ids.
    num_positions: usize,
    num_tokens: usize,
    /// Maximum rows per forward.
    num_rows: usize,
    /// All known nodes: the context's last id, then candidates, grouped by row and best first.
    nodes: Vec<Node>,
    /// The nodes that have run or run in the next forward, in that order; the context's last id first.
    rows: Vec<usize>,
    /// Number of them that have run.
    num_run: usize,
    num_forwards: usize,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    parent: usize,
    token_id: TokenId,
    /// Number of ids on the path to it, its own included.
    depth: usize,
    chance: f64,
    /// Index in [`TreeGrowth::rows`].
    row: Option<usize>,
    /// Whether nothing follows it.
    is_last: bool,
}

impl TreeGrowth {
    /// Creates a tree with at most `num_positions` positions, in as many forwards of at most `num_rows` rows,
    /// and at most `num_tokens` ids. Its first forward ends with the context's last id.
    pub fn new(num_positions: usize, num_tokens: usize, num_rows: usize) -> Self {
        let root =
            Node { parent: 0, token_id: 0, depth: 0, chance: 1.0, row: Some(0), is_last: num_positions == 0 };
        Self {
            num_positions,
            num_tokens: num_tokens.min(MAX_TREE_TOKENS),
            num_rows,
            nodes: vec![root],
            rows: vec![0],
            num_run: 0,
            num_forwards: 0,
        }
    }

    /// Maximum total rows of all forwards after the context.
    pub fn max_rows(num_positions: usize, num_rows: usize) -> usize {
        num_positions.saturating_sub(1) * num_rows
    }

    /// The paths to the rows of the next forward, each ending with the row's own id; empty once the tree is
    /// complete.
    pub fn next_paths(&self) -> Vec<Vec<TokenId>> {
        self.rows[self.num_run..].iter().map(|&node| self.path(node)).collect()
    }

    /// Number of rows of the next forward.
    pub fn num_next(&self) -> usize {
        self.rows.len() - self.num_run
    }

    /// Ids of the rows of the next forward.
    pub fn next_ids(&self) -> Vec<TokenId> {
        self.rows[self.num_run..].iter().map(|&node| self.nodes[node].token_id).collect()
    }

    /// Ids of all rows behind the context; those of the next forward pass come last.
    pub fn row_ids(&self) -> Vec<TokenId> {
        self.rows[1..].iter().map(|&node| self.nodes[node].token_id).collect()
    }

    /// Number of rows after the context that have run.
    pub fn num_stored(&self) -> usize {
        self.num_run.saturating_sub(1)
    }

    /// For each row after the context, those of the next forward included: the row of its parent, numbered as
    /// in [`Draft::parents`].
    pub fn row_parents(&self) -> Vec<u32> {
        let parent = |&node: &usize| self.nodes[self.nodes[node].parent].row.unwrap_or(0) as u32;
        self.rows[1..].iter().map(parent).collect()
    }

    /// Adds the candidates after each row of the forward that ran, in order. Nothing follows an id for which
    /// `is_last` is true.
    pub fn add_candidates(&mut self, found: &[Candidates], is_last: impl Fn(TokenId) -> bool) {
        let ran: Vec<usize> = self.rows[self.num_run..].to_vec();
        for (&parent, candidates) in ran.iter().zip(found) {
            let Node { depth, chance, .. } = self.nodes[parent];
            for (&token_id, &of_row) in candidates.token_ids.iter().zip(candidates.chances()) {
                let is_last = depth + 1 >= self.num_positions || is_last(token_id);
                let chance = chance * of_row;
                self.nodes.push(Node { parent, token_id, depth: depth + 1, chance, row: None, is_last });
            }
        }
        self.num_run = self.rows.len();
        self.num_forwards += 1;
        if self.num_forwards < self.num_positions {
            self.choose_rows();
        }
    }

    /// Selects the likeliest rows that may still add to the tree, in order of depth.
    fn choose_rows(&mut self) {
        let best = self.best();
        let is_full = best.len() == self.num_tokens;
        let floor = best.last().filter(|_| is_full).map_or(0.0, |&node| self.nodes[node].chance);
        let may_add = |&node: &usize| {
            let Node { row, is_last, chance, .. } = self.nodes[node];
            // Its best child is at most as likely.
            row.is_none() && !is_last && chance > floor
        };
        let mut next: Vec<usize> = best.iter().copied().filter(may_add).take(self.num_rows).collect();
        next.sort_by_key(|&node| (self.nodes[node].depth, node));
        for node in next {
            self.nodes[node].row = Some(self.rows.len());
            self.rows.push(node);
        }
    }

    /// The tree: the likeliest nodes; among equals the one known longer. Parents come before their children.
    fn best(&self) -> Vec<usize> {
        let mut best: Vec<usize> = (1..self.nodes.len()).collect();
        best.sort_by(|&a, &b| self.nodes[b].chance.total_cmp(&self.nodes[a].chance).then(a.cmp(&b)));
        best.truncate(self.num_tokens);
        best
    }

    /// The tree as a draft.
    pub fn draft(&self) -> Draft {
        let mut nodes = self.best();
        nodes.sort_by_key(|&node| (self.nodes[node].depth, node));
        let mut draft = Draft::default();
        // By node: its row in a verification.
        let mut rows = vec![0; self.nodes.len()];
        for node in nodes {
            draft.token_ids.push(self.nodes[node].token_id);
            draft.parents.push(rows[self.nodes[node].parent]);
            rows[node] = draft.token_ids.len() as u32;
        }
        draft.clear_chain_parents();
        draft
    }

    /// The rows after the context, numbered from 0, on the path `ids`: the rows whose KV equals that of a
    /// chain of these ids. All of `ids` must have run.
    pub fn rows_on_path(&self, ids: &[TokenId]) -> Vec<usize> {
        let mut at = 0;
        let mut rows = Vec::new();
        for &id in ids {
            let is_next = |&node: &usize| self.nodes[node].parent == at && self.nodes[node].token_id == id;
            let Some(next) = self.rows[1..].iter().copied().find(is_next) else { break };
            rows.extend(self.nodes[next].row.map(|row| row - 1));
            at = next;
        }
        rows
    }

    fn path(&self, node: usize) -> Vec<TokenId> {
        let mut path = Vec::with_capacity(self.nodes[node].depth);
        let mut at = node;
        while at != 0 {
            path.push(self.nodes[at].token_id);
            at = self.nodes[at].parent;
        }
        path.reverse();
        path
    }
}

#[cfg(test)]
mod tests;
