//! Memory sizes as operators write them: `512MiB`, `4GiB`, `1_000_000`, or a share of the machine's memory,
//! `60%`.

use std::str::FromStr;

/// A limit on memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// Number of bytes.
    Bytes(u64),
    /// Percentage of the memory available to this process, 1 to 100.
    Percent(u8),
}

/// Whether a number is a usable fraction of a GPU's memory.
pub fn is_memory_fraction(part: f32) -> bool {
    part > 0.0 && part <= 1.0
}

impl MemoryLimit {
    /// Whether this is a share of the host's memory, which means nothing on a GPU.
    pub fn is_share_of_host(self) -> bool {
        matches!(self, Self::Percent(_))
    }

    /// The limit in bytes. A percentage applies to the machine's memory, or to the limit of the container or
    /// service (its cgroup) if that is lower.
    pub fn bytes(self) -> Result<u64, String> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Percent(percent) => {
                let all = engine::system_memory::total_bytes()
                    .ok_or("this system does not say how much memory it has: give a size instead")?;
                Ok(all / 100 * u64::from(percent))
            }
        }
    }
}

impl FromStr for MemoryLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim().replace('_', "");
        if let Some(percent) = text.strip_suffix('%') {
            return match percent.trim().parse() {
                Ok(percent @ 1..=100) => Ok(Self::Percent(percent)),
                _ => Err("expected a whole number from 1 to 100 before the %".to_owned()),
            };
        }
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            "TiB" => 40,
            other => return Err(format!("unknown unit `{other}`, expected B, KiB, MiB, GiB, TiB or %")),
        };
        let number: u64 = number.parse().map_err(|_| "expected a whole number before the unit".to_owned())?;
        number.checked_mul(1 << shift).map(Self::Bytes).ok_or_else(|| "too large".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        let rows = [("1", 1), ("2KiB", 2 << 10), ("1_000 B", 1_000), ("3 GiB", 3 << 30), ("16MiB", 16 << 20)];
        for (text, bytes) in rows {
            assert_eq!(text.parse(), Ok(MemoryLimit::Bytes(bytes)), "{text}");
        }
        assert_eq!("60%".parse(), Ok(MemoryLimit::Percent(60)));
        assert_eq!(" 100 % ".parse(), Ok(MemoryLimit::Percent(100)));
        for text in ["", "GiB", "1.5GiB", "4GB", "99999999999TiB", "-1", "0%", "101%", "%", "-5%", "1.5%"] {
            assert!(text.parse::<MemoryLimit>().is_err(), "{text}");
        }
    }

    #[test]
    fn parts_of_the_machine() {
        assert_eq!(MemoryLimit::Bytes(7).bytes(), Ok(7));
        if let (Ok(half), Ok(all)) = (MemoryLimit::Percent(50).bytes(), MemoryLimit::Percent(100).bytes()) {
            assert!(half > 0 && half <= all / 2);
        }
    }
}
