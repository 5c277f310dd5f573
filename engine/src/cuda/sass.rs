//! Parses machine code as CUDA's disassembler prints it: which loads a kernel's main loop issues before its
//! first product, how wide they are, and instructions that should not be in it. `make kernels-check` checks
//! kernels with it, since the compiler may move loads behind the products that they should precede, which
//! neither results nor register counts show.

use std::path::PathBuf;
use std::process::Command;

use super::CudaError;

/// Counts of instructions in a kernel's machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct InstructionCounts {
    /// Loads of 16 bytes from global memory, and narrower loads.
    pub(super) loads_128: u32,
    pub(super) loads_narrow: u32,
    /// Copies of 16 bytes from global to shared memory.
    pub(super) copies_128: u32,
    /// Bulk copies from global to shared memory.
    pub(super) copies_bulk: u32,
    /// Tensor core products, of warps and of warpgroups.
    pub(super) products: u32,
    /// Those of warpgroups.
    pub(super) products_of_warpgroups: u32,
    /// Loads and stores of local memory (register spills).
    pub(super) local: u32,
    /// Longest run of 16-byte loads from global memory without a store to shared memory, barrier or branch in
    /// between.
    pub(super) loads_in_flight: u32,
}

/// The innermost loop that contains the most products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct MainLoop {
    pub(super) all: InstructionCounts,
    /// Loads of 16 bytes before the first product.
    pub(super) loads_before_product: u32,
    /// Number of instructions.
    pub(super) instructions: u32,
    /// Loads of 16 bytes from shared memory.
    pub(super) shared_128: u32,
    /// Conversions of integers to floats: a sign of divisions by numbers unknown to the compiler.
    pub(super) conversions: u32,
}

/// The machine code of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Disassembled {
    pub(super) kernel: String,
    pub(super) all: InstructionCounts,
    /// `None` if no loop contains products.
    pub(super) main_loop: Option<MainLoop>,
}

/// Disassembles a cubin. The disassembler is next to NVRTC's library as in a toolkit (`bin` beside `lib` or
/// `lib64`), or on the path.
pub(super) fn disassemble(cubin: &[u8]) -> Result<Vec<Disassembled>, CudaError> {
    let refuse = |reason: String| CudaError::Driver { action: "be disassembled", reason };
    let name = format!("outrider-{}-{:x}.cubin", std::process::id(), cubin.as_ptr() as usize);
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, cubin).map_err(|error| refuse(error.to_string()))?;
    let output = Command::new(program()).arg("-c").arg(&path).output();
    let removed = std::fs::remove_file(&path);
    let output = output.map_err(|error| refuse(format!("nvdisasm: {error}; deploy/nvrtc.sh fetches it")))?;
    removed.map_err(|error| refuse(error.to_string()))?;
    if !output.status.success() {
        return Err(refuse(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(read(&String::from_utf8_lossy(&output.stdout)))
}

fn program() -> PathBuf {
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut beside = std::env::split_paths(&folders).map(|folder| folder.join("../bin/nvdisasm"));
    beside.find(|program| program.is_file()).unwrap_or_else(|| "nvdisasm".into())
}

/// An instruction, or the label of a branch target.
enum Line<'a> {
    Label(&'a str),
    Instruction { name: &'a str, branch_to: Option<&'a str> },
}

/// Parses the disassembler's output.
fn read(text: &str) -> Vec<Disassembled> {
    let mut kernels: Vec<(String, Vec<Line<'_>>)> = Vec::new();
    for line in text.lines() {
        let line = line.trim();
        if let Some(kernel) = line.strip_prefix(".text.").and_then(|rest| rest.strip_suffix(':')) {
            kernels.push((kernel.to_owned(), Vec::new()));
        } else if let Some((_, lines)) = kernels.last_mut() {
            lines.extend(line_of(line));
        }
    }
    let of = |(kernel, lines): (String, Vec<Line<'_>>)| Disassembled {
        kernel,
        all: census(&lines),
        main_loop: main_loop(&lines),
    };
    kernels.into_iter().map(of).collect()
}

fn line_of(line: &str) -> Option<Line<'_>> {
    if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L_")) {
        return Some(Line::Label(label));
    }
    // `/*0150*/  @P0 BRA `(.L_x_0) ;`
    let code = line.strip_prefix("/*")?.split_once("*/")?.1.trim();
    let code = if code.starts_with('@') { code.split_once(' ')?.1.trim() } else { code };
    let name = code.split([' ', ';']).next().filter(|name| !name.is_empty())?;
    let branch_to = code.split_once("`(").and_then(|(_, rest)| rest.split(')').next());
    Some(Line::Instruction { name, branch_to: branch_to.filter(|_| name.starts_with("BRA")) })
}

fn names<'a>(lines: &'a [Line<'a>]) -> impl Iterator<Item = &'a str> {
    lines.iter().filter_map(|line| match line {
        Line::Label(_) => None,
        Line::Instruction { name, .. } => Some(*name),
    })
}

fn has(name: &str, kind: &str, width: &str) -> bool {
    let mut words = name.split('.');
    words.next() == Some(kind) && (width.is_empty() || words.any(|word| word == width))
}

fn is_product(name: &str) -> bool {
    ["HMMA", "IMMA", "QMMA"].iter().any(|kind| has(name, kind, "")) || is_product_of_warpgroup(name)
}

fn is_product_of_warpgroup(name: &str) -> bool {
    ["HGMMA", "IGMMA", "QGMMA"].iter().any(|kind| has(name, kind, ""))
}

fn count<'a>(lines: &'a [Line<'a>], is: impl Fn(&str) -> bool) -> u32 {
    names(lines).filter(|name| is(name)).count() as u32
}

fn census(lines: &[Line<'_>]) -> InstructionCounts {
    let loads_128 = count(lines, |name| has(name, "LDG", "128"));
    InstructionCounts {
        loads_128,
        loads_narrow: count(lines, |name| has(name, "LDG", "")) - loads_128,
        copies_128: count(lines, |name| has(name, "LDGSTS", "128")),
        copies_bulk: count(lines, |name| has(name, "UBLKCP", "")),
        products: count(lines, is_product),
        products_of_warpgroups: count(lines, is_product_of_warpgroup),
        local: count(lines, |name| has(name, "LDL", "") || has(name, "STL", "")),
        loads_in_flight: loads_in_flight(lines),
    }
}

/// Longest run of 16-byte loads that are all issued before the first result is used.
fn loads_in_flight(lines: &[Line<'_>]) -> u32 {
    let (mut run, mut longest) = (0, 0);
    for line in lines {
        match line {
            Line::Instruction { name, .. } if has(name, "LDG", "128") => run += 1,
            Line::Instruction { name, branch_to: None } => {
                let waits = ["STS", "BAR", "BRA", "EXIT"].iter().any(|kind| has(name, kind, ""));
                run = if waits { 0 } else { run };
            }
            Line::Instruction { .. } | Line::Label(_) => run = 0,
        }
        longest = longest.max(run);
    }
    longest
}

/// The loop with the most products. A loop is the code between a branch and an earlier label that it jumps
/// to.
fn main_loop(lines: &[Line<'_>]) -> Option<MainLoop> {
    let place = |label: &str| lines.iter().position(|line| matches!(line, Line::Label(at) if *at == label));
    let mut best: Option<&[Line<'_>]> = None;
    for (end, line) in lines.iter().enumerate() {
        let Line::Instruction { branch_to: Some(label), .. } = line else { continue };
        let Some(begin) = place(label).filter(|&begin| begin < end) else { continue };
        let body = &lines[begin..end];
        // Code that is placed after the kernel's end, where threads wait, jumps back over all that precedes it.
        if names(body).any(|name| name == "EXIT") {
            continue;
        }
        let products = count(body, is_product);
        // Of nested loops take the inner one, which is shorter.
        let better = best.is_none_or(|best| {
            let before = count(best, is_product);
            products > before || (products == before && body.len() < best.len())
        });
        if products > 0 && better {
            best = Some(body);
        }
    }
    best.map(|body| {
        let first = names(body).take_while(|name| !is_product(name));
        MainLoop {
            all: census(body),
            loads_before_product: first.filter(|name| has(name, "LDG", "128")).count() as u32,
            instructions: count(body, |_| true),
            shared_128: count(body, |name| has(name, "LDS", "128")),
            conversions: count(body, |name| has(name, "I2F", "") || has(name, "I2FP", "")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
.text.product:
        /*0000*/                   LDG.E R6, desc[UR8][R2.64] ;
        /*0010*/                   ISETP.GT.U32.AND P0, PT, R71, R0, PT ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDG.E.128 R8, desc[UR8][R2.64] ;
        /*0040*/                   LDG.E.128.CONSTANT R12, desc[UR8][R4.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R16, R8, R12, R16 ;
        /*0060*/                   LDG.E.128 R8, desc[UR8][R2.64] ;
        /*0070*/                   I2FP.F32.U32 R9, R10 ;
        /*0080*/                   HMMA.16816.F32.BF16 R16, R8, R12, R16 ;
        /*0090*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*00a0*/                   LDL R1, [R1] ;
        /*00b0*/                   EXIT ;
.L_x_2:
        /*00c0*/                   BRA `(.L_x_2);
.text.copy:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR8][R4.64] ;
        /*0010*/                   LDGDEPBAR ;
        /*0020*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
";

    const PARTS: &str = "
.text.apart:
        /*0000*/                   LDG.E.128 R8, desc[UR8][R2.64] ;
        /*0010*/                   STS.128 [R1], R8 ;
        /*0020*/                   LDG.E.128 R12, desc[UR8][R2.64] ;
        /*0030*/                   STS.128 [R1+0x10], R12 ;
.text.together:
        /*0000*/                   LDG.E.128 R8, desc[UR8][R2.64] ;
        /*0010*/                   IADD3 R1, R1, R2, RZ ;
        /*0020*/                   LDG.E.128 R12, desc[UR8][R2.64] ;
        /*0030*/                   STS.128 [R1], R8 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
";

    #[test]
    fn loads_that_wait_for_one_another_are_told_from_those_that_do_not() {
        let counted: Vec<u32> = read(PARTS).iter().map(|kernel| kernel.all.loads_in_flight).collect();
        assert_eq!(counted, [1, 2]);
    }

    #[test]
    fn loads_before_the_first_product_of_the_main_loop_are_counted() {
        let [product, copy] = &read(TEXT)[..] else { panic!("two kernels") };
        assert_eq!(product.kernel, "product");
        let all = InstructionCounts {
            loads_128: 3,
            loads_narrow: 1,
            copies_128: 0,
            copies_bulk: 0,
            products: 2,
            products_of_warpgroups: 0,
            local: 1,
            loads_in_flight: 3,
        };
        assert_eq!(product.all, all);
        let main_loop = product.main_loop.unwrap();
        assert_eq!(
            (main_loop.loads_before_product, main_loop.all.loads_128, main_loop.conversions),
            (2, 3, 1)
        );
        assert_eq!((main_loop.all.local, main_loop.instructions), (0, 6));
        assert_eq!((copy.all.copies_128, copy.all.loads_narrow, copy.main_loop), (1, 0, None));
        assert_eq!((copy.all.copies_bulk, copy.all.products, copy.all.products_of_warpgroups), (1, 1, 1));
    }
}
