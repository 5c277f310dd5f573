//! Training of a draft: its distribution is pulled to the target's.
//!
//! A checkpoint's [`weights`] in f32 make a [`draft`] model that runs forward and backward ([`ops`], [`attention`]) over [`windows`] of text;
//! [`loss`] says how far it is from what the target said there, [`adamw`] and [`schedule`] how its weights follow, and [`training`] repeats
//! that. Matrices are `ndarray`'s. Nothing here knows files of requests or prints; `outrider distill` (`cli/src/distill/`) does. Must never
//! be linked by a server.

#![forbid(unsafe_code)]

pub mod adamw;
pub mod attention;
pub mod draft;
pub mod error;
pub mod loss;
pub mod ops;
pub mod schedule;
pub mod training;
pub mod weights;
pub mod windows;

pub use error::DistillError;
