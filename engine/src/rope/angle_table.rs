//! Angles of all positions up to the furthest one that was needed. Computing an angle takes much longer than
//! copying it, and passes need the same ones again and again: each position is computed once.

use super::Rope;

/// Cosines and sines by position, of one [`Rope`].
#[derive(Debug, Default)]
pub(crate) struct AngleTable {
    /// `None` before the first use.
    rope: Option<Rope>,
    /// For each position, `[cos | sin]` of `head_dim / 2` each. Separate allocations: growing moves none.
    positions: Vec<Box<[f32]>>,
}

impl AngleTable {
    /// Cosines and sines of these positions, `[positions, head_dim / 2]` each.
    pub(crate) fn of(&mut self, rope: &Rope, positions: &[u32]) -> (Vec<f32>, Vec<f32>) {
        if self.rope.as_ref() != Some(rope) {
            (self.rope, self.positions) = (Some(rope.clone()), Vec::new());
        }
        let half = rope.half_dim();
        let end = positions.iter().max().map_or(0, |&last| last + 1);
        for position in self.positions.len() as u32..end {
            let mut angles = vec![0.0f32; 2 * half].into_boxed_slice();
            let (cos, sin) = angles.split_at_mut(half);
            rope.angles(position, cos, sin);
            self.positions.push(angles);
        }
        let of_rows = positions.iter().map(|&position| self.positions[position as usize].split_at(half));
        let (cos, sin): (Vec<&[f32]>, Vec<&[f32]>) = of_rows.unzip();
        (cos.concat(), sin.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(first: f32) -> Rope {
        let inverse_frequencies = vec![first, 0.1, 0.003];
        Rope { inverse_frequencies, attention_factor: 1.25, theta: 10_000.0, scaling: None }
    }

    /// The angles of each position, without a table.
    fn computed(rope: &Rope, positions: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let (mut all_cos, mut all_sin) = (Vec::new(), Vec::new());
        for &position in positions {
            let (mut cos, mut sin) = ([0.0; 3], [0.0; 3]);
            rope.angles(position, &mut cos, &mut sin);
            all_cos.extend(cos);
            all_sin.extend(sin);
        }
        (all_cos, all_sin)
    }

    #[test]
    fn a_position_is_computed_once_with_the_bits_of_its_angles() {
        let (rope, mut table) = (rope(1.0), AngleTable::default());
        let places = |table: &AngleTable| -> Vec<*const f32> {
            table.positions.iter().map(|angles| angles.as_ptr()).collect()
        };
        assert_eq!(table.of(&rope, &[]), (vec![], vec![]));
        assert_eq!(table.of(&rope, &[0, 1, 2, 1]), computed(&rope, &[0, 1, 2, 1]));
        let first = places(&table);
        assert_eq!(first.len(), 3);
        assert_eq!(table.of(&rope, &[40_000, 2, 40_000]), computed(&rope, &[40_000, 2, 40_000]));
        let second = places(&table);
        assert!(second.len() == 40_001 && second[..3] == first, "earlier positions are kept");
        assert_eq!(table.of(&rope, &[7, 39_999]), computed(&rope, &[7, 39_999]));
        assert!(places(&table) == second, "nothing is computed again");
    }

    #[test]
    fn another_models_angles_are_not_taken() {
        let mut table = AngleTable::default();
        for rope in [rope(1.0), rope(0.5)] {
            assert_eq!(table.of(&rope, &[3, 5]), computed(&rope, &[3, 5]));
        }
    }
}
