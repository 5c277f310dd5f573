//! Two kinds of SVG plots: lines over an axis, and rows of intervals. Without scripts or external resources;
//! the page's style sheet defines the colours (`s0`, `s1` are the arms), and hovering shows values.

use std::fmt::Write as _;

use super::axis::{Axis, Scale, label};

const WIDTH: f64 = 520.0;
const LINES_HEIGHT: f64 = 300.0;
const ROW_HEIGHT: f64 = 22.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// Width reserved for the names of rows.
const NAMES: f64 = 130.0;
/// Lines with more points are drawn without dots.
const DOTS_MAX: usize = 24;

/// A line of a plot.
pub(super) struct Series {
    pub(super) name: String,
    /// Class in the style sheet.
    pub(super) class: String,
    pub(super) points: Vec<Point>,
}

/// A point with an optional interval.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) interval: Option<(f64, f64)>,
}

/// Title and axis labels of a plot.
pub(super) struct Labels<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
}

/// A row of a plot of intervals.
pub(super) struct IntervalRow {
    pub(super) name: String,
    pub(super) class: String,
    pub(super) low: f64,
    pub(super) value: f64,
    pub(super) high: f64,
}

/// Draws lines; `None` if there are no points.
pub(super) fn lines(
    labels: &Labels<'_>,
    series: &[Series],
    x_scale: Scale,
    y_scale: Scale,
) -> Option<String> {
    let points = || series.iter().flat_map(|line| &line.points);
    points().next()?;
    let ends = |point: &Point| point.interval.map_or([point.y; 2], |(low, high)| [low, high]);
    let x = Axis::over(points().map(|point| point.x), x_scale, (LEFT, WIDTH - RIGHT));
    let y = Axis::over(points().flat_map(ends), y_scale, (LINES_HEIGHT - BOTTOM, TOP));
    let mut svg = open(LINES_HEIGHT, labels);
    for tick in y.ticks() {
        let at = y.place(tick);
        svg.push_str(&rule((LEFT, at), (WIDTH - RIGHT, at), "grid"));
        svg.push_str(&text((LEFT - 6.0, at + 4.0), "tick end", &label(tick)));
    }
    for tick in x_ticks(&x, series) {
        let at = x.place(tick);
        svg.push_str(&rule((at, TOP), (at, LINES_HEIGHT - BOTTOM), "grid"));
        svg.push_str(&text((at, LINES_HEIGHT - BOTTOM + 16.0), "tick middle", &label(tick)));
    }
    for (i, line) in series.iter().enumerate() {
        svg.push_str(&draw_line(line, &x, &y));
        let at = (LEFT + 110.0 * i as f64, LINES_HEIGHT - 6.0);
        svg.push_str(&format!(
            "<rect class='{} fill' x='{}' y='{}' width='10' height='10'/>",
            line.class,
            at.0,
            at.1 - 9.0
        ));
        svg.push_str(&text((at.0 + 14.0, at.1), "tick", &line.name));
    }
    svg.push_str(&text((WIDTH - RIGHT, LINES_HEIGHT - 6.0), "tick end", labels.x));
    svg.push_str("</svg>");
    Some(svg)
}

/// With few points, their own x values are the ticks: the measured loads, or positions.
fn x_ticks(x: &Axis, series: &[Series]) -> Vec<f64> {
    if series.iter().any(|line| line.points.len() > DOTS_MAX) {
        return x.ticks();
    }
    let mut ticks: Vec<f64> = series.iter().flat_map(|line| &line.points).map(|point| point.x).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    ticks
}

fn draw_line(line: &Series, x: &Axis, y: &Axis) -> String {
    let place = |point: &Point| (x.place(point.x), y.place(point.y));
    let mut svg = String::new();
    let path: Vec<String> = line
        .points
        .iter()
        .map(|point| {
            let (x, y) = place(point);
            format!("{x:.1},{y:.1}")
        })
        .collect();
    svg.push_str(&format!("<polyline class='{} line' points='{}'/>", line.class, path.join(" ")));
    if line.points.len() > DOTS_MAX {
        return svg;
    }
    for point in &line.points {
        let (cx, cy) = place(point);
        let mut said = format!("{} at {}: {}", line.name, label(point.x), label(point.y));
        if let Some((low, high)) = point.interval {
            svg.push_str(&rule((cx, y.place(low)), (cx, y.place(high)), &format!("{} bar", line.class)));
            said.push_str(&format!(" [{}, {}]", label(low), label(high)));
        }
        svg.push_str(&format!(
            "<circle class='{} fill' cx='{cx:.1}' cy='{cy:.1}' r='3.5'><title>{}</title></circle>",
            line.class,
            escape(&said)
        ));
    }
    svg
}

/// Draws rows of intervals over a common axis, with vertical `marks` at notable values; `None` without rows.
pub(super) fn intervals(
    labels: &Labels<'_>,
    rows: &[IntervalRow],
    marks: &[(f64, &str)],
    scale: Scale,
) -> Option<String> {
    if rows.is_empty() {
        return None;
    }
    let height = TOP + ROW_HEIGHT * rows.len() as f64 + BOTTOM;
    let marked = marks.iter().map(|(value, _)| *value);
    let values = rows.iter().flat_map(|row| [row.low, row.value, row.high]).chain(marked);
    let x = Axis::over(values, scale, (NAMES, WIDTH - RIGHT));
    let floor = height - BOTTOM;
    let mut svg = open(height, labels);
    for tick in x.ticks() {
        svg.push_str(&rule((x.place(tick), TOP), (x.place(tick), floor), "grid"));
        svg.push_str(&text((x.place(tick), floor + 16.0), "tick middle", &label(tick)));
    }
    for (i, (value, name)) in marks.iter().enumerate() {
        svg.push_str(&rule((x.place(*value), TOP), (x.place(*value), floor), "mark"));
        // Marks may be close together: the first name extends to the left, the others to the right.
        let side = if i == 0 { "tick end" } else { "tick" };
        svg.push_str(&text((x.place(*value), floor + 30.0), side, name));
    }
    for (i, row) in rows.iter().enumerate() {
        let y = TOP + ROW_HEIGHT * (i as f64 + 0.5);
        svg.push_str(&text((NAMES - 8.0, y + 4.0), "tick end", &row.name));
        svg.push_str(&rule((x.place(row.low), y), (x.place(row.high), y), &format!("{} bar", row.class)));
        let said = format!("{}: {} [{}, {}]", row.name, label(row.value), label(row.low), label(row.high));
        svg.push_str(&format!(
            "<circle class='{} fill' cx='{:.1}' cy='{y:.1}' r='4'><title>{}</title></circle>",
            row.class,
            x.place(row.value),
            escape(&said)
        ));
    }
    svg.push_str("</svg>");
    Some(svg)
}

fn open(height: f64, labels: &Labels<'_>) -> String {
    let mut svg = String::new();
    // Writing to a string cannot fail.
    write!(svg, "<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='{}'>", escape(labels.title))
        .unwrap_or_default();
    svg.push_str(&text((6.0, 15.0), "title", labels.title));
    svg.push_str(&text((6.0, 29.0), "tick", labels.y));
    svg
}

fn rule((x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) -> String {
    format!("<line class='{class}' x1='{x1:.1}' y1='{y1:.1}' x2='{x2:.1}' y2='{y2:.1}'/>")
}

fn text((x, y): (f64, f64), class: &str, content: &str) -> String {
    format!("<text class='{class}' x='{x:.1}' y='{y:.1}'>{}</text>", escape(content))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&#39;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_others_cannot_break_the_page() {
        let row = |name: &str| IntervalRow {
            name: name.to_owned(),
            class: "s0".to_owned(),
            low: 0.9,
            value: 1.0,
            high: 1.1,
        };
        let labels = Labels { title: "t", x: "x", y: "y" };
        let svg = intervals(&labels, &[row("</svg><script>"), row("it's")], &[], Scale::Log).unwrap();
        assert!(!svg.contains("<script>") && svg.contains("&lt;script&gt;") && svg.contains("it&#39;s"));
        assert_eq!(svg.matches("</svg>").count(), 1);
        assert_eq!(lines(&labels, &[], Scale::Log, Scale::Log), None);
    }
}
