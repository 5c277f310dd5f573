//! The instruction set of this process, for callers of the engine; `cpu_kernels` makes the choice.

use crate::EngineError;

/// Selects the instruction set that the process computes with, one that this CPU supports. The first kernel
/// call fixes the choice, so call this before an engine is loaded. A later call must name the same one.
pub fn use_instruction_set(name: &str) -> Result<(), EngineError> {
    Ok(cpu_kernels::use_instruction_set(name)?)
}

/// Returns the name of the instruction set that this process computes with.
pub fn instruction_set() -> Result<&'static str, EngineError> {
    Ok(cpu_kernels::instruction_set()?)
}
