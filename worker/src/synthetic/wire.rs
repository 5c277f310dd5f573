//! Simulated network between router and worker: a thread between the gRPC service and the device that delays
//! each frame.
//!
//! It delays incoming frames by the whole round trip and outgoing frames not at all. A router only sees the
//! sum, and incoming frames carry the time at which they were read.

use std::time::{Duration, Instant};

use service::shutdown::Lifetime;
use tokio::sync::mpsc;

use crate::step_loop::{MAILBOX_FRAMES, Message};

/// Returns a mailbox whose frames arrive `round_trip` late; the thread ends with the service.
pub fn delayed(
    mut inbox: mpsc::Receiver<Message>,
    round_trip: Duration,
    lifetime: &Lifetime,
) -> std::io::Result<mpsc::Receiver<Message>> {
    let (late, delayed) = mpsc::channel(MAILBOX_FRAMES);
    lifetime.spawn_essential_thread("wire", move || {
        while let Some(mut message) = inbox.blocking_recv() {
            if let Message::Frame { received, .. } = &mut message {
                std::thread::sleep((*received + round_trip).saturating_duration_since(Instant::now()));
                // For the device, the frame arrives now.
                *received = Instant::now();
            }
            if late.blocking_send(message).is_err() {
                return;
            }
        }
    })?;
    Ok(delayed)
}
