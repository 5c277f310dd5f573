//! What the choice of k is worth, on a virtual clock: see `speculation::simulation` for what is played and what is left out. All numbers are
//! simulated.
//!
//!     cargo run -p outrider-speculation --example lanes_sim -- [quick] [map|step|mixed|overlap|scale ..] [PROFILE.toml ..]
//!
//! Without a profile: all that are shipped (the map and the step) or the first one (the rest). Ends with the smallest ratios of the maps.

mod lanes;
mod map;
mod scale;
mod step;

use std::path::PathBuf;

use speculation::profile::Profile;
use speculation::simulation::Kind;

/// k at most, as the router's default.
const MAX_K: u32 = 10;

/// Each number is the mean over so many seeds.
const SEEDS: u64 = 5;

/// The shipped profiles, the ones of the promise first.
const SHIPPED: [&str; 3] = ["70b-8xh100-l4.toml", "8b-h100.toml", "cpu-pair.toml"];

/// What the command line asks for.
#[derive(Debug, Default)]
struct Wanted {
    quick: bool,
    parts: Vec<String>,
    profiles: Vec<PathBuf>,
}

impl Wanted {
    fn parse() -> Self {
        let mut wanted = Self::default();
        for word in std::env::args().skip(1) {
            match word.as_str() {
                "quick" => wanted.quick = true,
                "map" | "step" | "mixed" | "overlap" | "scale" => wanted.parts.push(word),
                _ => wanted.profiles.push(word.into()),
            }
        }
        wanted
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

/// Sequences of one kind that never end.
fn one_kind(context: u32) -> Vec<Kind> {
    vec![Kind { task_type: String::new(), share: 1.0, prompt_tokens: context, output_tokens: 1 }]
}

#[expect(clippy::print_stdout, reason = "what it found is what this program is for")]
fn say(line: &str) {
    println!("{line}");
}

fn main() -> Result<(), String> {
    let wanted = Wanted::parse();
    let profiles = wanted.load()?;
    say("Simulated, nothing here was measured.");
    let mut worst = map::Worst::default();
    for profile in &profiles {
        say(&format!("\n# {}", profile.name));
        if wanted.has("map") {
            worst = worst.and(map::draw(profile, wanted.quick));
        }
        if wanted.has("step") {
            step::draw(profile);
        }
    }
    let first = &profiles[0];
    if wanted.has("mixed") {
        lanes::mixed(first, wanted.quick);
    }
    if wanted.has("overlap") {
        lanes::overlap(first);
    }
    if wanted.has("scale") {
        scale::draw(first);
    }
    if wanted.has("map") {
        say(&format!("\nmin_ratio_vs_best={:.2} min_ratio_vs_off={:.2}", worst.vs_best, worst.vs_off));
    }
    Ok(())
}
