//! Sizes as operators write them: `512MiB`, `4GiB`, `1_000_000`.

use std::str::FromStr;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim().replace('_', "");
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            "TiB" => 40,
            other => return Err(format!("unknown unit `{other}`, expected B, KiB, MiB, GiB or TiB")),
        };
        let number: u64 = number.parse().map_err(|_| "expected a whole number before the unit".to_owned())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| "too large".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let rows = [("1", 1), ("2KiB", 2 << 10), ("1_000 B", 1_000), ("3 GiB", 3 << 30), ("16MiB", 16 << 20)];
        for (text, bytes) in rows {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "GiB", "1.5GiB", "4GB", "99999999999TiB", "-1"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
