//! Compiles every kernel for every supported architecture and checks it against its limits: the output of
//! `make kernels-check`. Registers and register spills come from the assembler's log, the order of loads and
//! products from the machine code. Needs NVRTC and CUDA's disassembler, but no GPU.

use std::path::Path;

use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use super::nvrtc::{Compiled, Usage};
use super::sass::{self, Disassembled};
use super::sources::{Kernel, Source};
use super::{CudaError, kernel_files, nvrtc, sources};

/// Limits of one multiprocessor of an architecture.
struct Architecture {
    name: &'static str,
    threads: u32,
    shared_bytes: u32,
}

/// A100; L4 and RTX 40; H100 and H200.
const ARCHITECTURES: [Architecture; 3] = [
    Architecture { name: "sm_80", threads: 2048, shared_bytes: 164 << 10 },
    Architecture { name: "sm_89", threads: 1536, shared_bytes: 100 << 10 },
    Architecture { name: "sm_90", threads: 2048, shared_bytes: 228 << 10 },
];
/// Registers of a multiprocessor (allocated per warp in units of 256), and shared memory that the system
/// takes from every block.
const REGISTERS: u32 = 65_536;
const SYSTEM_SHARED_BYTES: u32 = 1 << 10;

/// Result of the check.
#[derive(Debug)]
pub struct KernelsReport {
    /// Table with one line per kernel and architecture.
    pub table: String,
    /// Kernels that exceed their limits, and listed kernels that were not found. Empty if all is well.
    pub faults: Vec<String>,
}

/// One file compiled for one architecture.
struct CompiledSource {
    source: &'static Source,
    arch: &'static Architecture,
    compiled: Compiled,
    /// Empty for files without checks of their machine code.
    machine_code: Vec<Disassembled>,
}

/// Compiles all kernels, and writes the machine code to a folder if one is given. Fails if NVRTC is missing,
/// or if a file does not compile or cannot be written.
pub fn kernels_check(write_to: Option<&Path>) -> Result<KernelsReport, CudaError> {
    nvrtc::check_present()?;
    let mut report = KernelsReport { table: heading(), faults: Vec::new() };
    let mut bytes = 0;
    let began = std::time::Instant::now();
    for CompiledSource { source, arch, compiled, machine_code } in compile_all()? {
        if compiled.cubin.is_empty() {
            report.faults.push(format!("{} for {}: no machine code came out", source.file, arch.name));
        }
        bytes += compiled.cubin.len();
        write_to.map_or(Ok(()), |dir| kernel_files::write(dir, arch.name, source, &compiled.cubin))?;
        report.judge(source, arch, (&compiled.usage, &machine_code));
    }
    let seconds = began.elapsed().as_secs_f64();
    let total =
        format!("machine code of all architectures: {bytes} bytes, compiled and read in {seconds:.1} s\n");
    report.table.push_str(&total);
    let toolkit = nvrtc::version()?;
    write_to.map_or(Ok(()), |dir| kernel_files::write_digest(dir, toolkit))?;
    Ok(report)
}

/// Compiles every file for every architecture, on all cores. Returns them in the order of the table.
fn compile_all() -> Result<Vec<CompiledSource>, CudaError> {
    let targets = sources::all().into_iter().flat_map(|source| {
        ARCHITECTURES.iter().filter_map(move |arch| Some((source, arch, source.target(arch.name)?)))
    });
    let jobs: Vec<_> = targets.collect();
    let compiled = jobs.into_par_iter().map(|(source, arch, target)| {
        let compiled = nvrtc::compile(source, &target)?;
        let machine_code =
            if source.has_code_checks() { sass::disassemble(&compiled.cubin)? } else { Vec::new() };
        Ok(CompiledSource { source, arch, compiled, machine_code })
    });
    compiled.collect()
}

fn heading() -> String {
    let left =
        format!("{:<26}{:<7}{:>5}{:>7}{:>7}{:>7}", "kernel", "arch", "regs", "budget", "smem", "warps");
    format!("{left}   main loop: loads first/all, narrow, cp.async, lds, products, instructions\n")
}

impl KernelsReport {
    fn judge(&mut self, source: &Source, arch: &Architecture, found: (&[Usage], &[Disassembled])) {
        for kernel in source.kernels {
            let Some(usage) = found.0.iter().find(|usage| usage.kernel == kernel.name) else {
                self.faults.push(format!("{} is listed and is not in {}", kernel.name, source.file));
                continue;
            };
            let machine_code = found.1.iter().find(|code| code.kernel == kernel.name);
            self.table.push_str(&line(kernel, arch, usage, machine_code));
            let faults = faults(kernel, usage, machine_code);
            self.faults
                .extend(faults.into_iter().map(|fault| format!("{} for {} {fault}", kernel.name, arch.name)));
        }
    }
}

fn line(kernel: &Kernel, arch: &Architecture, usage: &Usage, code: Option<&Disassembled>) -> String {
    let shared = usage.shared_bytes + kernel.shared_bytes;
    let left = format!(
        "{:<26}{:<7}{:>5}{:>7}{shared:>7}{:>7}",
        kernel.name,
        arch.name,
        usage.registers,
        kernel.max_registers,
        resident_warps(kernel, arch, usage),
    );
    let Some(main_loop) = code.and_then(|code| code.main_loop) else {
        let together = code.map_or(0, |code| code.all.loads_in_flight);
        return left
            + &if together > 0 { format!("   loads together: {together}\n") } else { "\n".to_owned() };
    };
    let all = main_loop.all;
    format!(
        "{left}   {}/{}, {}, {}, {}, {}, {}\n",
        main_loop.loads_before_product,
        all.loads_128,
        all.loads_narrow,
        all.copies_128,
        main_loop.shared_128,
        all.products,
        main_loop.instructions
    )
}

/// Occupancy: warps resident on a multiprocessor, limited by registers, threads and shared memory of whole
/// blocks.
fn resident_warps(kernel: &Kernel, arch: &Architecture, usage: &Usage) -> u32 {
    let warps = kernel.threads / 32;
    let by_registers = REGISTERS / (warps * (usage.registers * 32).next_multiple_of(256));
    let by_threads = arch.threads / kernel.threads;
    let by_shared = arch.shared_bytes / (usage.shared_bytes + kernel.shared_bytes + SYSTEM_SHARED_BYTES);
    by_registers.min(by_threads).min(by_shared).min(32) * warps
}

/// Faults of a kernel, each as the rest of a sentence that begins with the kernel's name.
fn faults(kernel: &Kernel, usage: &Usage, code: Option<&Disassembled>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut check = |is_good: bool, fault: String| {
        if !is_good {
            faults.push(fault);
        }
    };
    let (registers, budget) = (usage.registers, kernel.max_registers);
    check(registers <= budget, format!("takes {registers} registers, its budget is {budget}"));
    check(usage.spill_bytes == 0, format!("spills {} bytes", usage.spill_bytes));
    let together = code.map_or(0, |code| code.all.loads_in_flight);
    let least = kernel.loads_in_flight;
    check(together >= least, format!("has {together} loads under way together, expected {least}"));
    check(!usage.is_serialized, "lets products of warpgroups wait for each other".to_owned());
    if let Some((products, copies)) = kernel.warpgroups {
        // Some warpgroups release registers and others take them. With fewer at the launch they wait forever.
        check(registers == budget, format!("is launched with {registers} registers, expected {budget}"));
        let found = code.map(|code| code.all).unwrap_or_default();
        let of = found.products_of_warpgroups;
        check(of == products, format!("has {of} products of warpgroups, expected {products}"));
        let bulk = found.copies_bulk;
        check(bulk >= copies, format!("has {bulk} bulk copies, expected {copies}"));
        check(found.local == 0, format!("has {} accesses of local memory", found.local));
    }
    let declared = usage.shared_bytes;
    check(
        declared == 0 || !kernel.is_shared_aligned,
        format!("declares {declared} bytes of shared memory before its stages"),
    );
    let Some(wanted) = kernel.main_loop else { return faults };
    let Some(found) = code.and_then(|code| code.main_loop) else {
        faults.push("has no loop that multiplies".to_owned());
        return faults;
    };
    check(usage.stack_bytes == 0, format!("takes {} bytes of local memory", usage.stack_bytes));
    let (first, loads) = (found.loads_before_product, found.all.loads_128);
    let (least, of) = (wanted.loads_before_product, wanted.loads);
    check(
        first >= least && loads == of,
        format!("issues {first} of {loads} loads first, expected {least} of {of}"),
    );
    let copies = found.all.copies_128;
    check(
        copies >= wanted.copies,
        format!("has {copies} asynchronous copies of 16 bytes, expected {}", wanted.copies),
    );
    let narrow = found.all.loads_narrow;
    check(narrow == 0, format!("has {narrow} narrow loads in its main loop"));
    check(found.all.local == 0, format!("has {} accesses of local memory in its main loop", found.all.local));
    let conversions = found.conversions;
    check(conversions == 0, format!("converts {conversions} integers to floats in its main loop"));
    faults
}

#[cfg(test)]
mod tests {
    use super::super::sass::{InstructionCounts, MainLoop};
    use super::super::sources::GEMM_BF16;
    use super::*;

    /// Machine code with loads moved behind products, a narrowed load and a division. Each fault is named.
    #[test]
    fn a_main_loop_that_is_not_as_it_must_be_is_a_fault() {
        let kernel = GEMM_BF16.kernel(0);
        let usage =
            Usage { kernel: kernel.name.to_owned(), registers: 72, shared_bytes: 4096, ..Usage::default() };
        let all = InstructionCounts { loads_128: 12, products: 8, ..InstructionCounts::default() };
        let good = MainLoop { all, loads_before_product: 12, ..MainLoop::default() };
        let code = |main_loop| Disassembled { kernel: kernel.name.to_owned(), all, main_loop };
        let said = |usage: &Usage, main_loop| faults(kernel, usage, Some(&code(main_loop)));
        assert_eq!(said(&usage, Some(good)), [""; 0]);
        for (main_loop, fault) in [
            (MainLoop { loads_before_product: 5, ..good }, "issues 5 of 12 loads first, expected 10 of 12"),
            (MainLoop { conversions: 1, ..good }, "converts 1 integers"),
            (MainLoop { all: InstructionCounts { loads_narrow: 2, ..all }, ..good }, "has 2 narrow loads"),
            (
                MainLoop { all: InstructionCounts { local: 3, ..all }, ..good },
                "has 3 accesses of local memory",
            ),
        ] {
            let found = said(&usage, Some(main_loop));
            assert!(found.len() == 1 && found[0].contains(fault), "{fault}: {found:?}");
        }
        let parts = crate::cuda::sources::DRAW.kernel(0);
        let code_of_parts = |loads_in_flight| Disassembled {
            all: InstructionCounts { loads_in_flight, ..all },
            ..Disassembled::default()
        };
        let usage_of_parts = Usage { registers: 40, ..usage.clone() };
        let said_of_parts = |together| faults(parts, &usage_of_parts, Some(&code_of_parts(together)));
        assert_eq!(said_of_parts(4), [""; 0]);
        assert_eq!(said_of_parts(1), ["has 1 loads under way together, expected 4"]);
        let serialized = Usage { is_serialized: true, ..usage.clone() };
        assert_eq!(said(&serialized, Some(good)), ["lets products of warpgroups wait for each other"]);
        let of_warpgroups = crate::cuda::sources::ATTENTION_PANELS.kernel(0);
        let all = InstructionCounts { products_of_warpgroups: 32, copies_bulk: 1, ..all };
        let said_of_warpgroups = |all| {
            let usage = Usage { registers: 168, ..Usage::default() };
            faults(of_warpgroups, &usage, Some(&Disassembled { all, ..Disassembled::default() }))
        };
        assert_eq!(said_of_warpgroups(InstructionCounts { local: 0, ..all }), [""; 0]);
        let bad = InstructionCounts { products_of_warpgroups: 31, copies_bulk: 0, local: 2, ..all };
        let expected = [
            "has 31 products of warpgroups, expected 32",
            "has 0 bulk copies, expected 1",
            "has 2 accesses of local memory",
        ];
        assert_eq!(said_of_warpgroups(bad), expected);
        assert_eq!(said(&usage, None), ["has no loop that multiplies"]);
        assert_eq!(
            said(&Usage { stack_bytes: 8, ..usage.clone() }, Some(good)),
            ["takes 8 bytes of local memory"]
        );
        assert_eq!(resident_warps(kernel, &ARCHITECTURES[2], &usage), 24);
    }
}
