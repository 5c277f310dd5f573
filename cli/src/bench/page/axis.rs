//! An axis of a plot: maps values to places and chooses tick values.

/// Approximate number of tick labels.
const TICKS: f64 = 6.0;

/// Scale of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    Log,
}

/// Maps values from `low` to `high` to places from `from` to `to`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis that covers all finite `values` with a small margin; a logarithmic one covers those above 0.
    pub(super) fn over(values: impl Iterator<Item = f64>, scale: Scale, (from, to): (f64, f64)) -> Self {
        let fits = |value: &f64| value.is_finite() && (scale == Scale::Linear || *value > 0.0);
        let (mut low, mut high) =
            values.filter(fits).fold((f64::INFINITY, f64::NEG_INFINITY), |found, value| {
                (found.0.min(value), found.1.max(value))
            });
        if low > high {
            (low, high) = (0.5, 2.0);
        }
        match scale {
            Scale::Linear => {
                low = low.min(0.0);
                high = if high > low { high * 1.05 } else { low + 1.0 };
            }
            Scale::Log => (low, high) = (low / 1.15, high * 1.15),
        }
        Self { scale, low, high, from, to }
    }

    /// The place of a value, clamped to the ends.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + (self.to - self.from) * share.clamp(0.0, 1.0)
    }

    /// Round values within the axis.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let within = |value: &f64| *value >= self.low && *value <= self.high;
        let steps = |from: f64, to: f64, step: f64| {
            let (first, last) = ((from / step).ceil() as i64, (to / step).floor() as i64);
            (first..=last).map(move |i| i as f64 * step)
        };
        if self.scale == Scale::Linear || self.high / self.low < 4.0 {
            return steps(self.low, self.high, round_step((self.high - self.low) / TICKS)).collect();
        }
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let marks: &[f64] = if self.high / self.low > 1e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = decades.flat_map(|decade| marks.iter().map(move |mark| mark * 10_f64.powi(decade)));
        all.filter(within).collect()
    }
}

/// Rounds up to the next of 1, 2, 5, 10 at its power of ten.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= step);
    factor.unwrap_or(10.0) * power
}

/// Formats a number briefly.
pub(super) fn label(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => trim(&format!("{value:.1}")),
        _ => trim(&format!("{value:.2}")),
    }
}

fn trim(text: &str) -> String {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        let ticks = |values: &[f64], scale| {
            let axis = Axis::over(values.iter().copied(), scale, (0.0, 100.0));
            axis.ticks().into_iter().map(label).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(ticks(&[0.0, 1.0], Scale::Linear), "0 0.2 0.4 0.6 0.8 1");
        assert_eq!(ticks(&[1.0, 64.0], Scale::Log), "1 2 5 10 20 50");
        assert_eq!(ticks(&[0.9, 1.4], Scale::Log), "0.8 1 1.2 1.4 1.6");
        assert_eq!(ticks(&[], Scale::Log), "0.5 1 2");
    }

    #[test]
    fn places_go_from_end_to_end() {
        let axis = Axis::over([1.0, 100.0].into_iter(), Scale::Log, (0.0, 200.0));
        assert!((axis.place(10.0) - 100.0).abs() < 1e-9);
        assert_eq!((axis.place(0.0), axis.place(1e9)), (0.0, 200.0));
    }
}
