//! `outrider completions`: prints a script with which a shell completes this tool's subcommands and flags.

use std::process::ExitCode;

use clap_complete::aot::{Shell, generate};

use crate::output;

const EXAMPLES: &str = "\
Examples:
  # In this session of bash:
  source <(outrider completions bash)
  # In every session:
  outrider completions bash > ~/.local/share/bash-completion/completions/outrider
  outrider completions fish > ~/.config/fish/completions/outrider.fish
  # zsh reads it from a directory in $fpath:
  outrider completions zsh > ~/.zfunc/_outrider";

/// Arguments of `outrider completions`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// The shell that reads the script
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// Runs the subcommand for a tool with this command line.
pub fn main(args: &CompletionsArgs, mut tool: clap::Command) -> ExitCode {
    let name = tool.get_name().to_owned();
    let mut script = Vec::new();
    generate(args.shell, &mut tool, name, &mut script);
    output::finish(&String::from_utf8_lossy(&script))
}
