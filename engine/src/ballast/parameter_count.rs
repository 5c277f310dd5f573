//! Parses and prints numbers of parameters in short form: `250M`, `1.5B`, `0`.

use std::fmt;
use std::str::FromStr;

/// A number of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ParameterCount(pub u64);

const UNITS: [(&str, f64); 4] = [("K", 1e3), ("M", 1e6), ("B", 1e9), ("", 1.0)];
/// Upper limit: more than any model has, and exact in f64.
const MAX: f64 = 1e15;

impl FromStr for ParameterCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected a number of parameters, for example 250M, 1.5B or 0".to_owned();
        let upper = text.trim().to_ascii_uppercase();
        let (digits, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((upper.strip_suffix(name)?, unit)))
            .ok_or_else(expected)?;
        let is_plain = digits.chars().all(|c| c.is_ascii_digit() || c == '.');
        let number: f64 = digits.parse().ok().filter(|_| is_plain).ok_or_else(expected)?;
        let count = (number * unit).round();
        if count > MAX { Err(expected()) } else { Ok(Self(count as u64)) }
    }
}

impl fmt::Display for ParameterCount {
    /// Prints three significant digits: an approximate size, not an exact count.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0 as f64;
        let (name, unit) = match count {
            _ if count >= 999.5e6 => ("B", 1e9),
            _ if count >= 999.5e3 => ("M", 1e6),
            _ if count >= 1e3 => ("K", 1e3),
            _ => return write!(f, "{}", self.0),
        };
        let number = count / unit;
        let decimals = [99.95, 9.995].iter().filter(|&&limit| number < limit).count();
        let text = format!("{number:.decimals$}");
        let short = if decimals > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        write!(f, "{short}{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_forms_are_parsed_and_printed() {
        for (text, count, written) in [
            ("250M", 250_000_000, "250M"),
            ("0", 0, "0"),
            ("1.5b", 1_500_000_000, "1.5B"),
            (" 64k ", 64_000, "64K"),
            ("999", 999, "999"),
            ("251234567", 251_234_567, "251M"),
            ("9.6B", 9_600_000_000, "9.6B"),
            ("999999999", 999_999_999, "1B"),
            ("20M", 20_000_000, "20M"),
        ] {
            assert_eq!(text.parse(), Ok(ParameterCount(count)), "{text}");
            assert_eq!(ParameterCount(count).to_string(), written);
        }
        for text in ["", "M", "-1", "1e9", "inf", "nan", "1.2.3M", "5G", "1,5B", "99999999999B"] {
            assert!(text.parse::<ParameterCount>().unwrap_err().contains("250M"), "{text}");
        }
    }
}
