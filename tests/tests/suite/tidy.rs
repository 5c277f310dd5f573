//! Rules for the whole tree that the compiler does not check. Every finding names its file and line, and all
//! are reported at once.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use tests::pair::root;

/// A longer file has more than one job.
const MAX_LINES: usize = 800;

/// Extensions of hand-written files, and names of those without one.
const WRITTEN: [&str; 14] = [
    "rs",
    "md",
    "toml",
    "proto",
    "py",
    "sh",
    "yaml",
    "yml",
    "jinja",
    "txt",
    "Dockerfile",
    "Makefile",
    "run",
    "snap",
];

/// A hand-written file.
struct Written {
    /// Relative to the repository's root.
    path: String,
    text: String,
}

impl Written {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// All hand-written files, without build output and hidden folders.
fn written_files() -> anyhow::Result<Vec<Written>> {
    let root = root();
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let hidden = name.starts_with('.') && ![".ci", ".config"].contains(&name.as_str());
            if hidden || ["target", "__pycache__"].contains(&name.as_str()) || path.is_symlink() {
                continue;
            }
            let ending =
                path.extension().map_or(name.clone(), |ending| ending.to_string_lossy().into_owned());
            if path.is_dir() {
                folders.push(path);
            } else if WRITTEN.contains(&ending.as_str()) {
                let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                files.push(Written { path: from_root(&path, &root), text });
            }
        }
    }
    ensure!(files.len() > 100, "only {} files were found under {}", files.len(), root.display());
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn from_root(path: &Path, root: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

/// Fails with all findings.
fn report(findings: &[String]) -> anyhow::Result<()> {
    ensure!(findings.is_empty(), "{} findings:\n  {}", findings.len(), findings.join("\n  "));
    Ok(())
}

/// `PATH:LINE` of each line for which `is_bad` returns a message, with that message.
fn lines_where(files: &[Written], is_bad: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut findings = Vec::new();
    for file in files {
        for (i, line) in file.text.lines().enumerate() {
            if let Some(why) = is_bad(line) {
                findings.push(format!("{}:{}: {why}", file.path, i + 1));
            }
        }
    }
    findings
}

#[test]
fn sources_contain_no_todo_markers() -> anyhow::Result<()> {
    // Assembled here, so that this file does not match itself.
    let leftovers = ["todo!", "unimplemented!", "dbg!"].map(|name| format!("{name}("));
    let markers = [["FIX", "ME"], ["XX", "X"], ["TO", "DO"], ["HA", "CK"]].map(|halves| halves.concat());
    let is_word = |line: &str, word: &str| {
        let alone = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
        line.match_indices(word).any(|(at, _)| {
            alone(line[..at].chars().next_back()) && alone(line[at + word.len()..].chars().next())
        })
    };
    let mut findings = lines_where(&written_files()?, |line| {
        let marker = markers.iter().find(|marker| is_word(line, marker));
        marker.map(|marker| format!("`{marker}` is left"))
    });
    let rust: Vec<Written> = written_files()?.into_iter().filter(Written::is_rust).collect();
    findings.extend(lines_where(&rust, |line| {
        leftovers
            .iter()
            .find(|leftover| line.contains(*leftover))
            .map(|leftover| format!("`{leftover}..)` is left"))
    }));
    report(&findings)
}

#[test]
fn no_file_is_too_long() -> anyhow::Result<()> {
    let mut findings = Vec::new();
    for file in written_files()? {
        let lines = file.text.lines().count();
        if lines > MAX_LINES && !file.path.ends_with(".snap") && !file.path.ends_with(".txt") {
            findings.push(format!("{} has {lines} lines, at most {MAX_LINES}: split it by job", file.path));
        }
    }
    report(&findings)
}

#[test]
fn every_rust_file_has_module_documentation() -> anyhow::Result<()> {
    let rust = written_files()?.into_iter().filter(Written::is_rust);
    let silent = rust.filter(|file| !file.text.starts_with("//! "));
    report(
        &silent
            .map(|file| format!("{} does not begin with `//! ` and its job", file.path))
            .collect::<Vec<_>>(),
    )
}

#[test]
fn unsafe_code_stays_in_the_engine() -> anyhow::Result<()> {
    let mut findings = Vec::new();
    let elsewhere: Vec<Written> = written_files()?
        .into_iter()
        .filter(|file| file.is_rust() && !file.path.starts_with("engine/"))
        .collect();
    for file in &elsewhere {
        let is_root = ["src/lib.rs", "src/main.rs"].iter().any(|end| file.path.ends_with(end));
        if is_root && !file.text.contains("\n#![forbid(unsafe_code)]\n") {
            findings.push(format!("{} lacks #![forbid(unsafe_code)]", file.path));
        }
    }
    let blocks = ["{", "fn ", "impl ", "extern "].map(|what| ["unsafe ", what].concat());
    findings.extend(lines_where(&elsewhere, |line| {
        let code = line.split("//").next().unwrap_or_default();
        blocks.iter().find(|block| code.contains(*block)).map(|block| format!("`{block}`"))
    }));
    report(&findings)
}

/// A line of the log in JSON has keys of its own. A field with the name of one would be a second such key.
#[test]
fn no_field_of_the_log_has_the_name_of_a_key() -> anyhow::Result<()> {
    let keys = ["message", "target", "level", "timestamp", "span", "spans"];
    let mut findings = Vec::new();
    for file in written_files()?.iter().filter(|file| file.is_rust()) {
        for call in file.text.split("tracing::").skip(1) {
            let Some((name, arguments)) = call.split_once("!(") else { continue };
            if !["trace", "debug", "info", "warn", "error"].contains(&name) {
                continue;
            }
            // Fields come before the message, which is quoted.
            let fields = arguments.split('"').next().unwrap_or_default().split(',');
            let names = fields.map(|field| field.split('=').next().unwrap_or_default().trim());
            let names = names.map(|name| name.trim_start_matches(['%', '?']));
            let at_fault = names.filter(|name| keys.contains(name));
            findings.extend(at_fault.map(|name| format!("{}: a field is named `{name}`", file.path)));
        }
    }
    report(&findings)
}

#[test]
fn nothing_refers_to_paths_outside_the_repository() -> anyhow::Result<()> {
    let outside =
        [["/wor", "k/"], ["../sha", "red"], ["/ro", "ot/"], ["/ho", "me/"]].map(|halves| halves.concat());
    let is_fine = |path: &str| {
        // Images and scripts refer to their own machines.
        path.starts_with("deploy/") || path.starts_with(".ci/")
    };
    let files: Vec<Written> = written_files()?.into_iter().filter(|file| !is_fine(&file.path)).collect();
    report(&lines_where(&files, |line| {
        outside
            .iter()
            .find(|path| line.contains(*path))
            .map(|path| format!("`{path}` is not in the repository"))
    }))
}

#[test]
fn links_in_documents_resolve() -> anyhow::Result<()> {
    let root = root();
    let mut findings = Vec::new();
    let mut checked = 0;
    for file in written_files()?.into_iter().filter(|file| file.path.ends_with(".md")) {
        let folder = root.join(&file.path).parent().map_or(root.clone(), Path::to_owned);
        for (line, target) in relative_links(&file.text) {
            checked += 1;
            let path: PathBuf = folder.join(target.split('#').next().unwrap_or_default());
            if !path.exists() {
                findings.push(format!("{}:{line}: {target} is not there", file.path));
            }
        }
    }
    ensure!(checked > 10, "only {checked} links were found");
    report(&findings)
}

#[test]
fn every_alert_has_a_runbook_section() -> anyhow::Result<()> {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).context(path.to_owned());
    let alerts = read("deploy/observability/alerts.yml")?;
    let alerts: Vec<&str> =
        alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::trim).collect();
    ensure!(alerts.len() > 5, "only {alerts:?} were found");
    let runbook = read("docs/runbook.md")?;
    let sections: Vec<(&str, &str)> =
        runbook.split("\n## ").skip(1).filter_map(|section| section.split_once('\n')).collect();
    let mut findings = Vec::new();
    for alert in &alerts {
        match sections.iter().find(|(title, _)| title == alert) {
            None => findings.push(format!("docs/runbook.md has no section `## {alert}`")),
            Some((_, text)) => {
                let parts = ["**Means.**", "**Look at.**", "**Do.**"];
                let missing = parts.iter().filter(|part| !text.contains(**part));
                findings.extend(missing.map(|part| format!("docs/runbook.md, {alert}: no {part}")));
            }
        }
    }
    let gone = sections.iter().filter(|(title, _)| !alerts.contains(title));
    findings.extend(gone.map(|(title, _)| format!("docs/runbook.md: there is no alert {title}")));
    report(&findings)
}

#[test]
fn the_configuration_page_matches_the_code() -> anyhow::Result<()> {
    let page = std::fs::read_to_string(root().join("docs/configuration.md"))?;
    ensure!(
        page == tests::configuration::page(),
        "docs/configuration.md is out of date: cargo run --package tests --example configuration -- docs/configuration.md"
    );
    Ok(())
}

/// A server warns of variables that no server reads, so it has a list of the settings of all of them.
#[test]
fn the_list_of_settings_matches_the_code() -> anyhow::Result<()> {
    let listed: Vec<&str> = service::config::settings().collect();
    let expected = tests::configuration::settings();
    ensure!(
        listed.iter().eq(&expected),
        "service/src/config/settings.txt must have these lines:\n{}",
        Vec::from_iter(expected).join("\n")
    );
    Ok(())
}

/// `test = false` of each program saves building it a second time, but tests in it would never run.
#[test]
fn programs_contain_no_tests() -> anyhow::Result<()> {
    let is_program = |file: &Written| file.path.contains("src/bin/") || file.path.ends_with("src/main.rs");
    let mut files = written_files()?;
    files.retain(|file| file.is_rust() && is_program(file));
    ensure!(files.len() >= 10, "only {} files of programs were found", files.len());
    report(&lines_where(&files, |line| {
        let is_test = ["#[test]", "#[cfg(test)]", "#[tokio::test"].iter().any(|start| line.contains(start));
        is_test.then(|| "a program's tests belong in its library".to_owned())
    }))
}

#[test]
fn the_metrics_page_matches_the_code() -> anyhow::Result<()> {
    let page = std::fs::read_to_string(root().join("docs/metrics.md"))?;
    ensure!(
        page == tests::metrics_reference::page(),
        "docs/metrics.md is out of date: cargo run --package tests --example metrics_reference -- docs/metrics.md"
    );
    Ok(())
}

/// Line and target of each link `](target)` within the repository, except in code blocks.
fn relative_links(text: &str) -> Vec<(usize, &str)> {
    let mut links = Vec::new();
    let mut in_code = false;
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for part in line.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default().trim();
            let leaves = target.contains("://") || target.starts_with("mailto:") || target.starts_with('#');
            if !leaves && !target.is_empty() {
                links.push((i + 1, target));
            }
        }
    }
    links
}
