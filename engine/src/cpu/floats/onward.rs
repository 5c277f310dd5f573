//! What tiles do for windows to come while they pass one: each widens its share of the next to f32, a step of it beside each of
//! its own steps, where loads and stores cost nothing between multiply-adds, and fetches its share of the one after that.

use std::marker::PhantomData;

use super::steps::PanelNumbers;
use super::{PANEL, PANEL_VECTORS, STEP};
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::lines::{Fetch, Line, Share};

/// The two windows behind one, as they are stored; without steps where there is none.
pub(super) struct Coming {
    pub(super) next: *const u8,
    pub(super) next_steps: usize,
    pub(super) after_steps: usize,
}

impl Coming {
    /// The share of tile `index` of `tiles` in fetching the next one.
    pub(super) fn share<W: PanelNumbers>(&self, of: (usize, usize)) -> Share {
        Share::new(self.next, self.next_steps * W::STEP_BYTES / size_of::<Line>(), of)
    }

    /// The share of tile `index` of `tiles` in widening the next one to `to`, and in fetching the one after it.
    pub(super) fn onward<W: PanelNumbers>(&self, to: *mut f32, (index, tiles): (usize, usize)) -> Onward<W> {
        let begin = |tile: usize| self.next_steps * tile / tiles;
        let after = self.next.wrapping_add(self.next_steps * W::STEP_BYTES);
        Onward {
            from: self.next.wrapping_add(begin(index) * W::STEP_BYTES),
            to: to.wrapping_add(begin(index) * STEP * PANEL),
            steps: begin(index + 1) - begin(index),
            far: Share::new(after, self.after_steps * W::STEP_BYTES / size_of::<Line>(), (index, tiles)),
            numbers: PhantomData,
        }
    }
}

/// One tile's part of that.
pub(super) struct Onward<W> {
    from: *const u8,
    to: *mut f32,
    /// Not widened yet.
    steps: usize,
    far: Share,
    numbers: PhantomData<W>,
}

impl<W: PanelNumbers> Onward<W> {
    /// Widens what is left.
    ///
    /// # Safety
    /// V's instructions are there; the window is, packed as W, and there is room for it where it goes.
    #[inline(always)]
    pub(super) unsafe fn finish<V: Lanes>(&mut self) {
        while self.steps > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.step::<V>() };
        }
    }

    /// # Safety
    /// As for `finish`; a step is left.
    #[inline(always)]
    unsafe fn step<V: Lanes>(&mut self) {
        for vector in 0..PANEL_VECTORS {
            // SAFETY: the caller's promise.
            unsafe {
                let (first, second) = W::load_step::<V>(self.from, vector);
                let to = self.to.add(vector * LANES);
                first.store(to);
                second.store(to.add(PANEL));
            }
        }
        self.from = self.from.wrapping_add(W::STEP_BYTES);
        self.to = self.to.wrapping_add(STEP * PANEL);
        self.steps -= 1;
    }
}

/// Whoever makes one keeps the promise of [`Onward::finish`] as long as it is fetched with.
impl<W: PanelNumbers> Fetch for &mut Onward<W> {
    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize) {
        // SAFETY: the caller's promise, and that of whoever made it.
        unsafe {
            self.far.fetch::<V, N>(line);
            if self.steps > 0 {
                self.step::<V>();
            }
        }
    }
}
