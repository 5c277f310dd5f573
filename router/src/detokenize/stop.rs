//! [`StopMatcher`]: finds stop strings in text that arrives in pieces, withholding any suffix that may become
//! one.

/// Matches one choice's text against its stop strings.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Whether the stop string that is found is emitted.
    included: bool,
    /// Suffix of the text that is a prefix of a stop string; shorter than the longest of them.
    buffered: String,
    /// Index of the stop string that was found.
    found: Option<usize>,
}

/// Result of appending a piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StopMatch {
    /// This text can be emitted.
    Text(String),
    /// A stop string is complete, and the choice ends: this text precedes it, or ends with it if included.
    Stop(String),
}

impl StopMatcher {
    pub(crate) fn new(stops: Vec<String>, included: bool) -> Self {
        Self { stops, included, buffered: String::new(), found: None }
    }

    /// Whether there are no stop strings, so that all text can be emitted at once.
    pub(crate) fn is_empty(&self) -> bool {
        self.stops.is_empty()
    }

    /// Appends a piece. The stop string that completes first wins; of two that end together, the longer.
    pub(crate) fn push(&mut self, piece: &str) -> StopMatch {
        if self.stops.is_empty() {
            return StopMatch::Text(piece.to_owned());
        }
        self.buffered.push_str(piece);
        let first = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(idx, stop)| {
                self.buffered.find(stop.as_str()).map(|start| (start + stop.len(), start, idx))
            })
            .min();
        if let Some((end, start, idx)) = first {
            self.found = Some(idx);
            let mut text = std::mem::take(&mut self.buffered);
            text.truncate(if self.included { end } else { start });
            return StopMatch::Stop(text);
        }
        let keep = self.stops.iter().map(|stop| partial_match_len(&self.buffered, stop)).max().unwrap_or(0);
        let buffered = self.buffered.split_off(self.buffered.len() - keep);
        StopMatch::Text(std::mem::replace(&mut self.buffered, buffered))
    }

    /// The stop string that was found, if any.
    pub(crate) fn found(&self) -> Option<&str> {
        self.found.map(|idx| self.stops[idx].as_str())
    }

    /// Returns the withheld text at the end.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.buffered)
    }
}

/// Length in bytes of the longest proper prefix of `stop` that `text` ends with.
fn partial_match_len(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(len, _)| len).rev().find(|&len| text.ends_with(&stop[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds pieces; returns the emitted text and whether a stop string ended it.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        run_with(false, stops, pieces)
    }

    fn run_with(included: bool, stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect(), included);
        let mut emitted = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                StopMatch::Text(text) => emitted.push_str(&text),
                StopMatch::Stop(text) => return (emitted + &text, true),
            }
        }
        (emitted + &matcher.finish(), false)
    }

    #[test]
    fn stop_strings_are_found_across_pieces_and_never_emitted() {
        for (stops, pieces, emitted, stopped) in [
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
            assert_eq!(run(stops, pieces), (emitted.to_owned(), stopped), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn a_stop_string_that_is_included_ends_the_text() {
        for (stops, pieces, emitted, stopped) in [
            (&["STOP"][..], &["one ST", "OP two"][..], "one STOP", true),
            (&["STOP"], &["one ST"], "one ST", false),
            (&["abcd", "bc"], &["ab", "cd"], "abc", true),
            (&["c", "abc"], &["xabc"], "xabc", true),
        ] {
            assert_eq!(run_with(true, stops, pieces), (emitted.to_owned(), stopped), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn text_that_cannot_become_a_stop_string_is_not_withheld() {
        let mut matcher = StopMatcher::new(vec!["STOP".into()], false);
        assert_eq!(matcher.push("xxST"), StopMatch::Text("xx".into()));
        assert_eq!(matcher.push("Oy"), StopMatch::Text("STOy".into()));
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_how_the_text_is_split(
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
            let (emitted, stopped) = run(&stops, &pieces);
            prop_assert_eq!(run(&stops, &by_character), (emitted.clone(), stopped));
            prop_assert!(text.starts_with(&emitted));
            prop_assert!(stops.iter().all(|stop| !emitted.contains(stop)));
            prop_assert_eq!(stopped, stops.iter().any(|stop| text.contains(stop)));
        }
    }
}
