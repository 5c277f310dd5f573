//! [`StopMatcher`]: finds stop strings in text that arrives in pieces, withholding any suffix that may become
//! one.

/// Matches one choice's text against its stop strings.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Suffix of the text that is a prefix of a stop string; shorter than the longest of them.
    held: String,
    /// Index of the stop string that was found.
    found: Option<usize>,
}

/// Result of appending a piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Matched {
    /// This text can be emitted.
    Text(String),
    /// A stop string is complete: this text precedes it, and the choice ends.
    Stop(String),
}

impl StopMatcher {
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new(), found: None }
    }

    /// Whether there are no stop strings, so that all text can be emitted at once.
    pub(crate) fn are_none(&self) -> bool {
        self.stops.is_empty()
    }

    /// Appends a piece. The stop string that completes first wins; of two that end together, the longer.
    pub(crate) fn push(&mut self, piece: &str) -> Matched {
        if self.stops.is_empty() {
            return Matched::Text(piece.to_owned());
        }
        self.held.push_str(piece);
        let first = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(idx, stop)| {
                self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, idx))
            })
            .min();
        if let Some((_, start, idx)) = first {
            self.found = Some(idx);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Matched::Stop(text);
        }
        let keep = self.stops.iter().map(|stop| begun_len(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        Matched::Text(std::mem::replace(&mut self.held, held))
    }

    /// The stop string that was found, if any.
    pub(crate) fn found(&self) -> Option<&str> {
        self.found.map(|idx| self.stops[idx].as_str())
    }

    /// Returns the withheld text at the end.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest proper prefix of `stop` that `text` ends with.
fn begun_len(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(len, _)| len).rev().find(|&len| text.ends_with(&stop[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds pieces; returns the emitted text and whether a stop string ended it.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut shown = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                Matched::Text(text) => shown.push_str(&text),
                Matched::Stop(text) => return (shown + &text, true),
            }
        }
        (shown + &matcher.finish(), false)
    }

    #[test]
    fn stop_strings_are_found_across_pieces_and_never_shown() {
        for (stops, pieces, shown, stopped) in [
            (&["STOP"][..], &["one ST", "OP two"][..], "one ", true),
            (&["STOP"], &["one ST", "ILL"], "one STILL", false),
            (&["STOP"], &["one ST"], "one ST", false),
            (&["\n\n"], &["a\n", "b\n", "\nc"], "a\nb", true),
            (&["abcd", "bc"], &["ab", "cd"], "a", true),
            (&["c", "abc"], &["xabc"], "x", true),
            (&["aab"], &["aa", "aab"], "aa", true),
            (&["\u{20ac}x"], &["1\u{20ac}", "y\u{20ac}", "x"], "1\u{20ac}y", true),
            (&[], &["free"], "free", false),
        ] {
            assert_eq!(run(stops, pieces), (shown.to_owned(), stopped), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn what_cannot_become_a_stop_string_is_not_held_back() {
        let mut matcher = StopMatcher::new(vec!["STOP".into()]);
        assert_eq!(matcher.push("xxST"), Matched::Text("xx".into()));
        assert_eq!(matcher.push("Oy"), Matched::Text("STOy".into()));
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_how_text_is_cut(
            text in "[abc]{0,24}",
            stops in prop::collection::vec("[abc]{1,4}", 0..4),
            cut in 1usize..6,
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let by_character: Vec<String> = text.chars().map(String::from).collect();
            let by_character: Vec<&str> = by_character.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = text
                .as_bytes()
                .chunks(cut)
                .map(|piece| std::str::from_utf8(piece).expect("ascii"))
                .collect();
            let (shown, stopped) = run(&stops, &pieces);
            prop_assert_eq!(run(&stops, &by_character), (shown.clone(), stopped));
            prop_assert!(text.starts_with(&shown));
            prop_assert!(stops.iter().all(|stop| !shown.contains(stop)));
            prop_assert_eq!(stopped, stops.iter().any(|stop| text.contains(stop)));
        }
    }
}
