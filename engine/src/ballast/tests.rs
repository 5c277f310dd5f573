//! Plans of ballast and the positions of its channels. `tests/suite/ballast.rs` checks on whole models that
//! no logit changes.

use std::path::Path;

use super::*;
use crate::model_config::tests::tiny;

fn config(hidden: usize, layers: usize, intermediate: usize) -> ModelConfig {
    let mut config = tiny();
    config.hidden_size = hidden;
    config.num_layers = layers;
    config.intermediate_size = intermediate;
    config.windows = vec![None; layers];
    config
}

fn added(parameters: u64, config: &ModelConfig) -> u64 {
    let ballast = Ballast::plan(parameters, config).unwrap();
    ballast.apply(config.clone()).num_parameters() - config.num_parameters()
}

#[test]
fn a_plan_adds_about_the_requested_size_and_never_nothing() {
    for config in [config(256, 6, 704), config(64, 4, 128), config(512, 2, 2048), config(128, 1, 33)] {
        let unit = (3 * config.hidden_size * WIDTH_UNIT * 2 * config.num_layers) as u64;
        for parameters in [1, 1_000, 700_000, 3_000_000, 50_000_000, 250_000_000] {
            let found = added(parameters, &config);
            assert!(found > 0 && found.abs_diff(parameters) <= unit, "{parameters}: {found}, unit {unit}");
            assert_eq!(
                Ballast::plan(parameters, &config).unwrap(),
                Ballast::plan(parameters, &config).unwrap()
            );
        }
    }
}

/// `make measure-servers` gives llama.cpp a target of the same sizes.
#[test]
fn the_target_of_llama_cpp_has_the_planned_sizes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let config = ModelConfig::load(&root.join("models/demo/target")).unwrap();
    let Ballast { enlarged_layers, enlarged_intermediate, .. } =
        Ballast::plan("250M".parse::<ParameterCount>().unwrap().0, &config).unwrap();
    let script = std::fs::read_to_string(root.join("tests/llama-cpp/servers.py")).unwrap();
    let expected = format!("\nBALLAST = \"{enlarged_layers},{enlarged_intermediate}\"\n");
    assert!(script.contains(&expected), "{expected}");
}

#[test]
fn too_much_ballast_is_rejected_with_the_limit() {
    let config = config(256, 6, 704);
    let text = Ballast::plan(1 << 40, &config).unwrap_err().to_string();
    let limit = text.split("at most ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    assert!(text.contains("ballast") && text.contains(&(1u64 << 40).to_string()), "{text}");
    assert!(added(limit.parse().unwrap(), &config) > 9_000_000_000, "{text}");
}

#[test]
fn every_slice_keeps_its_channels_first_and_in_order() {
    for (intermediate, wide) in [(704, 768), (704, 4096), (300, 512), (33, 256), (128, 256), (256, 256)] {
        let ballast =
            Ballast { hidden: 8, layers: 1, intermediate, enlarged_layers: 1, enlarged_intermediate: wide };
        let runs = ballast.runs(0..wide);
        let mut next = 0;
        for run in &runs {
            assert_eq!(run.channels.start, next, "{intermediate} in {wide}: runs are neighbours");
            next = run.channels.end;
        }
        assert_eq!(next, wide);
        let placed: Vec<(usize, usize)> = runs
            .iter()
            .filter_map(|run| run.from.map(|from| (from, run.channels.clone())))
            .flat_map(|(from, channels)| channels.enumerate().map(move |(i, channel)| (from + i, channel)))
            .collect();
        assert!(placed.iter().map(|(from, _)| *from).eq(0..intermediate), "{intermediate} in {wide}");
        let slice_of = |width: usize, channel: usize| {
            let slices = KSlices::eighths(width, DOWN_UNIT);
            let at = slices.ranges().iter().position(|slice| slice.contains(&channel)).unwrap();
            (at, channel - slices.ranges()[at].start)
        };
        for (from, channel) in placed {
            assert_eq!(slice_of(intermediate, from), slice_of(wide, channel), "{intermediate} in {wide}");
        }
        // Any part equals that part of the whole.
        let part = ballast.runs(wide / 3..wide / 2);
        assert_eq!(part.iter().map(|run| run.channels.len()).sum::<usize>(), wide / 2 - wide / 3);
    }
}
