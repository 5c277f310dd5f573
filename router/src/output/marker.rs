//! [`Marker`]: finds a string in text that arrives character by character, withholding only a possible
//! prefix.

/// Result of appending a character.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MarkerMatch {
    /// This text is not part of the marker; may be empty.
    Text(String),
    /// The marker is complete; this text precedes it.
    Marker(String),
}

/// Matcher of one string.
#[derive(Debug)]
pub(super) struct Marker {
    marker: &'static str,
    /// A prefix of `marker`.
    buffered: String,
}

impl Marker {
    pub(super) fn new(marker: &'static str) -> Self {
        Self { marker, buffered: String::new() }
    }

    pub(super) fn push(&mut self, character: char) -> MarkerMatch {
        self.buffered.push(character);
        // Keep withholding the longest suffix that is a prefix of the marker.
        let starts = self.buffered.char_indices().map(|(at, _)| at);
        let keep_from = starts
            .chain([self.buffered.len()])
            .find(|&at| self.marker.starts_with(&self.buffered[at..]))
            .unwrap_or(self.buffered.len());
        let text: String = self.buffered.drain(..keep_from).collect();
        if self.buffered == self.marker {
            self.buffered.clear();
            return MarkerMatch::Marker(text);
        }
        MarkerMatch::Text(text)
    }

    /// Returns the withheld text at the end.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.buffered)
    }
}
