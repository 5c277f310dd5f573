//! The instruction set of this process: the fastest one of the CPU, or a lower one set by the environment
//! variable `OUTRIDER_ISA` or a program's option, so that every process and every test can run as on an older
//! CPU. Chosen once, before the first kernel runs. It affects speed and no bit (docs/contract.md C).

use std::sync::{LazyLock, OnceLock};

use super::dispatch::Isa;
use crate::KernelError;

/// Name of an instruction set of this CPU; empty or absent means the fastest.
const VARIABLE: &str = "OUTRIDER_ISA";

/// The choice for every kernel of this process. An unknown name is reported at every use.
static IN_USE: OnceLock<Result<Isa, String>> = OnceLock::new();

impl Isa {
    /// The instruction set of this process.
    pub(crate) fn in_use() -> Result<Self, KernelError> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the choice holds for the process, tests included, and not for one engine's options"
        )]
        let of_environment = || match std::env::var(VARIABLE) {
            Ok(name) if !name.is_empty() => Self::named(&name).ok_or(name),
            _ => Ok(Self::best()),
        };
        IN_USE.get_or_init(of_environment).clone().map_err(missing)
    }

    fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|isa| isa.name() == name)
    }
}

fn missing(name: String) -> KernelError {
    KernelError::MissingInstructionSet { name, available: instruction_sets().join(", ") }
}

/// Selects the instruction set that the process computes with, one that this CPU supports. The first kernel
/// call fixes the choice, so call this before an engine is loaded. A later call must name the same one.
pub fn use_instruction_set(name: &str) -> Result<(), KernelError> {
    let isa = Isa::named(name).ok_or_else(|| missing(name.to_owned()))?;
    match IN_USE.get_or_init(|| Ok(isa)) {
        Ok(in_use) if *in_use == isa => Ok(()),
        _ => Err(KernelError::InstructionSetInUse(name.to_owned())),
    }
}

/// Returns the name of the instruction set that this process computes with.
pub fn instruction_set() -> Result<&'static str, KernelError> {
    Isa::in_use().map(Isa::name)
}

/// Returns the names of all instruction sets of this CPU, the fastest first.
pub fn instruction_sets() -> Vec<&'static str> {
    Isa::all().into_iter().map(Isa::name).collect()
}

/// Returns the CPU's name, or its architecture if it reports none.
pub fn cpu_name() -> String {
    #[cfg(target_arch = "x86_64")]
    let name = brand_string();
    #[cfg(not(target_arch = "x86_64"))]
    let name = String::new();
    if name.is_empty() { std::env::consts::ARCH.to_owned() } else { name }
}

/// The family number of an AMD CPU; `None` for other vendors.
pub(super) fn amd_family() -> Option<u32> {
    /// Read once: in a virtual machine CPUID exits to the hypervisor.
    static FAMILY: LazyLock<Option<u32>> = LazyLock::new(read_amd_family);
    *FAMILY
}

fn read_amd_family() -> Option<u32> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        let vendor = __cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
        // Bits 8 to 11 and 20 to 27, which AMD adds up.
        let signature = __cpuid(1).eax;
        (name == b"AuthenticAMD").then_some((signature >> 8 & 0xf) + (signature >> 20 & 0xff))
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// The processor brand string of CPUID; empty if there is none.
#[cfg(target_arch = "x86_64")]
fn brand_string() -> String {
    use std::arch::x86_64::__cpuid;
    /// This leaf returns the highest extended leaf; leaves 2 to 4 after it hold the string.
    const EXTENDED: u32 = 0x8000_0000;
    if __cpuid(EXTENDED).eax < EXTENDED + 4 {
        return String::new();
    }
    let words = (2..=4).map(|leaf| __cpuid(EXTENDED + leaf)).flat_map(|r| [r.eax, r.ebx, r.ecx, r.edx]);
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_is_found_by_its_name() {
        for isa in Isa::all() {
            assert_eq!(Isa::named(isa.name()), Some(isa));
        }
        assert_eq!(Isa::named("mmx"), None);
    }

    #[test]
    fn an_unknown_name_is_rejected_with_the_available_ones() {
        let text = use_instruction_set("mmx").unwrap_err().to_string();
        assert!(text.contains("`mmx`") && text.contains("portable"), "{text}");
    }
}
