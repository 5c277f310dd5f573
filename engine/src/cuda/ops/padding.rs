//! Sizes of launches that are replayed as graphs: rounding up to one of few sizes makes similar passes equal.
//! No choice made here changes a bit: rows behind those of sequences have results that nobody reads, and
//! entries behind those of a list have no work.

/// Rows that the smallest tiles of products have.
const TILE_ROWS: usize = 8;
/// Minimum number of entries by which lists of replayed passes differ: times eight KV heads, four blocks for
/// each multiprocessor of an H100.
const LIST_STEP: usize = 64;

/// Number of rows to run a pass or draws of `rows` rows with: the next power of two up to the rows of the
/// smallest tile, which a product computes anyway; then whole tiles, and at most a sixteenth more.
pub(crate) fn padded_rows(rows: usize) -> usize {
    if rows <= TILE_ROWS {
        return if rows == 0 { 0 } else { rows.next_power_of_two() };
    }
    rounded_up(rows).next_multiple_of(TILE_ROWS)
}

/// Rounds the length of a list of work up by at most a sixteenth.
pub(super) fn rounded_up(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 32).max(1))
}

/// Length of a list of a replayed pass. Its blocks without work end at once, so it is rounded up further: to
/// a multiple of 64 entries, and of a quarter of the next power of two.
pub(super) fn padded_list(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 4).max(LIST_STEP))
}

#[cfg(test)]
mod tests {
    use super::super::TILES;
    use super::super::blocks::TILE_ROWS as SHARED_TILES;
    use super::super::panels::INT8_TILES;
    use super::*;

    /// Up to 256 rows no product has more tiles of rows, whichever kernel it takes.
    #[test]
    fn padding_adds_few_rows_and_no_tiles() {
        let heights: Vec<usize> = TILES.iter().chain(&INT8_TILES).map(|tile| tile.rows).collect();
        let heights = [heights, SHARED_TILES.to_vec(), vec![8, 32]].concat();
        let mut sizes = std::collections::BTreeSet::new();
        for rows in 1..=512 {
            let padded = padded_rows(rows);
            sizes.insert(padded);
            assert!(padded >= rows && padded_rows(padded) == padded, "{rows}");
            let most = if rows <= 8 { rows.next_power_of_two() } else { (rows * 17 / 16).max(rows + 7) };
            assert!(padded <= most, "{rows}: {padded}");
            for height in &heights {
                let tiles = |rows: usize| rows.div_ceil(*height);
                assert!(tiles(padded) == tiles(rows) || rows > 256, "{rows} in tiles of {height}");
            }
        }
        println!("{} numbers of rows up to 512", sizes.len());
        assert_eq!((padded_rows(0), sizes.len()), (0, 51));
    }

    #[test]
    fn lists_are_rounded_up() {
        assert_eq!([0, 1, 16, 33, 100, 300].map(rounded_up), [0, 1, 16, 34, 100, 304]);
        assert_eq!([0, 1, 16, 33, 100, 300].map(padded_list), [0, 64, 64, 64, 128, 384]);
        for len in 1..5000 {
            let (few, more) = (rounded_up(len), padded_list(len));
            assert!(few >= len && few * 16 <= len * 17, "{len}: {few}");
            assert!(more >= len && more * 2 <= (len * 3).max((len + 63) * 2), "{len}: {more}");
        }
    }
}
