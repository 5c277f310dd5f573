//! How a token tree grows at a draft that runs several rows a forward: which rows come next, and what is proposed in the end.
//!
//! Every known candidate has a chance that the target comes to it: the product of [`Candidates::chances`] along its path. The tree is
//! the likeliest candidates, as many as are asked for. A candidate is at most as likely as its parent, so that they are a tree, and
//! the siblings among them are the best ones (the dynamic trees of Li et al., "EAGLE-2", arXiv 2406.16858). Between two forwards, the
//! rows that run next are the likeliest of them whose own candidates could be among them: so the tree is deep where the draft is
//! sure, and wide where it is not.
//!
//! Which rows run, and so what is proposed, never changes a committed token. Nothing here sees logits.

use super::leaves::NOBODY;
use super::{Candidates, MAX_TREE_TOKENS};
use crate::{Draft, TokenId};

/// Rows of one forward at most. One makes trees of the bundled pair that are as good, but takes more forwards; with eight there are fewer
/// forwards, and rows that turn out to be of no use (docs/measurements/acceptance.md).
const MAX_ROWS: usize = 2;

/// A tree that grows. See the module's page.
#[derive(Debug, Clone)]
pub struct TreeGrowth {
    /// How far it may reach, and how many ids it may have.
    num_positions: usize,
    num_tokens: usize,
    /// Rows of one forward at most.
    num_rows: usize,
    /// All that is known: the context's last id, then candidates, those of one row together and best first.
    nodes: Vec<Node>,
    /// The nodes whose candidates are known or will be after the next forward, as they run; the context's last id first.
    rows: Vec<usize>,
    /// Those of them that are known.
    num_run: usize,
    num_forwards: usize,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    parent: usize,
    token_id: TokenId,
    /// Ids that lead to it, its own included.
    depth: usize,
    chance: f64,
    /// Its place in [`TreeGrowth::rows`].
    row: Option<usize>,
    /// Nothing follows it.
    is_last: bool,
}

impl TreeGrowth {
    /// A tree that reaches at most `num_positions` positions, in as many forwards, and has at most `num_tokens` ids. Its first forward ends
    /// with the context's last id.
    pub fn new(num_positions: usize, num_tokens: usize) -> Self {
        let root =
            Node { parent: 0, token_id: 0, depth: 0, chance: 1.0, row: Some(0), is_last: num_positions == 0 };
        Self {
            num_positions,
            num_tokens: num_tokens.min(MAX_TREE_TOKENS),
            num_rows: MAX_ROWS,
            nodes: vec![root],
            rows: vec![0],
            num_run: 0,
            num_forwards: 0,
        }
    }

    /// The same with at most so many rows a forward.
    pub fn in_rows_of(self, num_rows: usize) -> Self {
        Self { num_rows, ..self }
    }

    /// Rows that all forwards behind the context take together, at most.
    pub fn most_rows(num_positions: usize) -> usize {
        num_positions.saturating_sub(1) * MAX_ROWS
    }

    /// The ids that lead to each row of the next forward, its own last; none once the tree is grown.
    pub fn next_paths(&self) -> Vec<Vec<TokenId>> {
        self.rows[self.num_run..].iter().map(|&node| self.path(node)).collect()
    }

    /// How many these are.
    pub fn num_next(&self) -> usize {
        self.rows.len() - self.num_run
    }

    /// The rows' own ids.
    pub fn next_ids(&self) -> Vec<TokenId> {
        self.rows[self.num_run..].iter().map(|&node| self.nodes[node].token_id).collect()
    }

    /// Rows behind the context that have run.
    pub fn num_stored(&self) -> usize {
        self.num_run.saturating_sub(1)
    }

    /// Of each row behind the context, those of the next forward included: the row that it stands behind, counted as in [`Draft::parents`].
    pub fn row_parents(&self) -> Vec<u32> {
        let parent = |&node: &usize| self.nodes[self.nodes[node].parent].row.unwrap_or(0) as u32;
        self.rows[1..].iter().map(parent).collect()
    }

    /// What follows each row of the forward that ran, in order. Nothing follows an id that `is_last`.
    pub fn observe(&mut self, found: &[Candidates], is_last: impl Fn(TokenId) -> bool) {
        let ran: Vec<usize> = self.rows[self.num_run..].to_vec();
        for (&parent, candidates) in ran.iter().zip(found) {
            let Node { depth, chance, .. } = self.nodes[parent];
            for (&token_id, of_row) in candidates.token_ids.iter().zip(candidates.chances()) {
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

    /// The likeliest rows that may add to the tree, in order of depth.
    fn choose_rows(&mut self) {
        let best = self.best();
        let is_full = best.len() == self.num_tokens;
        let floor = best.last().filter(|_| is_full).map_or(0.0, |&node| self.nodes[node].chance);
        let may_add = |&node: &usize| {
            let Node { row, is_last, chance, .. } = self.nodes[node];
            // Its best child is no likelier than this.
            row.is_none() && !is_last && chance / (1.0 + NOBODY) > floor
        };
        let mut next: Vec<usize> = best.iter().copied().filter(may_add).take(self.num_rows).collect();
        next.sort_by_key(|&node| (self.nodes[node].depth, node));
        for node in next {
            self.nodes[node].row = Some(self.rows.len());
            self.rows.push(node);
        }
    }

    /// The tree: the likeliest nodes, among equals the one that is known longer. Parents come before their children.
    fn best(&self) -> Vec<usize> {
        let mut best: Vec<usize> = (1..self.nodes.len()).collect();
        best.sort_by(|&a, &b| self.nodes[b].chance.total_cmp(&self.nodes[a].chance).then(a.cmp(&b)));
        best.truncate(self.num_tokens);
        best
    }

    /// The tree as it is proposed.
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
        draft.forget_needless_parents();
        draft
    }

    /// The rows behind the context, counted from 0, that `ids` lead along: those whose KV a chain of these ids would have left. All of
    /// `ids` must have run.
    pub fn rows_along(&self, ids: &[TokenId]) -> Vec<usize> {
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
