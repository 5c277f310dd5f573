//! Compiles every kernel for every architecture that is served and holds it to its budget: what `make
//! kernels-check` prints. Needs NVRTC and no GPU.

use std::path::Path;

use super::{CudaError, kernel_files, nvrtc, sources};

/// A100, L4 and RTX 40, H100 and H200.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90"];

/// What was found.
#[derive(Debug)]
pub struct KernelsReport {
    /// A table, a line for each kernel and architecture.
    pub table: String,
    /// Kernels over their budget, or that are listed and were not found; empty is good.
    pub faults: Vec<String>,
}

/// Compiles everything, and writes the machine code into a folder where one is named. Errors where NVRTC is missing, a file
/// does not compile or cannot be written.
pub fn kernels_check(write_to: Option<&Path>) -> Result<KernelsReport, CudaError> {
    nvrtc::check_present()?;
    let mut table = format!(
        "{:<24}{:<8}{:>10}{:>10}{:>8}{:>8}\n",
        "kernel", "arch", "registers", "budget", "spills", "smem"
    );
    let mut faults = Vec::new();
    for source in sources::all() {
        for arch in ARCHITECTURES {
            let compiled = nvrtc::compile(source, arch)?;
            if compiled.cubin.is_empty() {
                faults.push(format!("{} for {arch}: no machine code came out", source.file));
            }
            write_to.map_or(Ok(()), |dir| kernel_files::write(dir, arch, source, &compiled.cubin))?;
            for kernel in source.kernels {
                let Some(usage) = compiled.usage.iter().find(|usage| usage.kernel == kernel.name) else {
                    faults.push(format!("{} is listed and is not in {}", kernel.name, source.file));
                    continue;
                };
                let (registers, budget, spills) = (usage.registers, kernel.max_registers, usage.spill_bytes);
                let name = kernel.name;
                table.push_str(&format!(
                    "{name:<24}{arch:<8}{registers:>10}{budget:>10}{spills:>8}{:>8}\n",
                    usage.shared_bytes
                ));
                if registers > budget {
                    faults.push(format!(
                        "{name} for {arch} takes {registers} registers, its budget is {budget}"
                    ));
                }
                if spills > 0 {
                    faults.push(format!("{name} for {arch} spills {spills} bytes"));
                }
            }
        }
    }
    write_to.map_or(Ok(()), kernel_files::write_digest)?;
    Ok(KernelsReport { table, faults })
}
