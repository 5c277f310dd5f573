//! What subcommands print: results on standard output, notes on standard error.
//!
//! The standard library's macros panic where nobody reads any more (`outrider plan | head`) or the disk is
//! full, and a panic would lose a measurement or kill a running cluster. A reader that has left is no error.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

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
