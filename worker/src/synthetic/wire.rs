//! The way between router and worker, played: a thread between the gRPC service and the device that holds each frame
//! for a while.
//!
//! It holds what comes in for the whole round trip and what goes out not at all: a router sees only the sum
//! of both, and frames that come in carry the time at which they were read.

use std::time::{Duration, Instant};

use service::shutdown::Lifetime;
use tokio::sync::mpsc;

use crate::device::{MAILBOX_FRAMES, Message};

/// A mailbox whose frames are `round_trip` late; the thread ends with the service.
pub fn delayed(
    mut inbox: mpsc::Receiver<Message>,
    round_trip: Duration,
    lifetime: &Lifetime,
) -> std::io::Result<mpsc::Receiver<Message>> {
    let (late, delayed) = mpsc::channel(MAILBOX_FRAMES);
    let hold = lifetime.thread("wire");
    std::thread::Builder::new().name("wire".to_owned()).spawn(move || {
        let _hold = hold;
        while let Some(mut message) = inbox.blocking_recv() {
            if let Message::Frame { received, .. } = &mut message {
                std::thread::sleep((*received + round_trip).saturating_duration_since(Instant::now()));
                // To the device it arrives now.
                *received = Instant::now();
            }
            if late.blocking_send(message).is_err() {
                return;
            }
        }
    })?;
    Ok(delayed)
}
