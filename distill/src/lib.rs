//! Distillation of a draft: trains its distribution towards the target's.
//!
//! A checkpoint's [`weights`] in f32 and its `config` make a [`draft`] model that runs forward and backward
//! ([`ops`], [`attention`]) over [`windows`] of text. [`loss`] measures its distance from the target,
//! [`adamw`] and [`schedule`] determine the updates, and [`training`] runs the loop. Matrices are
//! `ndarray`'s. Request logs and output are handled by `outrider distill` (`cli/src/distill/`), not here.
//! Servers must never link this crate.

#![forbid(unsafe_code)]

pub mod adamw;
pub mod attention;
mod config;
pub mod draft;
pub mod error;
pub mod loss;
pub mod ops;
pub mod schedule;
pub mod training;
pub mod weights;
pub mod windows;

pub use error::DistillError;
