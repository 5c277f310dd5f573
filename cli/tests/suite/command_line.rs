//! The command line of `outrider`: where help and errors are printed, and their exit codes.

use std::process::Command;

#[test]
fn an_invalid_command_line_ends_with_the_code_of_a_bad_configuration() {
    for (arguments, code, expected) in [
        (&["--help"][..], 0, "Exit codes:"),
        (&["--help"], 0, "First steps:"),
        (&["bench", "--help"], 0, "--fail-unless-ship"),
        (&["bench", "--help"], 0, "the exit code is 4"),
        (&["up", "--help"], 0, "--weights"),
        (&["up", "--help"], 0, "--draft-device"),
        (&["up", "--weights", "fp4"], 64, "int4"),
        (&["distill", "--help"], 0, "what is interrupted before is lost"),
        (&["--version"], 0, "outrider "),
        (&[], 64, "Usage:"),
        (&["benchmark"], 64, "unrecognized subcommand"),
        (&["bench", "--threshold", "0"], 64, "expected a factor above 0"),
        (&["engine-bench"], 64, "--model"),
        (&["completions", "tcsh"], 64, "[possible values: bash, elvish, fish, powershell, zsh]"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_outrider")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        let (said, silent) = match code {
            0 => (&output.stdout, &output.stderr),
            _ => (&output.stderr, &output.stdout),
        };
        let said = String::from_utf8_lossy(said);
        assert!(said.contains(expected) && silent.is_empty(), "{arguments:?}: {said}");
    }
}

#[test]
fn every_shell_gets_subcommands_and_flags() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let arguments = ["completions", shell];
        let output = Command::new(env!("CARGO_BIN_EXE_outrider")).args(arguments).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{shell}: {output:?}");
        let script = String::from_utf8_lossy(&output.stdout);
        for name in ["engine-bench", "gpu-memory-utilization"] {
            assert!(script.contains(name), "{shell}: no {name} in {script}");
        }
    }
}
