//! Token trees (contract B9): several drafted ids for one position, all verified in one forward. A chain is a
//! tree without siblings, and its [`Draft::parents`] is empty.
//!
//! Rows are numbered as in a verification: row 0 is the context's last id, row i + 1 is drafted id i. A row's
//! parent is the row that it follows. Ids are in order of depth, so a parent comes before its children and
//! any leading part of a tree is a tree. Nothing here uses logits: [`crate::acceptance`] decides which token
//! a target draws at a row, and so which child the walk continues at.

mod growth;
mod leaves;

pub use growth::{ROWS_PER_FORWARD, TreeGrowth};
pub use leaves::{Alternative, Candidates, ranked_alternatives, with_leaves};

use crate::{Draft, TokenId};

/// Maximum ids of a tree.
pub const MAX_TREE_TOKENS: usize = 64;

/// Maximum number of candidates of one position. The target seldom draws a token that ranks lower.
pub const MAX_CANDIDATES: usize = 8;

/// Outcome of a verification for its draft: how far the path of first children was accepted, and which other
/// child the target drew where it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftOutcome {
    /// Positions of the path of first children that were verified, or would have been if all before them had
    /// been accepted; none after the end of the sequence.
    pub num_positions: u32,
    /// Number of these that were accepted.
    pub num_first: u32,
    /// Where the path was left, if it was.
    pub mismatch: Option<Mismatch>,
}

/// A position where the target's draw was not the first child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Number of children there, the first included.
    pub num_children: u32,
    /// Rank of the child that was drawn, if one was.
    pub rank: Option<u32>,
    /// Number of ids accepted from there on: the drawn child and those after it.
    pub num_accepted: u32,
}

impl Draft {
    /// A draft without siblings.
    pub fn chain(token_ids: Vec<TokenId>) -> Self {
        Self { token_ids, ..Self::default() }
    }

    /// Whether it has parents, so that it may have siblings.
    pub fn is_tree(&self) -> bool {
        !self.parents.is_empty()
    }

    /// The row of the parent of drafted id `i`.
    pub fn parent(&self, i: usize) -> usize {
        self.parents.get(i).map_or(i, |&parent| parent as usize)
    }

    /// The row of the child of `row` with id `token_id`, if there is one.
    pub fn child(&self, row: usize, token_id: TokenId) -> Option<usize> {
        if !self.is_tree() {
            return (self.token_ids.get(row) == Some(&token_id)).then_some(row + 1);
        }
        let is_child = |&i: &usize| self.parent(i) == row && self.token_ids[i] == token_id;
        (row..self.token_ids.len()).find(is_child).map(|i| i + 1)
    }

    /// The depth of each drafted id: 1 at the first position.
    pub fn depths(&self) -> Vec<u32> {
        let mut depths: Vec<u32> = Vec::with_capacity(self.token_ids.len());
        for i in 0..self.token_ids.len() {
            let before =
                self.parent(i).checked_sub(1).and_then(|parent| depths.get(parent)).copied().unwrap_or(0);
            depths.push(before + 1);
        }
        depths
    }

    /// Number of positions.
    pub fn depth(&self) -> u32 {
        if !self.is_tree() {
            return self.token_ids.len() as u32;
        }
        self.depths().last().copied().unwrap_or(0)
    }

    /// Checks the shape: one parent per id, parents first, ids in order of depth, no id twice below one
    /// parent, at most [`MAX_TREE_TOKENS`] ids.
    pub fn check_shape(&self) -> Result<(), String> {
        if !self.is_tree() {
            return Ok(());
        }
        let len = self.token_ids.len();
        if self.parents.len() != len {
            return Err(format!(
                "{} parents for {len} drafted ids: send one parent per id",
                self.parents.len()
            ));
        }
        if len > MAX_TREE_TOKENS {
            return Err(format!("{len} ids in a tree, at most {MAX_TREE_TOKENS}"));
        }
        if let Some(i) = (0..len).find(|&i| self.parent(i) > i) {
            return Err(format!(
                "the parent of drafted id {i} is row {}, which comes after it",
                self.parent(i)
            ));
        }
        if let Some(i) = self.depths().windows(2).position(|pair| pair[1] < pair[0]) {
            return Err(format!(
                "drafted id {} comes after a deeper one: send them in order of depth",
                i + 1
            ));
        }
        let is_first = |&i: &usize| self.child(self.parent(i), self.token_ids[i]) == Some(i + 1);
        match (0..len).find(|i| !is_first(i)) {
            Some(i) => Err(format!("id {} occurs twice below row {}", self.token_ids[i], self.parent(i))),
            None => Ok(()),
        }
    }

    /// The rows on the path `ids` from the root, as far as it exists.
    pub fn rows_on_path(&self, ids: &[TokenId]) -> Vec<usize> {
        let mut row = 0;
        let mut rows = Vec::new();
        for &id in ids {
            let Some(child) = self.child(row, id) else { break };
            rows.push(child);
            row = child;
        }
        rows
    }

    /// Whether `ids` is a path from the root.
    pub fn contains_path(&self, ids: &[TokenId]) -> bool {
        ids.iter().try_fold(0, |row, &id| self.child(row, id)).is_some()
    }

    /// The path of first children from the root: the ids that the draft ran through its model, if it ran any.
    pub fn first_path(&self) -> Vec<TokenId> {
        if !self.is_tree() {
            return self.token_ids.clone();
        }
        self.first_rows().map(|row| self.token_ids[row - 1]).collect()
    }

    /// The rows of that path.
    fn first_rows(&self) -> impl Iterator<Item = usize> {
        let first_child = |&row: &usize| (row..self.token_ids.len()).find(|&i| self.parent(i) == row);
        std::iter::successors(Some(0), move |row| first_child(row).map(|i| i + 1)).skip(1)
    }

    /// Keeps the first `len` ids, and of these only those up to `depth` positions.
    pub fn truncate(&mut self, depth: u32, len: usize) {
        let kept = match self.is_tree() {
            true => self.depths().iter().take(len).take_while(|&&at| at <= depth).count(),
            false => len.min(depth as usize),
        };
        self.token_ids.truncate(kept);
        self.parents.truncate(kept);
        self.q.truncate(kept);
        self.clear_chain_parents();
    }

    /// The part of the draft after the path `ids`; `None` if that is not a path of it. Not for drafts with
    /// distributions.
    pub fn after_path(&self, ids: &[TokenId]) -> Option<Draft> {
        let rows = self.rows_on_path(ids);
        if rows.len() < ids.len() {
            return None;
        }
        let root = rows.last().copied().unwrap_or(0);
        // By row: its number in the remaining draft.
        let mut moved = vec![None; self.token_ids.len() + 1];
        moved[root] = Some(0);
        let mut left = Draft::default();
        for i in root..self.token_ids.len() {
            let Some(parent) = moved.get(self.parent(i)).copied().flatten() else { continue };
            left.token_ids.push(self.token_ids[i]);
            left.parents.push(parent);
            moved[i + 1] = Some(left.token_ids.len() as u32);
        }
        left.clear_chain_parents();
        Some(left)
    }

    /// Removes the parents of a chain, so that equal drafts compare equal.
    pub(crate) fn clear_chain_parents(&mut self) {
        if (0..).zip(&self.parents).all(|(i, &parent)| parent == i) {
            self.parents.clear();
        }
    }

    /// The outcome of a verification of this draft that accepted `accepted`. `drawn` is the target's draw
    /// after them, if the sequence did not end before it.
    pub fn outcome(&self, accepted: &[TokenId], drawn: Option<TokenId>) -> DraftOutcome {
        let num_all = self.first_rows().count();
        let is_next = |(row, id): &(usize, &TokenId)| self.token_ids[row - 1] == **id;
        let (mut num_first, mut row) = (0, 0);
        for (child, _) in self.first_rows().zip(accepted).take_while(is_next) {
            (num_first, row) = (num_first + 1, child);
        }
        let next = accepted.get(num_first).copied().or(drawn);
        let children = || (row..self.token_ids.len()).filter(|&i| self.parent(i) == row);
        let mismatch = next.filter(|_| num_first < num_all).map(|id| Mismatch {
            num_children: children().count() as u32,
            rank: children().position(|i| self.token_ids[i] == id).map(|rank| rank as u32),
            num_accepted: (accepted.len() - num_first) as u32,
        });
        let reached = num_first as u32 + u32::from(mismatch.is_some());
        let num_positions = if mismatch.is_some() || drawn.is_some() { num_all as u32 } else { reached };
        DraftOutcome { num_positions, num_first: num_first as u32, mismatch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(ids: &[TokenId], parents: &[u32]) -> Draft {
        Draft { token_ids: ids.to_vec(), parents: parents.to_vec(), ..Draft::default() }
    }

    /// 5 and 6 at the first position, 7 and 8 after 5, 7 after 6, 9 after the first 7.
    fn example() -> Draft {
        tree(&[5, 6, 7, 8, 7, 9], &[0, 0, 1, 1, 2, 3])
    }

    #[test]
    fn a_walk_goes_by_ids() {
        let tree = example();
        assert_eq!(tree.check_shape(), Ok(()));
        assert_eq!(tree.depths(), [1, 1, 2, 2, 2, 3]);
        assert_eq!((tree.depth(), tree.first_path()), (3, vec![5, 7, 9]));
        assert_eq!(tree.rows_on_path(&[6, 7, 9]), [2, 5], "9 stands behind the other 7");
        assert_eq!(tree.rows_on_path(&[5, 7, 9, 1]), [1, 3, 6]);
    }

    #[test]
    fn a_chain_is_a_tree_without_siblings() {
        let chain = Draft::chain(vec![5, 7, 9]);
        let spelled_out = tree(&[5, 7, 9], &[0, 1, 2]);
        assert_eq!((chain.depth(), chain.depths()), (3, spelled_out.depths()));
        for ids in [&[5, 7, 9][..], &[5, 8], &[7]] {
            assert_eq!(chain.rows_on_path(ids), spelled_out.rows_on_path(ids));
        }
        assert_eq!(spelled_out.after_path(&[5]), Some(Draft::chain(vec![7, 9])));
    }

    #[test]
    fn what_is_left_behind_ids_is_a_tree_again() {
        assert_eq!(example().after_path(&[5]), Some(tree(&[7, 8, 9], &[0, 0, 1])));
        assert_eq!(example().after_path(&[6]), Some(Draft::chain(vec![7])));
        assert_eq!(example().after_path(&[]), Some(example()));
        assert_eq!(example().after_path(&[5, 8]), Some(Draft::default()));
        assert_eq!(example().after_path(&[7]), None);
    }

    #[test]
    fn a_verdict_tells_of_the_first_path_and_of_the_rank_where_it_was_left() {
        let judged = |accepted: &[TokenId], drawn| example().outcome(accepted, drawn);
        let mismatch = |num_children, rank, num_accepted| Some(Mismatch { num_children, rank, num_accepted });
        let told = |num_first, mismatch| DraftOutcome { num_positions: 3, num_first, mismatch };
        assert_eq!(judged(&[5, 7, 9], Some(1)), told(3, None));
        assert_eq!(judged(&[5, 8], Some(1)), told(1, mismatch(2, Some(1), 1)));
        assert_eq!(judged(&[5], Some(1)), told(1, mismatch(2, None, 0)));
        assert_eq!(judged(&[6, 7], Some(1)), told(0, mismatch(2, Some(1), 2)));
        assert_eq!(
            judged(&[5, 7], None),
            DraftOutcome { num_positions: 2, num_first: 2, mismatch: None },
            "it ended"
        );
        let chain = Draft::chain(vec![5, 7]);
        let none = DraftOutcome { num_positions: 2, num_first: 1, mismatch: mismatch(1, None, 0) };
        assert_eq!(chain.outcome(&[5], Some(9)), none);
        assert_eq!(Draft::default().outcome(&[], Some(9)), DraftOutcome::default());
    }

    #[test]
    fn cutting_leaves_a_tree() {
        let cut = |depth, len| {
            let mut tree = example();
            tree.truncate(depth, len);
            assert_eq!(tree.check_shape(), Ok(()));
            tree
        };
        assert_eq!(cut(1, 9), tree(&[5, 6], &[0, 0]));
        assert_eq!(cut(9, 3), tree(&[5, 6, 7], &[0, 0, 1]));
        assert_eq!(cut(9, 1), Draft::chain(vec![5]));
        assert_eq!((cut(0, 9), cut(9, 0)), (Draft::default(), Draft::default()));
    }

    #[test]
    fn other_shapes_are_refused_by_name() {
        for (ids, parents, words) in [
            (&[5, 6][..], &[0][..], "1 parents for 2"),
            (&[5, 6], &[0, 2], "is row 2"),
            (&[5], &[u32::MAX], "comes after it"),
            (&[5, 6, 7], &[0, 1, 0], "order of depth"),
            (&[5, 5], &[0, 0], "twice below row 0"),
            (&[1; 65], &[0; 65], "at most 64"),
        ] {
            let reason = tree(ids, parents).check_shape().unwrap_err();
            assert!(reason.contains(words), "{reason} lacks {words}");
        }
    }
}
