//! [`Marker`]: finds a string in text that comes character by character, holding back only what may be its beginning.

/// What one character more means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// This text is not part of a marker; perhaps none of it is known yet.
    Text(String),
    /// The marker is complete; this text stood before it.
    Marker(String),
}

/// One string that is looked for.
#[derive(Debug)]
pub(super) struct Marker {
    marker: &'static str,
    /// A beginning of `marker`.
    held: String,
}

impl Marker {
    pub(super) fn new(marker: &'static str) -> Self {
        Self { marker, held: String::new() }
    }

    pub(super) fn push(&mut self, character: char) -> Seen {
        self.held.push(character);
        // The longest end of what is held that begins the marker is still held.
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

    /// What is held back, when nothing follows.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
