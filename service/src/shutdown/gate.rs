//! The gate: the names of its current holders, and a future that resolves when there are none.
//!
//! It only counts and names; it never cancels anything.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

/// Counts holders by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Gate {
    inside: Arc<watch::Sender<Holders>>,
    /// Holders also enter the parent, so that a parent waits for its children.
    parent: Option<Box<Gate>>,
}

/// Names of the holders, with their counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holders(BTreeMap<&'static str, usize>);

/// Holds a gate open until dropped.
#[derive(Debug)]
#[must_use = "a guard that is dropped at once does not keep the gate open"]
pub struct GateGuard {
    name: &'static str,
    gate: Gate,
}

impl Gate {
    pub(super) fn child(&self) -> Self {
        Self { parent: Some(Box::new(self.clone())), ..Self::default() }
    }

    pub(super) fn enter(&self, name: &'static str) -> GateGuard {
        for gate in self.and_ancestors() {
            gate.inside.send_modify(|holders| *holders.0.entry(name).or_default() += 1);
        }
        GateGuard { name, gate: self.clone() }
    }

    pub(super) fn holders(&self) -> Holders {
        self.inside.borrow().clone()
    }

    /// Resolves when there are no holders. Cancel safety: safe.
    pub(super) async fn emptied(&self) {
        let mut inside = self.inside.subscribe();
        inside.wait_for(|holders| holders.0.is_empty()).await.expect("self keeps the sender alive");
    }

    fn and_ancestors(&self) -> impl Iterator<Item = &Gate> {
        std::iter::successors(Some(self), |gate| gate.parent.as_deref())
    }
}

impl Drop for GateGuard {
    fn drop(&mut self) {
        for gate in self.gate.and_ancestors() {
            gate.inside.send_modify(|holders| holders.leave(self.name));
        }
    }
}

impl Holders {
    fn leave(&mut self, name: &'static str) {
        let count = self.0.get_mut(name).expect("a hold entered under this name");
        *count -= 1;
        if *count == 0 {
            self.0.remove(name);
        }
    }
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (position, (name, count)) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{name} x{count}")?;
        }
        Ok(())
    }
}
