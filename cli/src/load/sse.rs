//! Splits the bytes of a server-sent event stream into the data of each event and the offset at which it was
//! complete.
//!
//! Follows the relevant WHATWG rules: lines end with LF, CRLF or CR; `data` lines of one event are joined by
//! LF; comments and other fields are ignored; an incomplete event at the end of the stream is dropped.

/// The data of an event and the offset at which it was complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) data: String,
    /// Length of the stream up to and including the blank line that ends the event.
    pub(super) complete_at: usize,
}

/// Returns all events of a stream.
pub(super) fn events(bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    let mut data: Option<String> = None;
    let mut at = 0;
    while let Some((line, end)) = next_line(bytes, at) {
        at = end;
        if line.is_empty() {
            events.extend(data.take().map(|data| Event { data, complete_at: at }));
        } else if let Some(value) = line.strip_prefix(b"data:") {
            let value = String::from_utf8_lossy(value.strip_prefix(b" ").unwrap_or(value));
            match &mut data {
                None => data = Some(value.into_owned()),
                Some(data) => {
                    data.push('\n');
                    data.push_str(&value);
                }
            }
        }
    }
    events
}

/// The line that begins at `start` and the offset of the next line; `None` if the line is incomplete.
fn next_line(bytes: &[u8], start: usize) -> Option<(&[u8], usize)> {
    let rest = &bytes[start..];
    let len = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
    let ending = if rest[len..].starts_with(b"\r\n") { 2 } else { 1 };
    Some((&rest[..len], start + len + ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_split_as_the_standard_says() {
        let rows: [(&str, &[(&str, usize)]); 7] = [
            ("data: a\n\ndata: b\n\n", &[("a", 9), ("b", 18)]),
            ("data:a\r\n\r\ndata:  b\r\r", &[("a", 10), (" b", 20)]),
            (": keep-alive\n\ndata: a\n\n", &[("a", 23)]),
            ("event: x\nid: 3\ndata: a\ndata: b\n\n", &[("a\nb", 32)]),
            ("data: cut", &[]),
            ("data: cut\n", &[]),
            ("\n\ndata\n\n", &[]),
        ];
        for (text, expected) in rows {
            let found = events(text.as_bytes());
            let found: Vec<(&str, usize)> =
                found.iter().map(|event| (event.data.as_str(), event.complete_at)).collect();
            assert_eq!(found, expected, "{text:?}");
        }
    }
}
