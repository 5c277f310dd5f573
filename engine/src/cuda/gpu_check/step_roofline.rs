//! The roofline table of docs/design/gpu.md: what a step of Llama 3 asks of one GPU, and modelled times.
//!
//! Launches, copies and collectives are recorded from whole forwards on a device that runs nothing
//! (`recorder`), for two and for three layers; every further layer adds their difference. Bytes of products
//! come from the recorded launches, those of attention from its tiling. `times` models times, which are
//! printed only if they are near those of a run on a GPU.

mod recorder;
#[cfg(test)]
mod replays;
mod times;

use std::fmt::Write as _;

use cpu_kernels::{HeadLayout, Segment};
use serde_json::Value;

use self::recorder::{CallLog, Calls, Transfers, recorded_ranks};
use self::times::AttentionTimes;
use super::decode::{LLAMA_8B, LLAMA_70B, write_config};
use super::roofline::{Case, full_cases, run_case};
use super::step_work::{H100, H200, ModelSize, StepShape, StepWork};
use crate::cuda::ops::{
    AttentionCounts, LaunchedProduct, Limits, OwnBlocks, PartSize, Tiling, TilingKey, count_attention,
};
use crate::cuda::ranks::load_on;
use crate::cuda::whole_model::options;
use crate::model_config::ModelConfig;
use crate::shard::Shard;
use crate::{Engine, EngineError, LoadOptions, SlotId, WeightFormat};

/// Lines of the page around the table.
const BEGIN: &str = "<!-- step_roofline -->";
const END: &str = "<!-- end of step_roofline -->";

/// Maximum length of a sequence: that of `gpu-check`'s steps.
const MAX_LEN: u32 = 65_536;
/// KV of the recorded layers over all ranks: 32 sequences of 32,768 tokens.
const KV_BYTES: u64 = 16 << 30;
/// Modelled times that are further from measured ones than this factor are not printed.
const MAX_ERROR: f64 = 1.5;

/// A model and the ranks that it is divided over.
#[derive(Debug, Clone, Copy)]
struct ServedModel {
    title: &'static str,
    config: &'static str,
    ranks: usize,
    /// Whether kernels of its widths were timed.
    is_timed: bool,
}

const MODELS: [ServedModel; 2] = [
    ServedModel { title: "Llama 3 8B, one GPU", config: LLAMA_8B, ranks: 1, is_timed: true },
    ServedModel { title: "Llama 3 70B, each of eight GPUs", config: LLAMA_70B, ranks: 8, is_timed: false },
];

/// What a step asks of the first GPU.
#[derive(Debug)]
struct StepCounts {
    work: StepWork,
    launches: u64,
    to_device: Transfers,
    from_device: Transfers,
    from_ranks: Transfers,
    /// Bytes of weights, inputs, keys, values and queries that blocks read, from memory or the cache.
    bytes_read: u64,
    /// Modelled milliseconds, or the name of a kernel that was never timed.
    modelled_ms: Result<f64, &'static str>,
}

/// Returns the table in Markdown. `report` is a report of `gpu-check roofline` on an H200, which modelled
/// times are compared with: docs/gpu-runs/2-report.txt.
pub fn table(report: &str) -> Result<String, EngineError> {
    let cases = unfiltered_cases();
    let mut sections = Vec::new();
    for model in MODELS {
        let counts = count(&model, &cases)?;
        sections.push(format!("**{}**\n\n{}", model.title, counts_table(&cases, &counts)));
        if model.is_timed {
            sections.push(times_table(&cases, &counts, report));
        }
    }
    Ok(sections.join("\n"))
}

/// Returns `page` with this table between its marked lines; `None` if it has no such lines.
pub fn with_table(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

/// The steps of `gpu-check roofline` without top-p.
fn unfiltered_cases() -> Vec<Case> {
    full_cases().into_iter().filter(|case| case.top_p == 1.0).collect()
}

fn count(model: &ServedModel, cases: &[Case]) -> Result<Vec<StepCounts>, EngineError> {
    let config: Value = serde_json::from_str(model.config).unwrap_or_default();
    let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
    let with_layers = |layers: u64| {
        let mut config = config.clone();
        config["num_hidden_layers"] = layers.into();
        record(config, model.ranks, cases)
    };
    let ((layout, two), (_, three)) = (with_layers(2)?, with_layers(3)?);
    let size = ModelSize::of(&config).of_rank(model.ranks);
    let attention_times = attention_times(layout);
    let counts = cases.iter().zip(two.iter().zip(&three)).map(|(case, (two, three))| {
        let of_all = |of: fn(&Calls) -> u64| of(two) + (layers - 2) * (of(three) - of(two));
        let transfers = |number: fn(&Calls) -> u64, bytes: fn(&Calls) -> u64| Transfers {
            number: of_all(number),
            bytes: of_all(bytes),
        };
        let [attention, last_attention] = attention_of(layout, case);
        let attention_bytes = (layers - 1) * attention.bytes_read as u64 + last_attention.bytes_read as u64;
        let [attention_us, last_us] =
            [attention, last_attention].map(|counts| attention_times.microseconds(&counts));
        let other_us = |calls: &Calls| times::microseconds(&calls.launches);
        let attention_us = (layers - 1) as f64 * attention_us + last_us;
        let all_us = other_us(two).and_then(|two| {
            other_us(three).map(|three| two + (layers - 2) as f64 * (three - two) + attention_us)
        });
        StepCounts {
            work: size.work(case.shape, case.drawn()),
            launches: of_all(|calls| calls.launches.len() as u64),
            to_device: transfers(|calls| calls.to_device.number, |calls| calls.to_device.bytes),
            from_device: transfers(|calls| calls.from_device.number, |calls| calls.from_device.bytes),
            from_ranks: transfers(|calls| calls.from_ranks.number, |calls| calls.from_ranks.bytes),
            bytes_read: of_all(product_bytes) + attention_bytes,
            modelled_ms: all_us.map(|us| us / 1e3),
        }
    });
    Ok(counts.collect())
}

/// Runs every case on a device that records its calls: returns the layout of the first rank's heads, and its
/// calls for each case.
fn record(mut config: Value, ranks: usize, cases: &[Case]) -> Result<(HeadLayout, Vec<Calls>), EngineError> {
    config["max_position_embeddings"] = MAX_LEN.into();
    let name = format!("step-roofline-{}-{}-{ranks}", config["hidden_size"], config["num_hidden_layers"]);
    let file = write_config(&config.to_string(), &name)?;
    let log = CallLog::default();
    let options = LoadOptions {
        tensor_parallel: ranks,
        kv_memory_bytes: KV_BYTES,
        ..options(file.clone(), WeightFormat::Bf16)
    };
    let engine = Engine::random_by(&options, 1, |source, model| {
        load_on(recorded_ranks(ranks, &log), &options, source, model)
    });
    let layout = ModelConfig::read(&file).map(|config| Shard { rank: 0, ranks }.layout(&config));
    std::fs::remove_file(&file).map_err(|source| EngineError::Io { path: file, source })?;
    let (mut engine, layout) = (engine?, layout?);
    let mut calls = Vec::with_capacity(cases.len());
    for case in cases {
        let StepShape { sequences, context, .. } = case.shape;
        let open = |_| engine.open_unwritten(context as u32);
        let slots = (0..sequences).map(open).collect::<Result<Vec<SlotId>, EngineError>>()?;
        // The first call allocates memory.
        run_case(&mut engine, &slots, case)?;
        log.take();
        run_case(&mut engine, &slots, case)?;
        calls.push(log.take());
        slots.into_iter().for_each(|slot| engine.close(slot));
    }
    Ok((layout, calls))
}

/// Bytes of weights and inputs that the blocks of products read.
fn product_bytes(calls: &Calls) -> u64 {
    let products =
        calls.launches.iter().filter_map(|launch| LaunchedProduct::of(launch.kernel, &launch.params));
    products.map(|product| product.bytes_read() as u64).sum()
}

/// Attention of a layer, and of the last layer, which computes drawn rows only.
fn attention_of(layout: HeadLayout, case: &Case) -> [AttentionCounts; 2] {
    let StepShape { sequences, rows_of_each, context } = case.shape;
    let drawn = case.drawn_of_each;
    let last = StepShape { sequences, rows_of_each: drawn, context: context + rows_of_each - drawn };
    [case.shape, last].map(|shape| count_layer(layout, shape, None, true))
}

/// Attention with these partial results, or with those that are chosen, with or without tiles of warpgroups.
fn count_layer(
    layout: HeadLayout,
    shape: StepShape,
    parts: Option<PartSize>,
    has_warpgroups: bool,
) -> AttentionCounts {
    let StepShape { sequences, rows_of_each, context } = shape;
    let segment = |sequence: usize| {
        let rows = sequence * rows_of_each..(sequence + 1) * rows_of_each;
        Segment { rows, start: context as u32, block_table: &[], tree: None }
    };
    let segments: Vec<Segment<'_>> = (0..sequences).map(segment).collect();
    let key = TilingKey::of(layout, None, has_warpgroups);
    let key = TilingKey { limits: Limits { parts, ..key.limits }, ..key };
    count_attention(&Tiling::new(&segments, &vec![0; sequences], &OwnBlocks::default(), key), layout)
}

/// Times through those of one row and of a prompt of 2,048, both behind 128.
fn attention_times(layout: HeadLayout) -> AttentionTimes {
    let [row, prompt] = [1, 2048].map(|rows_of_each| {
        let shape = StepShape { sequences: 1, rows_of_each, context: 128 };
        count_layer(layout, shape, Some(PartSize::Split), false)
    });
    AttentionTimes::new(&row, &prompt)
}

fn counts_table(cases: &[Case], counts: &[StepCounts]) -> String {
    let mut text = "| step | weights, GB | KV, GB | read by blocks, GB | TFLOP | launches | \
                    copies up, bytes | copies back, bytes | collectives, MB received | \
                    ideal on an H100, ms |\n|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    let transfers = |Transfers { number, bytes }: Transfers| format!("{number}, {bytes}");
    for (case, counts) in cases.iter().zip(counts) {
        let StepCounts { work, launches, to_device, from_device, from_ranks, bytes_read, .. } = counts;
        let (name, up, back) = (&case.name, transfers(*to_device), transfers(*from_device));
        let [weights, kv, read] = [work.weight_bytes(), work.kv_bytes, *bytes_read as f64].map(|b| b / 1e9);
        let (tflop, ideal) = (work.operations() / 1e12, work.ideal(H100) * 1e3);
        let (collectives, received) = (from_ranks.number, from_ranks.bytes as f64 / 1e6);
        writeln!(
            text,
            "| {name} | {weights:.2} | {kv:.3} | {read:.2} | {tflop:.3} | {launches} | {up} | {back} | \
             {collectives}, {received:.2} | {ideal:.2} |"
        )
        .expect("a string grows");
    }
    text
}

/// Times that the model gives, as far as they agree with those of `report`.
fn times_table(cases: &[Case], counts: &[StepCounts], report: &str) -> String {
    let modelled: Vec<Result<f64, &'static str>> = counts.iter().map(|counts| counts.modelled_ms).collect();
    let measured: Vec<Option<f64>> = cases.iter().map(|case| measured_ms(report, &case.name)).collect();
    let errors: Vec<f64> = modelled
        .iter()
        .zip(&measured)
        .filter_map(|(modelled, measured)| Some(modelled.ok()? / (*measured)?))
        .collect();
    let (low, high) =
        errors.iter().fold((f64::INFINITY, 0.0f64), |(low, high), error| (low.min(*error), high.max(*error)));
    let found =
        format!("Modelled over measured times of {} steps of run 2: {low:.2} to {high:.2}.", errors.len());
    if errors.is_empty() || low < MAX_ERROR.recip() || high > MAX_ERROR {
        return format!("No times: the model does not agree with the H200. {found}\n");
    }
    let mut text = format!(
        "{found}\n\n\
         | step | ideal on an H200, ms | before (run 2, measured), ms | now (modelled), ms | now, of ideal | \
         aim |\n|---|---|---|---|---|---|\n"
    );
    for (((case, counts), modelled), measured) in cases.iter().zip(counts).zip(modelled).zip(measured) {
        let ideal = counts.work.ideal(H200) * 1e3;
        let before = measured.map_or_else(|| "not run".to_owned(), |ms| format!("{ms:.2}"));
        let (now, share) = match modelled {
            Ok(modelled) => {
                let [least, most] = [modelled / high.max(1.0), modelled / low.min(1.0)];
                let share = format!("{:.1} to {:.1}", least / ideal, most / ideal);
                (format!("{least:.2} to {most:.2}"), share)
            }
            Err(kernel) => (format!("`{kernel}` never timed"), "not known".to_owned()),
        };
        writeln!(text, "| {} | {ideal:.2} | {before} | {now} | {share} | {} |", case.name, case.aim)
            .expect("a string grows");
    }
    text
}

/// Milliseconds of a case in a report of `gpu-check roofline`, whose lines begin with a verdict of eight
/// characters.
fn measured_ms(report: &str, case: &str) -> Option<f64> {
    report.lines().find_map(|line| {
        let mut words = line.get(8..)?.strip_prefix(case)?.split_whitespace();
        let milliseconds = words.next()?.parse().ok()?;
        (words.next() == Some("ms,")).then_some(milliseconds)
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::decode::TINY;
    use super::*;
    use crate::cuda::host_driver::HostDriver;
    use crate::cuda::step_counts::two_layers;

    fn document(path: &str) -> String {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(path)).unwrap()
    }

    /// 8B, one row behind 128.
    #[test]
    fn a_cell_is_as_computed_by_hand() {
        let case = unfiltered_cases().remove(0);
        assert_eq!(case.name, "1 x 1 rows behind 128");
        let counted = count(&MODELS[0], &[case]).unwrap().remove(0);
        let StepCounts { work, to_device, from_device, from_ranks, bytes_read, launches, .. } = counted;
        // 4096 x (2 x 4096 + 2 x 1024 + 3 x 14,336) in each of 32 layers, and 128,256 x 4096.
        let weights: u64 = 32 * 218_103_808 + 525_336_576;
        assert_eq!(work.weight_bytes(), 2.0 * weights as f64);
        assert_eq!(work.kv_bytes, 129.0 * 131_072.0);
        assert_eq!(work.operations(), 2.0 * weights as f64 + 4.0 * 129.0 * 4096.0 * 32.0);
        assert!((work.ideal(H100) - (2.0 * weights as f64 + 129.0 * 131_072.0) / 3.35e12).abs() < 1e-12);
        // Products in tiles of eight rows: 8 rows of inputs with every 128 of weights. Attention of a layer:
        // 9 blocks of 16 keys and values for each of 8 KV heads, and four queries in each of two splits.
        let attention = 8 * (9 * 16 * 2 * 128 * 2 + 2 * 4 * 128 * 4);
        assert_eq!(bytes_read, 2 * weights / 128 * 136 + 32 * attention);
        assert_eq!((to_device.number, from_device), (1, Transfers { number: 1, bytes: 8 }));
        assert_eq!(from_ranks, Transfers::default());
        assert!(launches > 5 * 32, "{launches}");
    }

    /// Four products in each layer, and the vocabulary's, also of a rank.
    #[test]
    fn every_product_of_a_step_is_counted() {
        for ServedModel { config, ranks, .. } in MODELS {
            let mut config: Value = serde_json::from_str(config).unwrap();
            config["num_hidden_layers"] = 2.into();
            let cases = unfiltered_cases();
            let (_, calls) = record(config, ranks, &cases).unwrap();
            for (case, Calls { launches, from_ranks, .. }) in cases.iter().zip(calls) {
                let is_product = |kernel: &str, params: &[u64]| LaunchedProduct::of(kernel, params).is_some();
                let products = launches.iter().filter(|launch| is_product(launch.kernel, &launch.params));
                assert_eq!(products.count(), 2 * 4 + 1, "{}, {ranks} ranks", case.name);
                assert_eq!(from_ranks.number > 0, ranks > 1);
            }
        }
    }

    #[test]
    fn what_is_recorded_is_what_the_host_driver_counts() {
        let name = "cuda::gpu_check::step_roofline::tests::what_is_recorded_is_what_the_host_driver_counts";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let mut engine = two_layers(&driver, None);
        let cases = [(1, 1), (2, 3)].map(|(sequences, rows_of_each)| {
            Case::step(StepShape { sequences, rows_of_each, context: 20 }, 1.0)
        });
        let (_, recorded) = record(serde_json::from_str(TINY).unwrap(), 1, &cases).unwrap();
        for (case, calls) in cases.iter().zip(recorded) {
            let slots: Vec<SlotId> =
                (0..case.shape.sequences).map(|_| engine.open_unwritten(20).unwrap()).collect();
            run_case(&mut engine, &slots, case).unwrap();
            let earlier = driver.counts();
            run_case(&mut engine, &slots, case).unwrap();
            let counts = driver.counts().since(earlier);
            slots.into_iter().for_each(|slot| engine.close(slot));
            let transfers = |number, bytes| Transfers { number, bytes };
            assert_eq!(calls.launches.len() as u64, counts.launches, "{}", case.name);
            assert_eq!(calls.to_device, transfers(counts.copies_to_device, counts.bytes_to_device));
            assert_eq!(calls.from_device, transfers(counts.copies_from_device, counts.bytes_from_device));
        }
    }

    #[test]
    fn measured_times_are_found_by_case() {
        let report = "SLOW    8 x 5 rows behind 128, top-p              6.86 ms, ideal 3.16, 0.46 of the\n\
                      SLOW    8 x 5 rows behind 128                     6.59 ms, ideal 3.16, 0.48 of the\n\
                      NOT RUN 32 x 5 rows behind 32768: kv has no room for it";
        assert_eq!(measured_ms(report, "8 x 5 rows behind 128"), Some(6.59));
        assert_eq!(measured_ms(report, "32 x 5 rows behind 32768"), None);
        let run = document("gpu-runs/2-report.txt");
        let found = unfiltered_cases().iter().filter_map(|case| measured_ms(&run, &case.name)).count();
        assert_eq!(found, 9);
    }

    #[test]
    fn the_page_has_this_table() {
        let page = document("design/gpu.md");
        let table = table(&document("gpu-runs/2-report.txt")).unwrap();
        assert!(
            with_table(&page, &table).is_some_and(|expected| expected == page),
            "docs/design/gpu.md is out of date: \
             cargo run --package outrider-engine --example step_roofline -- docs/design/gpu.md\n{table}"
        );
    }
}
