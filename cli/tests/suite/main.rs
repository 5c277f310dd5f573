//! Tests of the tool `outrider`. One binary, because linking several takes longer than running them.

mod bench;
mod check_pair;
mod command_line;
mod engine_bench;
mod https;
mod load;
mod plan;
mod processes;
mod up;
