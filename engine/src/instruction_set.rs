//! The instruction set of this process, for whoever runs an engine; `cpu_kernels` makes the choice.

use crate::EngineError;

/// Has the process compute with this instruction set, one of those that this CPU has. The first kernel settles the
/// choice: call it before an engine is loaded. Another call must name the same one.
pub fn use_instruction_set(name: &str) -> Result<(), EngineError> {
    Ok(cpu_kernels::use_instruction_set(name)?)
}

/// The name of the instruction set that this process computes with.
pub fn instruction_set() -> Result<&'static str, EngineError> {
    Ok(cpu_kernels::instruction_set()?)
}
