//! Threads that live as long as an engine and do the pieces of one section after another. The thread that brings a section
//! works on it like the others; it waits for pieces that were begun, never for a thread that has not come: one that the
//! system has put aside is missed only where it holds a piece.
//!
//! A section's closure may be touched between taking a piece and giving it back as done, and at no other time: that is
//! what keeps the borrow alive, and all the unsafe code here rests on it.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;

use super::bell::Bell;
use super::patience::Patience;

/// What all threads of a crew see.
#[derive(Default)]
struct Board {
    /// Written by the one who leads, while no piece is out.
    section: UnsafeCell<Option<Section>>,
    /// Pieces that nobody has taken; what is taken next is the section's last but so many.
    left: OwnLine<AtomicUsize>,
    /// Pieces that are not done.
    unfinished: OwnLine<AtomicUsize>,
    /// Rung when pieces are there to be taken, or the crew ends.
    work: Bell,
    /// Rung when the last piece is done.
    done: Bell,
    patience: Patience,
    /// What the first piece that panicked said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    ended: AtomicBool,
}

/// What is written by all threads, apart from what they only read.
#[derive(Default)]
#[repr(align(128))]
struct OwnLine<T>(T);

/// Pieces 0..`pieces` of `run`.
struct Section {
    run: *const (dyn Fn(usize) + Sync),
    pieces: usize,
}

// SAFETY: `section` is written only by the holder of `Crew::leading` while `unfinished` is 0, and read only between
// taking a piece and counting it as done, when `unfinished` is above 0; what it points to is Sync.
unsafe impl Sync for Board {}
// SAFETY: as above; nothing in it belongs to one thread.
unsafe impl Send for Board {}

/// The threads beside the one that leads. They end when this is dropped.
#[derive(Default)]
pub(super) struct Crew {
    board: Arc<Board>,
    /// Held by whoever has brought a section.
    leading: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Starts one more thread; an error where the system gives none.
    pub(super) fn hire(&mut self) -> std::io::Result<()> {
        let board = Arc::clone(&self.board);
        let named = std::thread::Builder::new().name(format!("engine-{}", self.len()));
        self.threads.push(named.spawn(move || board.serve())?);
        Ok(())
    }

    /// Threads that work on a section, whoever leads included.
    pub(super) fn len(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs pieces 0..`pieces` on whatever threads come, and returns when all are done. A panic of any of them goes on
    /// here. Called from a piece, or while another thread leads, it runs them one after the other.
    pub(super) fn run(&self, pieces: usize, run: &(dyn Fn(usize) + Sync)) {
        let _leading = match self.leading.try_lock() {
            Ok(leading) => leading,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..pieces).for_each(run),
        };
        self.board.begin(pieces, run);
        while self.board.take_piece() {}
        let board = &self.board;
        board.done.wait_until(&board.patience, || board.unfinished.0.load(Ordering::Acquire) == 0);
        let panic = board.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.board.ended.store(true, Ordering::Release);
        self.board.work.ring();
        for thread in self.threads.drain(..) {
            // Its pieces' panics were caught, so that it has none of its own.
            drop(thread.join());
        }
    }
}

impl Board {
    /// Shows a section to all. The caller leads, and waits until it is done before `run` ends.
    fn begin(&self, pieces: usize, run: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime is dropped; `Crew::run` keeps `run` borrowed until every piece is done.
        let run =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(run) };
        // SAFETY: the caller leads and no piece is out, so nobody else looks at the section.
        unsafe { *self.section.get() = Some(Section { run, pieces }) };
        self.unfinished.0.store(pieces, Ordering::Relaxed);
        self.left.0.store(pieces, Ordering::Release);
        self.work.ring();
    }

    /// Takes a piece and does it; false where none was left.
    fn take_piece(&self) -> bool {
        let less_one = |left: usize| left.checked_sub(1);
        let Ok(left) = self.left.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, less_one) else {
            return false;
        };
        // SAFETY: a piece is out until it is counted below, so that the section stands still and its closure lives.
        let (run, piece) = unsafe {
            let section = (*self.section.get()).as_ref().expect("pieces are there only while a section is");
            (&*section.run, section.pieces - left)
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(piece))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        // From here on the closure may be gone.
        if self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.ring();
        }
        true
    }

    /// A thread of the crew, until it ends.
    fn serve(&self) {
        loop {
            while self.take_piece() {}
            let ended = || self.ended.load(Ordering::Acquire);
            self.work.wait_until(&self.patience, || self.left.0.load(Ordering::Relaxed) > 0 || ended());
            if ended() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("len", &self.len()).finish_non_exhaustive()
    }
}
