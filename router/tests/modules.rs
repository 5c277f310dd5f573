//! The router's modules depend on each other exactly as drawn in ARCHITECTURE.md, without cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Reads the lines `a -> b c` of the fenced block after the words "router modules".
fn drawn() -> Arrows {
    let text = fs::read_to_string(root().join("../ARCHITECTURE.md")).expect("ARCHITECTURE.md exists");
    let block = text.split("router modules").nth(1).and_then(|rest| rest.split("```").nth(1));
    let lines = block.expect("ARCHITECTURE.md has a block of router modules").lines();
    lines
        .filter_map(|line| line.split_once("->"))
        .map(|(from, to)| (from.trim().to_owned(), to.split_whitespace().map(str::to_owned).collect()))
        .collect()
}

/// Reads the dependencies from the sources: `crate::b` in a file of module a, without comments.
fn used() -> Arrows {
    let mut arrows = Arrows::new();
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("an entry can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if let Some(module) = module_of(&path) {
                let code = fs::read_to_string(&path).expect("sources are UTF-8");
                let used = code.lines().flat_map(used_in_line).filter(|used| *used != module);
                arrows.entry(module.clone()).or_default().extend(used.map(str::to_owned));
            }
        }
    }
    arrows.retain(|_, used| !used.is_empty());
    arrows
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
fn in_circles(mut arrows: Arrows) -> BTreeSet<String> {
    loop {
        let users: BTreeSet<String> = arrows.keys().cloned().collect();
        arrows.values_mut().for_each(|used| used.retain(|module| users.contains(module)));
        let before = arrows.len();
        arrows.retain(|_, used| !used.is_empty());
        if arrows.len() == before {
            return arrows.into_keys().collect();
        }
    }
}

#[test]
fn modules_use_each_other_as_drawn() {
    let (drawn, used) = (drawn(), used());
    for module in drawn.keys().chain(used.keys()).collect::<BTreeSet<_>>() {
        let none = BTreeSet::new();
        let (is, should) = (used.get(module).unwrap_or(&none), drawn.get(module).unwrap_or(&none));
        assert_eq!(is, should, "dependencies of `{module}`: in the sources, and in ARCHITECTURE.md");
    }
}

#[test]
fn no_modules_use_each_other_in_a_circle() {
    assert_eq!(in_circles(used()), BTreeSet::new());
}

#[test]
fn a_circle_is_found() {
    let arrows = [("a", "b"), ("b", "c"), ("c", "b"), ("d", "a")];
    let arrows = arrows.map(|(from, to)| (from.to_owned(), BTreeSet::from([to.to_owned()])));
    let found: Vec<String> = in_circles(Arrows::from(arrows)).into_iter().collect();
    assert_eq!(found, ["a", "b", "c", "d"], "modules that lead into a cycle are included");
}
