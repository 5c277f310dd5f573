//! A server's speculation counters, read from Prometheus text with vLLM's metric names, which the outrider
//! router also uses.

use std::collections::BTreeMap;

const DRAFTS: &str = "vllm:spec_decode_num_drafts_total";
const DRAFT_TOKENS: &str = "vllm:spec_decode_num_draft_tokens_total";
const ACCEPTED_TOKENS: &str = "vllm:spec_decode_num_accepted_tokens_total";
const ACCEPTED_PER_POSITION: &str = "vllm:spec_decode_num_accepted_tokens_per_pos_total";

/// Totals since the server's start, summed over models and engines; or the difference between two readings.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SpeculationCounters {
    /// Drafts that were verified.
    pub drafts: f64,
    /// Drafted tokens in them.
    pub draft_tokens: f64,
    /// Accepted of these.
    pub accepted_tokens: f64,
    /// Number of drafts accepted at least as far as each position, in order.
    pub accepted_per_position: Vec<f64>,
}

impl SpeculationCounters {
    /// Returns `None` if the text contains none of the counters.
    pub fn parse(text: &str) -> Option<Self> {
        let mut counters = Self::default();
        let mut positions = BTreeMap::<usize, f64>::new();
        let mut found = false;
        for (name, labels, value) in text.lines().filter_map(series) {
            match name {
                DRAFTS => counters.drafts += value,
                DRAFT_TOKENS => counters.draft_tokens += value,
                ACCEPTED_TOKENS => counters.accepted_tokens += value,
                ACCEPTED_PER_POSITION => {
                    *positions.entry(label(labels, "position")?.parse().ok()?).or_default() += value;
                }
                _ => continue,
            }
            found = true;
        }
        let depth = positions.keys().last().map_or(0, |last| last + 1);
        counters.accepted_per_position =
            (0..depth).map(|i| positions.get(&i).copied().unwrap_or(0.0)).collect();
        found.then_some(counters)
    }

    /// Adds the difference between two readings.
    pub fn add_difference(&mut self, before: &Self, after: &Self) {
        self.drafts += after.drafts - before.drafts;
        self.draft_tokens += after.draft_tokens - before.draft_tokens;
        self.accepted_tokens += after.accepted_tokens - before.accepted_tokens;
        let depth = after.accepted_per_position.len();
        self.accepted_per_position.resize(depth.max(self.accepted_per_position.len()), 0.0);
        for (i, total) in after.accepted_per_position.iter().enumerate() {
            self.accepted_per_position[i] += total - before.accepted_per_position.get(i).unwrap_or(&0.0);
        }
    }
}

/// Name, labels and value of a line, if it has them.
fn series(line: &str) -> Option<(&str, &str, f64)> {
    let (left, value) = line.rsplit_once(' ')?;
    let (name, labels) = left.split_once('{').unwrap_or((left, ""));
    Some((name.trim(), labels, value.parse().ok()?))
}

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let start = labels.find(&format!("{name}=\""))? + name.len() + 2;
    labels[start..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# TYPE vllm:spec_decode_num_drafts counter\n\
        vllm:spec_decode_num_drafts_total{model_name=\"a b\",engine=\"0\"} 3\n\
        vllm:spec_decode_num_drafts_total{model_name=\"c\",engine=\"0\"} 4\n\
        vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} 20\n\
        vllm:spec_decode_num_accepted_tokens_total{engine=\"0\"} 8\n\
        vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"1\"} 3\n\
        vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} 5\n\
        other_total 9\n";

    #[test]
    fn series_of_one_name_are_summed() {
        let counters = SpeculationCounters::parse(TEXT).unwrap();
        let expected = SpeculationCounters {
            drafts: 7.0,
            draft_tokens: 20.0,
            accepted_tokens: 8.0,
            accepted_per_position: vec![5.0, 3.0],
        };
        assert_eq!(counters, expected);
        assert_eq!(SpeculationCounters::parse("other_total 9\n"), None);
        let mut between = SpeculationCounters::default();
        between.add_difference(&SpeculationCounters { drafts: 5.0, ..Default::default() }, &counters);
        assert_eq!(between, SpeculationCounters { drafts: 2.0, ..expected });
    }
}
