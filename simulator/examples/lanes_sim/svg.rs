//! Picture of the maps in one SVG file: a square per point, with the ratio to the best fixed k as colour and
//! number, and the ratio to no speculation below.

use crate::map::Point;

const CELL: (usize, usize) = (86, 44);
const LEFT: usize = 70;
const TITLE: usize = 54;

/// Draws the maps, each with its title and rows of points from the lowest acceptance to the highest.
pub(crate) fn picture(maps: &[(String, Vec<Vec<Point>>)]) -> String {
    let columns = maps.iter().flat_map(|(_, rows)| rows).map(Vec::len).max().unwrap_or(0);
    let height = |rows: &[Vec<Point>]| TITLE + rows.len() * CELL.1 + 16;
    let total: usize = 30 + maps.iter().map(|(_, rows)| height(rows)).sum::<usize>();
    let width = LEFT + columns * CELL.0 + 16;
    let mut body = text(
        (8, 18),
        "start",
        "Simulated. Own choice of k / best fixed k of 0..=10 (below: / no speculation)",
    );
    let mut top = 30;
    for (title, rows) in maps {
        body += &text((8, top + 20), "start", title);
        for (column, point) in rows.first().into_iter().flatten().enumerate() {
            let at = (LEFT + column * CELL.0 + CELL.0 / 2, top + TITLE - 8);
            body += &text(at, "middle", &format!("{} seq.", point.sequences));
        }
        for (row, points) in rows.iter().enumerate() {
            let y = top + TITLE + row * CELL.1;
            if let Some(point) = points.first() {
                body += &text((LEFT - 8, y + 26), "end", &format!("a = {}", point.acceptance));
            }
            for (column, point) in points.iter().enumerate() {
                body += &square((LEFT + column * CELL.0, y), point);
            }
        }
        top += height(rows);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{total}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

fn square((x, y): (usize, usize), point: &Point) -> String {
    // From red at 0.9 through yellow to green at 1.
    let hue = 120.0 * ((point.vs_best - 0.9) / 0.1).clamp(0.0, 1.0);
    let middle = x + CELL.0 / 2;
    format!(
        "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"hsl({hue:.0},65%,75%)\" stroke=\"white\"/>\n{}{}",
        CELL.0,
        CELL.1,
        text((middle, y + 19), "middle", &format!("{:.2}", point.vs_best)),
        text((middle, y + 36), "middle", &format!("{:.2}  k={}", point.vs_off, point.best_k)),
    )
}

fn text((x, y): (usize, usize), anchor: &str, words: &str) -> String {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{words}</text>\n")
}
