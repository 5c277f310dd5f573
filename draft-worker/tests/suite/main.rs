//! Tests of a draft worker through its service. One binary, because linking several takes longer than running
//! them.

mod agreement;
mod ahead;
mod branches;
mod bundled_draft;
mod grammars;
mod random;
mod rejection;
mod translated;
