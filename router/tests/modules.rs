//! The router's modules depend on each other exactly as drawn in ARCHITECTURE.md, without cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Dependencies = BTreeMap<String, BTreeSet<String>>;

/// Reads the lines `a -> b c` of the fenced block after the words "router modules".
fn read_architecture() -> Dependencies {
    let text = fs::read_to_string(root().join("../ARCHITECTURE.md")).expect("ARCHITECTURE.md exists");
    let block = text.split("router modules").nth(1).and_then(|rest| rest.split("```").nth(1));
    let lines = block.expect("ARCHITECTURE.md has a block of router modules").lines();
    lines
        .filter_map(|line| line.split_once("->"))
        .map(|(from, to)| (from.trim().to_owned(), to.split_whitespace().map(str::to_owned).collect()))
        .collect()
}

/// Reads the dependencies from the sources: `crate::b` in a file of module a, without comments.
fn read_sources() -> Dependencies {
    let mut dependencies = Dependencies::new();
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("an entry can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if let Some(module) = module_of(&path) {
                let code = fs::read_to_string(&path).expect("sources are UTF-8");
                let used = code.lines().flat_map(used_in_line).filter(|used| *used != module);
                dependencies.entry(module.clone()).or_default().extend(used.map(str::to_owned));
            }
        }
    }
    dependencies.retain(|_, used| !used.is_empty());
    dependencies
}

fn used_in_line(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split("crate::").skip(1).map(move |rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        assert!(end > 0, "write one module per line, so that this test can read it: {line}");
        &rest[..end]
    })
}

fn module_of(path: &Path) -> Option<String> {
    let inside = path.strip_prefix(root().join("src")).expect("the path is inside src");
    let first = inside.iter().next()?.to_str()?;
    let module = first.strip_suffix(".rs").unwrap_or(first);
    (!matches!(module, "lib" | "main")).then(|| module.to_owned())
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Modules in cycles: those that remain after repeatedly removing modules without dependencies.
fn modules_in_cycles(mut dependencies: Dependencies) -> BTreeSet<String> {
    loop {
        let users: BTreeSet<String> = dependencies.keys().cloned().collect();
        dependencies.values_mut().for_each(|used| used.retain(|module| users.contains(module)));
        let before = dependencies.len();
        dependencies.retain(|_, used| !used.is_empty());
        if dependencies.len() == before {
            return dependencies.into_keys().collect();
        }
    }
}

#[test]
fn module_dependencies_match_architecture_md() {
    let (documented, used) = (read_architecture(), read_sources());
    for module in documented.keys().chain(used.keys()).collect::<BTreeSet<_>>() {
        let none = BTreeSet::new();
        let (actual, expected) = (used.get(module).unwrap_or(&none), documented.get(module).unwrap_or(&none));
        assert_eq!(actual, expected, "dependencies of `{module}`: in the sources, and in ARCHITECTURE.md");
    }
}

#[test]
fn module_dependencies_have_no_cycle() {
    assert_eq!(modules_in_cycles(read_sources()), BTreeSet::new());
}

#[test]
fn a_cycle_is_found() {
    let dependencies = [("a", "b"), ("b", "c"), ("c", "b"), ("d", "a")];
    let dependencies = dependencies.map(|(from, to)| (from.to_owned(), BTreeSet::from([to.to_owned()])));
    let found: Vec<String> = modules_in_cycles(Dependencies::from(dependencies)).into_iter().collect();
    assert_eq!(found, ["a", "b", "c", "d"], "modules that lead into a cycle are included");
}
