//! The load at which speculation stops paying. Pure.

use serde::Serialize;

use super::compare::{Comparison, Difference};
use super::plan::LoadLevel;

/// How the first arm's lead changes with rising load.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum BreakEven {
    /// The first arm is not slower at any measured load.
    PaysThroughout {
        /// The highest load measured.
        up_to: LoadLevel,
    },
    /// The first arm is not faster at any measured load.
    NeverPays,
    /// It is slower below a load, and not slower from that load on.
    PaysFrom {
        /// The first load at which it is not slower.
        from: LoadLevel,
    },
    /// It is faster below and slower above.
    StopsBetween {
        /// The last load at which it was not slower.
        pays_at: LoadLevel,
        /// The first load at which it was slower.
        slower_at: LoadLevel,
        /// Where the speedup crosses 1 between the two, on a logarithmic axis of load.
        crosses_near: f64,
        /// Whether the interval at the upper load lies below 1; else only the estimate does.
        is_certain: bool,
    },
}

impl BreakEven {
    /// Describes the arm, as the continuation of a sentence after "is".
    pub fn explain(&self) -> String {
        match self {
            Self::PaysThroughout { up_to } => {
                format!("not slower at any measured load, up to {} (by point estimates)", up_to.name())
            }
            Self::NeverPays => "faster at no measured load (by point estimates)".to_owned(),
            Self::PaysFrom { from } => {
                format!("slower at low load, not slower from {} on (by point estimates)", from.name())
            }
            Self::StopsBetween { pays_at, slower_at, crosses_near, is_certain } => {
                let sure = if *is_certain { "" } else { " (not certain: the interval there contains 1)" };
                format!(
                    "faster up to {} and slower from {} on, break-even near {crosses_near:.1}{sure}",
                    pays_at.name(),
                    slower_at.name()
                )
            }
        }
    }
}

/// Judges loads of one kind, in ascending order; `None` if nothing was compared.
pub fn break_even(levels: &[(LoadLevel, &Comparison)]) -> Option<BreakEven> {
    let known: Vec<(LoadLevel, f64, Difference)> = levels
        .iter()
        .filter_map(|(level, comparison)| Some((*level, comparison.speedup?.value, comparison.difference)))
        .collect();
    let (last, ..) = *known.last()?;
    let pays: Vec<bool> = known.iter().map(|(_, speedup, _)| *speedup >= 1.0).collect();
    if !pays.contains(&true) {
        return Some(BreakEven::NeverPays);
    }
    // If the lead appears and disappears more than once, the last disappearance counts.
    let Some(i) = pays.windows(2).rposition(|pair| pair == [true, false]) else {
        let from = pays.iter().rposition(|pays| !pays);
        return Some(from.map_or(BreakEven::PaysThroughout { up_to: last }, |i| BreakEven::PaysFrom {
            from: known[i + 1].0,
        }));
    };
    let (pays_at, above, _) = known[i];
    let (slower_at, below, difference) = known[i + 1];
    let share = above.ln() / (above.ln() - below.ln());
    let (from, to) = (pays_at.size().ln(), slower_at.size().ln());
    Some(BreakEven::StopsBetween {
        pays_at,
        slower_at,
        crosses_near: (from + (to - from) * share).exp(),
        is_certain: difference == Difference::Slower,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::compare::ShipVerdict;
    use crate::load::statistics::Estimate;

    fn comparison(value: f64) -> Comparison {
        let difference = match value {
            v if v > 1.02 => Difference::Faster,
            v if v < 0.98 => Difference::Slower,
            _ => Difference::NoneFound,
        };
        Comparison {
            speedup: Some(Estimate { value, low: value - 0.02, high: value + 0.02 }),
            observations: 8,
            pairs: 80,
            failed: 0,
            same_text: 80,
            difference,
            verdict: ShipVerdict::DoNot,
        }
    }

    fn judge(speedups: &[f64]) -> BreakEven {
        let comparisons: Vec<Comparison> = speedups.iter().map(|value| comparison(*value)).collect();
        let levels = [1, 4, 16, 64].map(LoadLevel::Concurrency);
        break_even(&levels.into_iter().zip(&comparisons).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_crossing_is_found_where_it_is() {
        assert_eq!(
            judge(&[1.5, 1.3, 1.2, 1.1]),
            BreakEven::PaysThroughout { up_to: LoadLevel::Concurrency(64) }
        );
        assert_eq!(judge(&[0.9, 0.8]), BreakEven::NeverPays);
        let BreakEven::StopsBetween { pays_at, slower_at, crosses_near, is_certain } =
            judge(&[1.5, 1.2, 1.25, 0.8])
        else {
            panic!("it stops")
        };
        assert_eq!((pays_at, slower_at), (LoadLevel::Concurrency(16), LoadLevel::Concurrency(64)));
        // ln 1.25 = -ln 0.8: halfway between 16 and 64 on a logarithmic axis.
        assert!((crosses_near - 32.0).abs() < 1e-9 && is_certain, "{crosses_near}");
        assert!(matches!(judge(&[1.5, 0.99]), BreakEven::StopsBetween { is_certain: false, .. }));
        assert_eq!(judge(&[0.9, 1.2, 1.3]), BreakEven::PaysFrom { from: LoadLevel::Concurrency(4) });
        assert_eq!(break_even(&[]), None);
    }
}
