//! What this program was built from: the version of the workspace, and the build that the variable
//! `OUTRIDER_BUILD` named while it was compiled, such as a commit (builds of images pass it on). Nothing else
//! is read: a build needs no git, is the same wherever it is repeated, and is not repeated for every commit.

use std::sync::LazyLock;

/// Version of the workspace, such as `0.1.0`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The build, such as `ccdfca0e`; empty if none was named.
pub const BUILD: &str = match option_env!("OUTRIDER_BUILD") {
    Some(build) => build,
    None => "",
};

const _: () = assert!(is_build(BUILD), "OUTRIDER_BUILD may hold ASCII letters, digits, `.` and `-` only");

/// Version and build as one text: `0.1.0+ccdfca0e`, or `0.1.0` without a build.
pub fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| joined(VERSION, BUILD));
    &TEXT
}

fn joined(version: &str, build: &str) -> String {
    if build.is_empty() { version.to_owned() } else { format!("{version}+{build}") }
}

/// Whether a build's name has only the characters of semantic versions.
const fn is_build(build: &str) -> bool {
    let bytes = build.as_bytes();
    let mut idx = 0;
    while idx < bytes.len() {
        if !(bytes[idx].is_ascii_alphanumeric() || matches!(bytes[idx], b'.' | b'-')) {
            return false;
        }
        idx += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_follows_the_version() {
        assert_eq!(joined("0.1.0", "ccdfca0e"), "0.1.0+ccdfca0e");
        assert_eq!(joined("0.1.0", ""), "0.1.0");
        assert_eq!(version(), joined(VERSION, BUILD));
    }

    #[test]
    fn a_build_is_part_of_one_word() {
        for (build, expected) in [
            ("", true),
            ("ccdfca0e", true),
            ("v1.2-rc.3", true),
            ("a_b", false),
            ("a b", false),
            ("a\n", false),
            ("\u{e9}", false),
        ] {
            assert_eq!(is_build(build), expected, "{build:?}");
        }
    }
}
