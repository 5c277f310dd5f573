//! [`Marker`]: finds a string in text that arrives character by character, withholding only a possible
//! prefix.

/// Result of appending a character.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
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
    held: String,
}

impl Marker {
    pub(super) fn new(marker: &'static str) -> Self {
        Self { marker, held: String::new() }
    }

    pub(super) fn push(&mut self, character: char) -> Seen {
        self.held.push(character);
        // Keep withholding the longest suffix that is a prefix of the marker.
        let starts = self.held.char_indices().map(|(at, _)| at);
        let keep_from = starts
            .chain([self.held.len()])
            .find(|&at| self.marker.starts_with(&self.held[at..]))
            .unwrap_or(self.held.len());
        let text: String = self.held.drain(..keep_from).collect();
        if self.held == self.marker {
            self.held.clear();
            return Seen::Marker(text);
        }
        Seen::Text(text)
    }

    /// Returns the withheld text at the end.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
