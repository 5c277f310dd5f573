//! The model for steps with FP8 layers: weights are a byte each, inputs and products are those of bf16, and
//! widening takes instructions. Nothing here was measured on a GPU.

use cpu_kernels::KSlices;

use super::*;

/// Instructions of a warp per 64 numbers of K, for tiles of 64, 80 and 128 rows, from the main loops for
/// sm_90 (`make kernels-check`). For 128 rows: two steps of 107 instructions, plus the 180 of the surrounding
/// loop as counted for tiles of 80 rows.
const TILE_INSTRUCTIONS: [(usize, f64); 3] = [(64, 265.0), (80, 301.0), (128, 2.0 * 107.0 + 180.0)];

/// Seconds of a product with FP8 weights, as [`super::product`] for bf16.
fn fp8_product(rows: usize, (n, slices): &(usize, KSlices)) -> f64 {
    let k = slices.end();
    let blocks = product_launch((rows, *n), slices, None);
    let count = (blocks.grid[0] * blocks.grid[1]) as f64;
    let memory = (n * k + 2 * rows * k) as f64 / MEMORY_BANDWIDTH;
    let out = (4 * rows * n) as f64 / CACHE_BANDWIDTH;
    match blocks.variant {
        Variant::Tiled { rows: height } => {
            let waves = (count / MULTIPROCESSORS).ceil() * MULTIPROCESSORS;
            let operations = waves * 2.0 * (128 * height * k) as f64 / MMA_RATE;
            let cache = count * ((128 + 2 * height) * k) as f64 / CACHE_BANDWIDTH;
            let of_tile = TILE_INSTRUCTIONS.iter().find(|(rows, _)| *rows == height);
            let (_, instructions) = of_tile.expect("every tile has its instructions");
            // Eight warps on four schedulers.
            let issue = waves * 2.0 * instructions * k as f64 / 64.0 / (MULTIPROCESSORS * CLOCK);
            let out = if height == 128 { 3.0 * out } else { out };
            memory.max(operations).max(cache).max(issue) + out + MEMORY_LATENCY
        }
        Variant::Few { rows: height, channels } => {
            // Steps of 32 numbers of K per iteration of the main loop, and resident blocks per
            // multiprocessor.
            let steps = if height == 8 && channels < 16 { 8 } else { 4 };
            let resident = match (height, channels) {
                (8, 16) => 4.0,
                (8, _) => 3.0,
                _ => 2.0,
            };
            let used = slices.ranges().iter().filter(|slice| !slice.is_empty()).count().max(1);
            let of_warp = if slices.ranges().len() == 1 { k / 8 } else { k / used };
            let waves = (count / (MULTIPROCESSORS * resident)).ceil();
            let chain = waves * (of_warp as f64 / (32 * steps) as f64).ceil() * (MEMORY_LATENCY + 0.1e-6);
            let cache = count * 8.0 * ((channels + 2 * height) * of_warp) as f64 / CACHE_BANDWIDTH;
            memory.max(cache).max(chain) + out + MEMORY_LATENCY
        }
    }
}

/// Seconds of the products of all layers with bf16 and with FP8 weights.
fn of_layers(model: &Model, rows: usize) -> [f64; 2] {
    let all = matrices(model, 1);
    let bf16: f64 = all.iter().map(|matrix| product(Code::Now, rows, matrix)).sum();
    let fp8: f64 = all.iter().map(|matrix| fp8_product(rows, matrix)).sum();
    [bf16, fp8].map(|seconds| model.layers as f64 * seconds)
}

/// Steps of 8B and 70B on one GPU, for the document: one row gains nearly as much as bytes decrease, many
/// rows gain little.
#[test]
fn fp8_weights_shorten_steps_that_wait_for_weights() {
    println!(
        "| model | step | context | bf16 | fp8 | fp8 / bf16 | products in bf16 | in fp8 |\n|---|---|---|---|---|---|---|---|"
    );
    for model in &MODELS {
        for (name, sequences, rows_of_each) in
            [("1 row", 1, 1), ("32 x 5 rows", 32, 5), ("2,048 rows", 1, 2048)]
        {
            for context in [128, 8192] {
                let step = Step { ranks: 1, sequences, rows_of_each, context };
                let [bf16, fp8] = of_layers(model, step.rows());
                let before = time(Code::Now, model, step);
                let now = before - bf16 + fp8;
                println!(
                    "| {} | {name} | {context} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
                    model.name,
                    before * 1e3,
                    now * 1e3,
                    now / before,
                    bf16 * 1e3,
                    fp8 * 1e3
                );
                let most = if step.rows() == 1 { 0.75 } else { 1.01 };
                assert!(now < most * before, "{} {step:?}: {now} of {before}", model.name);
            }
        }
    }
}
