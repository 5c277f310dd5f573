//! Compiles kernels with NVRTC to machine code of one architecture, and reads each kernel's resource usage
//! from the assembler's log. Needs no GPU.

use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError};

use cudarc::nvrtc::result::{compile_program, create_program, destroy_program, get_program_log};
use cudarc::nvrtc::sys;
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use super::CudaError;
use super::kernel_files::MachineCode;
use super::sources::{self, Source};
use super::toolkit::CudaVersion;

/// Compiler options of every file. No contraction to FMA: a product and a sum round twice, as in the twins.
pub(super) const OPTIONS: [&str; 3] = ["--std=c++17", "--fmad=false", "--ptxas-options=-v"];

/// Machine code of one file.
#[derive(Debug)]
pub(crate) struct Compiled {
    /// The cubin, as the driver loads it.
    pub(crate) cubin: Vec<u8>,
    /// Resource usage of each entry point.
    pub(crate) usage: Vec<Usage>,
}

/// Resource usage of an entry point, as the assembler reports it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Usage {
    /// Name of the kernel.
    pub(crate) kernel: String,
    /// Registers per thread.
    pub(crate) registers: u32,
    /// Register spills: bytes stored plus bytes loaded.
    pub(crate) spill_bytes: u32,
    /// Local memory (stack) per thread, in bytes.
    pub(crate) stack_bytes: u32,
    /// Static shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
    /// Whether the assembler let every product of a warpgroup wait for the one before it.
    pub(crate) is_serialized: bool,
}

/// Checks that NVRTC can be loaded; calling it without the library would panic.
pub(crate) fn check_present() -> Result<(), CudaError> {
    // SAFETY: loads a library of CUDA's, whose initialisers take no part in this process's invariants.
    let present = unsafe { sys::is_culib_present() };
    let advice = "install CUDA 13 (or pip's nvidia-cuda-nvrtc) and name its lib folder in LD_LIBRARY_PATH";
    if present { Ok(()) } else { Err(CudaError::LibraryMissing { library: "libnvrtc.so", advice }) }
}

/// Machine code of every file for an architecture such as `sm_90`, compiled on all cores, and the version of
/// the toolkit that compiled it. The result of the last architecture is cached, so that ranks on equal devices
/// share it.
pub(super) fn compile_all(arch: &str) -> Result<(MachineCode, CudaVersion), CudaError> {
    static COMPILED: Mutex<Option<(String, MachineCode)>> = Mutex::new(None);
    check_present()?;
    let toolkit = version()?;
    let mut last = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, code)) = last.as_ref().filter(|(compiled_for, _)| compiled_for == arch) {
        return Ok((code.clone(), toolkit));
    }
    let targets = sources::all().into_par_iter().filter_map(|source| Some((source, source.target(arch)?)));
    let compiled = targets.map(|(source, target)| Ok((source, compile(source, &target)?.cubin)));
    let code = compiled.collect::<Result<MachineCode, CudaError>>()?;
    *last = Some((arch.to_owned(), code.clone()));
    Ok((code, toolkit))
}

/// Version of the library. Call [`check_present`] first.
pub(super) fn version() -> Result<CudaVersion, CudaError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers.
    let said = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    said.result()
        .map_err(|error| CudaError::Driver { action: "report nvrtc's version", reason: error.to_string() })?;
    Ok(CudaVersion { major, minor })
}

/// Compiles a file for an architecture such as `sm_90`. Call [`check_present`] first.
pub(crate) fn compile(source: &Source, arch: &str) -> Result<Compiled, CudaError> {
    let failed = |log: String| CudaError::Compile { file: source.file, arch: arch.to_owned(), log };
    let text = CString::new(source.text()).map_err(|_| failed("the source holds a zero byte".to_owned()))?;
    let program = create_program(&text, None).map_err(|error| failed(error.to_string()))?;
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(OPTIONS.map(str::to_owned));
    // SAFETY: the program was created above and is destroyed below, once, after its last use.
    let (result, log) = unsafe {
        let result = compile_program(program, &options);
        (result, get_program_log(program).map(|log| text_of(&log)).unwrap_or_default())
    };
    let compiled = match result {
        Err(error) => Err(failed(format!("{error}: {}", log.trim()))),
        Ok(()) => cubin(program).map_err(failed).map(|cubin| Compiled { cubin, usage: usage_in(&log) }),
    };
    // SAFETY: as above.
    let destroyed = unsafe { destroy_program(program) };
    destroyed.map_err(|error| failed(error.to_string()))?;
    compiled
}

fn cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, String> {
    let mut size = 0;
    // SAFETY: the caller owns the program, which was compiled.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut size) }.result().map_err(|error| error.to_string())?;
    let mut cubin = vec![0u8; size];
    // SAFETY: as above; the buffer has the size that the library returned.
    unsafe { sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| error.to_string())?;
    Ok(cubin)
}

fn text_of(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Parses the output of `ptxas -v`.
fn usage_in(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    let mut serialized = Vec::new();
    for line in log.lines() {
        if line.contains("wgmma.mma_async instructions are serialized") {
            serialized.extend(line.split('\'').nth(1));
        }
        if let Some(rest) = line.split("entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Usage { kernel, ..Usage::default() });
        }
        let Some(usage) = all.last_mut() else { continue };
        if let Some(bytes) = number_before(line, " bytes stack frame") {
            usage.stack_bytes = bytes;
            usage.spill_bytes = number_before(line, " bytes spill stores").unwrap_or(0)
                + number_before(line, " bytes spill loads").unwrap_or(0);
        }
        if let Some(registers) = number_before(line, " registers") {
            usage.registers = registers;
            usage.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    for usage in &mut all {
        usage.is_serialized = serialized.contains(&usage.kernel.as_str());
    }
    all
}

fn number_before(line: &str, words: &str) -> Option<u32> {
    let before = &line[..line.find(words)?];
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(before, |i| &before[i + 1..]);
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_log_is_read() {
        let log = "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
            non wgmma instructions reading accumulator registers of a wgmma in the function 'embedding'\n\
            ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'draw' for 'sm_80'\n\
            ptxas info    : Function properties for draw\n\
            ptxas         .     16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 64 registers, used 1 barriers, 16 bytes cumulative stack size, 128 bytes smem\n\
            ptxas info    : Compiling entry function 'embedding' for 'sm_80'\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 14 registers, used 0 barriers, 380 bytes cmem[0]\n";
        let draw = Usage {
            kernel: "draw".to_owned(),
            registers: 64,
            spill_bytes: 16,
            stack_bytes: 16,
            shared_bytes: 128,
            is_serialized: false,
        };
        let embedding =
            Usage { kernel: "embedding".to_owned(), registers: 14, is_serialized: true, ..Usage::default() };
        assert_eq!(usage_in(log), [draw, embedding]);
    }
}
