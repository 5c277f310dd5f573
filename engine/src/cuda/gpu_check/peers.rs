//! Other programs on the same device in the same run, if they are installed: transformers with the bundled pair,
//! and vLLM with the steps of the roofline section. The lines of their scripts are printed as they are.

use std::process::Command;

use super::decode::{LLAMA_8B, TINY, write_config};
use super::roofline::{Sizes, VERIFY_ROWS};
use super::{CheckTarget, Report, speculation};
use crate::EngineError;

/// Decodes the bundled pair with transformers: the target alone, and with the draft as its assistant model.
pub(super) fn transformers(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let sizes = if target.is_dry { speculation::DRY } else { speculation::PAIR };
    let device = if target.is_dry { "cpu".to_owned() } else { format!("cuda:{}", target.ordinal) };
    let mut script = script(target, "gpu-peer.py");
    script.args([&target.pair.1, &target.pair.0]).args(["--device", &device]);
    set(&mut script, "--tokens", &[sizes.drawn]);
    set(&mut script, "--drafted", &[sizes.drafted]);
    set(&mut script, "--prompt", &[sizes.prompt]);
    run(script, "transformers with assistant_model", report);
    Ok(())
}

/// Times the steps of the roofline section with vLLM, except those with top-p. It loads the model twice,
/// because drafting is an option of the whole engine.
pub(super) fn vllm(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let sizes = Sizes::of(target);
    let config = write_config(if target.is_dry { TINY } else { LLAMA_8B }, "vllm")?;
    let on_device = || {
        let mut script = script(target, "gpu-peer-vllm.py");
        script.arg(&config).env("CUDA_VISIBLE_DEVICES", target.ordinal.to_string());
        set(&mut script, "--contexts", &sizes.contexts);
        script
    };
    let mut one_row = on_device();
    set(&mut one_row, "--prompt", &[sizes.prompt_rows]);
    run(one_row, "vllm, one row and a prompt", report);
    let mut verify_rows = on_device();
    set(&mut verify_rows, "--rows", &[VERIFY_ROWS]);
    set(&mut verify_rows, "--sequences", &sizes.sequences);
    run(verify_rows, "vllm, verify rows", report);
    std::fs::remove_file(&config).map_err(|source| EngineError::Io { path: config, source })
}

fn script(target: &CheckTarget, name: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg(target.peers.join(name));
    command
}

fn set(command: &mut Command, option: &str, numbers: &[usize]) {
    command.arg(option).args(numbers.iter().map(usize::to_string));
}

/// Prints the lines of a script, or why it did not run.
fn run(mut script: Command, case: &str, report: &mut Report<'_>) {
    match script.output() {
        Err(error) => report.skipped(case, format!("python3: {error}")),
        Ok(output) => {
            String::from_utf8_lossy(&output.stdout).lines().for_each(|line| report.say(line));
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                report.skipped(case, said.lines().last().unwrap_or("no output"));
            }
        }
    }
}
