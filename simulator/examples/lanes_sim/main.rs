//! Measures the choice of k on a virtual clock. The documentation of `simulator` lists what is simulated and
//! what is left out. All numbers are simulated.
//!
//!     cargo run -p outrider-simulator --example lanes_sim -- \
//!         [quick] [map|step|trees|types|mixed|overlap|scale|ablation ..] [--svg FILE] [--cell SEQUENCES,ACCEPTANCE ..]
//!         [--rule NAME=VALUE ..] [--without MECHANISM+MECHANISM ..] [PROFILE.toml ..]
//!
//! Default profiles: the shipped ones. `mixed`, `overlap` and `scale` use only the first profile; the other
//! parts use each of them. The ablation runs only on request. Profiles in `held_out/` are not used for
//! tuning.
//! The last line has the smallest ratios of the maps.

mod ablation;
mod cell;
mod lanes;
mod map;
mod rules;
mod scale;
mod step;
mod svg;
mod trees;
mod types;

use std::path::PathBuf;

use scheduling::profile::Profile;
use simulator::{ENDLESS, Experiment, RequestKind};

/// Maximum k; routers use 8 by default.
const MAX_K: u32 = 10;

/// Number of seeds that each result is averaged over.
const SEEDS: u64 = 5;

/// The shipped profiles; those with published goals first.
const SHIPPED: [&str; 3] = ["70b-8xh100-l4.toml", "8b-h100.toml", "cpu-pair.toml"];

/// Command line arguments.
#[derive(Debug, Default)]
struct Args {
    quick: bool,
    /// Points of the map to explain: sequences and acceptance.
    cells: Vec<(u32, f64)>,
    parts: Vec<String>,
    /// Output file for the picture of the maps.
    svg: Option<PathBuf>,
    profiles: Vec<PathBuf>,
    /// Mechanisms that the ablation leaves out; empty: each one separately.
    without: Vec<String>,
    /// The rules.
    experiment: Experiment,
}

impl Args {
    fn parse() -> Result<Self, String> {
        let mut args = Self::default();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                "quick" => args.quick = true,
                "map" | "step" | "trees" | "types" | "mixed" | "overlap" | "scale" | "ablation" => {
                    args.parts.push(word)
                }
                // The picture needs maps, and nothing else unless that is requested.
                "--svg" => {
                    args.svg = words.next().map(PathBuf::from);
                    args.parts.push("map".to_owned());
                }
                "--cell" => {
                    let point = words.next().and_then(|point| point_of(&point));
                    let expected =
                        "--cell requires SEQUENCES,ACCEPTANCE, such as 64,0.8: 1 to 65536 and 0 to 1";
                    args.cells.push(point.ok_or(expected)?);
                    args.parts.push("cell".to_owned());
                }
                "--without" => args.without.push(words.next().unwrap_or_default()),
                "--rule" => rules::set(&mut args.experiment, &words.next().unwrap_or_default())?,
                _ if word.starts_with('-') => return Err(format!("no option is called {word}")),
                _ => args.profiles.push(word.into()),
            }
        }
        Ok(args)
    }

    fn has(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }

    fn load(&self) -> Result<Vec<Profile>, String> {
        let shipped = || {
            let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/profiles"));
            SHIPPED.iter().map(|name| folder.join(name)).collect()
        };
        let paths: Vec<PathBuf> = if self.profiles.is_empty() { shipped() } else { self.profiles.clone() };
        paths
            .iter()
            .map(|path| {
                let named = |error: String| format!("{}: {error}", path.display());
                let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
                Profile::parse(&text).map_err(|error| named(error.to_string()))
            })
            .collect()
    }
}

/// Parses a point of the map.
fn point_of(word: &str) -> Option<(u32, f64)> {
    let (sequences, acceptance) = word.split_once(',')?;
    let (sequences, acceptance): (u32, f64) = (sequences.parse().ok()?, acceptance.parse().ok()?);
    let is_possible = (1..=1 << 16).contains(&sequences) && (0.0..=1.0).contains(&acceptance);
    is_possible.then_some((sequences, acceptance))
}

/// Endless sequences of one kind.
fn one_kind(context: u32) -> Vec<RequestKind> {
    vec![RequestKind { task_type: String::new(), share: 1.0, prompt_tokens: context, output_tokens: ENDLESS }]
}

#[expect(clippy::print_stdout, reason = "results go to standard output")]
fn print_line(line: &str) {
    println!("{line}");
}

fn main() -> Result<(), String> {
    let args = Args::parse()?;
    let profiles = args.load()?;
    let experiment = &args.experiment;
    print_line("All numbers are simulated; nothing was measured.");
    let mut worst = map::Worst::default();
    let mut maps = Vec::new();
    for profile in &profiles {
        print_line(&format!("\n# {}", profile.name));
        args.cells.iter().for_each(|point| cell::print(profile, experiment, *point));
        if args.has("map") {
            let (of_map, points) = map::print(profile, experiment, args.quick);
            worst = worst.and(of_map);
            maps.push((profile.name.clone(), points));
        }
        if args.has("step") {
            step::print(profile, experiment);
        }
        if args.has("trees") {
            trees::print(profile, experiment);
        }
        if args.has("types") {
            types::print(profile, experiment);
        }
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, svg::picture(&maps)).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if args.parts.iter().any(|part| part == "ablation") {
        ablation::print(&profiles, &args.without);
    }
    let first = &profiles[0];
    if args.has("mixed") {
        lanes::mixed(first, experiment, args.quick);
    }
    if args.has("overlap") {
        lanes::overlap(first, experiment);
    }
    if args.has("scale") {
        scale::print(first, experiment);
    }
    if args.has("map") {
        print_line(&format!("\nmin_ratio_vs_best={:.2} min_ratio_vs_off={:.2}", worst.vs_best, worst.vs_off));
    }
    Ok(())
}
