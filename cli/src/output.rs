//! What subcommands print: results on standard output, notes on standard error.
//!
//! The standard library's macros panic where nobody reads any more (`outrider plan | head`) or the disk is
//! full, and a panic would lose a measurement or kill a running cluster. A reader that has left is no error.

use std::error::Error;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use crate::EXIT_USAGE;

/// Appends a line to a string, with the arguments of `writeln!`.
macro_rules! line {
    ($text:expr, $($part:tt)*) => {{
        use std::fmt::Write as _;
        writeln!($text, $($part)*).expect("a String can always be written to");
    }};
}
pub(crate) use line;

/// Prints the result of a subcommand and returns its exit code.
pub(crate) fn finish(text: &str) -> ExitCode {
    match print(text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("outrider: cannot write to standard output: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints the error of a subcommand on one line and returns its exit code. `is_usage`: the command line is
/// invalid.
pub(crate) fn failed(error: &dyn Error, is_usage: bool) -> ExitCode {
    note(&format!("outrider: {error}"));
    if is_usage { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
}

/// Writes a result to standard output.
pub(crate) fn print(text: &str) -> io::Result<()> {
    write(&mut io::stdout().lock(), text)
}

/// Writes a line to standard error. If that fails, nobody can be told.
pub(crate) fn note(line: &str) {
    write(&mut io::stderr().lock(), &format!("{line}\n")).ok();
}

fn write(output: &mut dyn Write, text: &str) -> io::Result<()> {
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
