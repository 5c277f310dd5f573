//! Transposes rows into panels: consecutive 32-bit words of a row become vertical, beside those of other
//! rows. Lines are written in order, and no row is read twice.

use super::lines::Line;

/// Words per line.
pub(super) const LINE_WORDS: usize = size_of::<Line>() / size_of::<u32>();

/// Word w of each of ROWS rows -> the w-th group of lines, in the order of rows, for as many words as there
/// are groups. Lanes use the machine's byte order, as kernels load them.
pub(super) fn transpose<const ROWS: usize>(words: &[[u32; LINE_WORDS]; ROWS], lines: &mut [Line]) {
    for (word, group) in lines.chunks_exact_mut(ROWS / LINE_WORDS).enumerate() {
        for (line, rows) in group.iter_mut().zip(words.as_chunks::<LINE_WORDS>().0) {
            let across: [u32; LINE_WORDS] = std::array::from_fn(|row| rows[row][word]);
            line.0 = bytemuck::cast(across);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_is_in_the_lane_of_its_row() {
        let words: [[u32; LINE_WORDS]; 32] =
            std::array::from_fn(|row| std::array::from_fn(|word| (100 * row + word) as u32));
        let mut lines = [Line([0; 64]); 6];
        transpose(&words, &mut lines);
        for (at, line) in lines.iter().enumerate() {
            let lanes: [u32; LINE_WORDS] = bytemuck::cast(line.0);
            for (lane, found) in lanes.into_iter().enumerate() {
                assert_eq!(found as usize, 100 * (at % 2 * LINE_WORDS + lane) + at / 2);
            }
        }
    }
}
