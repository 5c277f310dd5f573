//! `outrider plan` as a program: exact parameter counts of published models, published memory sums, and its
//! errors.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// Sizes from the published config.json, and the parameter count from the model card or checkpoint index.
struct Published {
    name: &'static str,
    family: &'static str,
    vocab: u64,
    hidden: u64,
    ffn: u64,
    layers: u64,
    /// Query heads, KV heads, head width.
    heads: (u64, u64, u64),
    tied: bool,
    parameters: u64,
}

#[rustfmt::skip]
const PUBLISHED: [Published; 18] = [
    Published { name: "llama-3.1-8b", family: "Llama", vocab: 128_256, hidden: 4096, ffn: 14336, layers: 32, heads: (32, 8, 128), tied: false, parameters: 8_030_261_248 },
    Published { name: "llama-3.1-70b", family: "Llama", vocab: 128_256, hidden: 8192, ffn: 28672, layers: 80, heads: (64, 8, 128), tied: false, parameters: 70_553_706_496 },
    Published { name: "llama-3.1-405b", family: "Llama", vocab: 128_256, hidden: 16384, ffn: 53248, layers: 126, heads: (128, 8, 128), tied: false, parameters: 405_853_388_800 },
    Published { name: "llama-3.2-1b", family: "Llama", vocab: 128_256, hidden: 2048, ffn: 8192, layers: 16, heads: (32, 8, 64), tied: true, parameters: 1_235_814_400 },
    Published { name: "llama-3.2-3b", family: "Llama", vocab: 128_256, hidden: 3072, ffn: 8192, layers: 28, heads: (24, 8, 128), tied: true, parameters: 3_212_749_824 },
    Published { name: "mistral-7b-v0.1", family: "Mistral", vocab: 32_000, hidden: 4096, ffn: 14336, layers: 32, heads: (32, 8, 128), tied: false, parameters: 7_241_732_096 },
    Published { name: "mistral-7b-v0.3", family: "Mistral", vocab: 32_768, hidden: 4096, ffn: 14336, layers: 32, heads: (32, 8, 128), tied: false, parameters: 7_248_023_552 },
    Published { name: "qwen2.5-0.5b", family: "Qwen2", vocab: 151_936, hidden: 896, ffn: 4864, layers: 24, heads: (14, 2, 64), tied: true, parameters: 494_032_768 },
    Published { name: "qwen2.5-1.5b", family: "Qwen2", vocab: 151_936, hidden: 1536, ffn: 8960, layers: 28, heads: (12, 2, 128), tied: true, parameters: 1_543_714_304 },
    Published { name: "qwen2.5-7b", family: "Qwen2", vocab: 152_064, hidden: 3584, ffn: 18944, layers: 28, heads: (28, 4, 128), tied: false, parameters: 7_615_616_512 },
    Published { name: "qwen2.5-14b", family: "Qwen2", vocab: 152_064, hidden: 5120, ffn: 13824, layers: 48, heads: (40, 8, 128), tied: false, parameters: 14_770_033_664 },
    Published { name: "qwen2.5-32b", family: "Qwen2", vocab: 152_064, hidden: 5120, ffn: 27648, layers: 64, heads: (40, 8, 128), tied: false, parameters: 32_763_876_352 },
    Published { name: "qwen2.5-72b", family: "Qwen2", vocab: 152_064, hidden: 8192, ffn: 29568, layers: 80, heads: (64, 8, 128), tied: false, parameters: 72_706_203_648 },
    Published { name: "qwen3-0.6b", family: "Qwen3", vocab: 151_936, hidden: 1024, ffn: 3072, layers: 28, heads: (16, 8, 128), tied: true, parameters: 596_049_920 },
    Published { name: "qwen3-1.7b", family: "Qwen3", vocab: 151_936, hidden: 2048, ffn: 6144, layers: 28, heads: (16, 8, 128), tied: true, parameters: 1_720_574_976 },
    Published { name: "qwen3-4b", family: "Qwen3", vocab: 151_936, hidden: 2560, ffn: 9728, layers: 36, heads: (32, 8, 128), tied: true, parameters: 4_022_468_096 },
    Published { name: "qwen3-8b", family: "Qwen3", vocab: 151_936, hidden: 4096, ffn: 12288, layers: 36, heads: (32, 8, 128), tied: false, parameters: 8_190_735_360 },
    Published { name: "qwen3-32b", family: "Qwen3", vocab: 151_936, hidden: 5120, ffn: 25600, layers: 64, heads: (64, 8, 128), tied: false, parameters: 32_762_123_264 },
];

impl Published {
    fn config(&self) -> Value {
        let (heads, kv_heads, head_dim) = self.heads;
        json!({
            "architectures": [format!("{}ForCausalLM", self.family)], "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        })
    }
}

fn write(directory: &Path, name: &str, config: &Value) -> PathBuf {
    let path = directory.join(format!("{name}.json"));
    std::fs::write(&path, config.to_string()).expect("a temporary file can be written");
    path
}

fn published(directory: &Path, name: &str) -> String {
    let config = PUBLISHED.iter().find(|model| model.name == name).expect("a listed model").config();
    write(directory, name, &config).display().to_string()
}

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outrider")).arg("plan").args(args).output().expect("the program starts")
}

fn document(args: &[&str]) -> Value {
    let output = plan(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn parameters_of_published_models_are_exact() {
    let directory = tempfile::tempdir().unwrap();
    for model in &PUBLISHED {
        let path = write(directory.path(), model.name, &model.config()).display().to_string();
        let found = document(&["--target", &path, "--gpus", "8xB200"]);
        assert_eq!(found["target"]["parameters"].as_u64(), Some(model.parameters), "{}", model.name);
    }
}

#[test]
fn a_plan_counts_what_the_engine_loads() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
    let options = |weights| engine::LoadOptions::new(&demo, weights, 1 << 20);
    for (name, format) in [
        ("f32", engine::WeightFormat::F32),
        ("bf16", engine::WeightFormat::Bf16),
        ("int8", engine::WeightFormat::Int8),
        ("int4", engine::WeightFormat::Int4),
    ] {
        let engine = engine::Engine::load(&options(format)).unwrap();
        let path = demo.display().to_string();
        let kv = if name == "f32" { "f32" } else { "bf16" };
        let found = document(&[
            "--target",
            &path,
            "--gpus",
            "1xL4",
            "--context",
            "512",
            "--weights",
            name,
            "--kv",
            kv,
        ]);
        assert_eq!(found["target"]["parameters"].as_u64(), Some(engine.info().num_parameters));
        assert_eq!(found["kv_bytes_per_token"].as_f64(), Some(engine.info().kv_bytes_per_token as f64));
        // The packed form pads groups that a K-slice splits.
        let (read, packed) = (number(&found["target"]["read_gb"]) * 1e9, engine.info().weight_bytes as f64);
        assert!((packed / read - 1.0).abs() < 0.05, "{name}: {read} bytes planned, {packed} loaded");
    }
}

/// What FP8 takes beside int8: layers in the same bytes, the last projection in bf16 and without scales.
#[test]
fn fp8_spares_the_last_projection() {
    let directory = tempfile::tempdir().unwrap();
    let target = published(directory.path(), "llama-3.1-8b");
    let plan = |weights| document(&["--target", &target, "--gpus", "1xH100-80", "--weights", weights]);
    let (fp8, int8) = (plan("fp8"), plan("int8"));
    let vocabulary = 128_256.0;
    let more = vocabulary * 4096.0 - 4.0 * vocabulary;
    let bytes = |plan: &Value, name: &str| number(&plan["target"][name]) * 1e9;
    for name in ["read_gb", "resident_gb"] {
        let found = bytes(&fp8, name) - bytes(&int8, name);
        assert!((found / more - 1.0).abs() < 1e-6, "{name}: {found} bytes more, expected {more}");
    }
    assert!(number(&fp8["target"]["weights_gb"]) == number(&int8["target"]["weights_gb"]));
}

#[test]
fn published_sums_for_70b_and_8b_on_two_80_gb_gpus() {
    let directory = tempfile::tempdir().unwrap();
    let (target, draft) =
        (published(directory.path(), "llama-3.1-70b"), published(directory.path(), "llama-3.1-8b"));
    for (weights, draft_weights, low, high) in [
        ("bf16", "bf16", 156.0, 157.0),
        ("int8", "bf16", 86.0, 87.0),
        ("int8", "int8", 78.0, 79.0),
        ("int4", "bf16", 51.0, 51.0),
        ("int4", "int4", 39.0, 39.0),
    ] {
        let found = document(&[
            "--target",
            &target,
            "--draft",
            &draft,
            "--gpus",
            "2xH100-80",
            "--weights",
            weights,
            "--draft-weights",
            draft_weights,
        ]);
        let gb = |name: &str| number(&found["weights_gb"][name]);
        assert!(
            (low * 0.99..=high * 1.01).contains(&gb("total")),
            "{weights} + {draft_weights}: {} GB, published {low} to {high}",
            gb("total")
        );
        assert_eq!(gb("total"), gb("target") + gb("draft"));
        let scales = number(&found["target"]["scales_gb"]);
        match weights {
            "bf16" => assert_eq!(scales, 0.0),
            // One bf16 scale per 32 weights of half a byte: an eighth of the quantized weights.
            "int4" => assert!((scales / gb("target") - 0.125).abs() < 0.005, "{scales}"),
            _ => assert!(scales > 0.0 && scales < 0.001 * gb("target"), "{scales}"),
        }
    }
}

#[test]
fn what_does_not_fit_is_said_to_break_by_memory_and_apart_it_fits() {
    let directory = tempfile::tempdir().unwrap();
    let (target, draft) =
        (published(directory.path(), "llama-3.1-70b"), published(directory.path(), "llama-3.1-8b"));
    let pair = ["--target", &target, "--draft", &draft, "--gpus", "2xH100-80", "--context", "2048"];
    let apart = ["--draft-gpus", "2xL4", "--draft-weights", "int8"];
    let found = document(&[&pair[..], &apart].concat());
    let of = |name: &str| {
        found["placements"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap().clone()
    };
    assert_eq!(of("colocated")["concurrency"], 0);
    assert!(number(&of("colocated")["kv_budget_gb"]) < 0.0);
    // 144 GB of 160 usable, 141.1 of weights: 2.9 GB at 327,680 bytes per token.
    assert_eq!(of("apart")["concurrency"], 4);
    let apart_limits = of("apart")["limits"].clone();
    let memory = apart_limits.as_array().unwrap().iter().find(|limit| limit["what"] == "memory").unwrap();
    assert_eq!(memory["sequences"], 4);
    // 8 GB at 225 GB/s for each drafted token: the draft is slower from the first sequence on.
    assert_eq!((&apart_limits[0]["what"], &apart_limits[0]["sequences"]), (&json!("draft"), &json!(1)));
    assert_eq!(found["kv_bytes_per_token"], 327_680.0);

    let text = plan(&[&pair[..], &apart].concat());
    let text = String::from_utf8(text.stdout).unwrap();
    for expected in [
        "draft on the target's GPUs: does not fit",
        "breaks first: memory",
        "assumed, not measured",
        "\n1 target on 2xH100-80 each; 2xL4-24 draft; ",
        "\nnext: acceptance matters most",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
}

/// A draft GPU of four targets drafts for four times the sequences of one that has a target to itself.
#[test]
fn a_draft_gpu_that_targets_share_takes_longer() {
    let directory = tempfile::tempdir().unwrap();
    let (target, draft) =
        (published(directory.path(), "qwen3-32b"), published(directory.path(), "qwen3-0.6b"));
    let pair = ["--target", &target, "--draft", &draft, "--context", "512", "--acceptance", "0.9"];
    let at_4 = |gpus: &[&str]| {
        let found = document(&[&pair[..], &["--concurrency", "4"], gpus].concat());
        let placements = found["placements"].as_array().unwrap();
        let apart = placements.iter().find(|placement| placement["name"] == "apart").unwrap();
        apart["loads"].as_array().unwrap().iter().find(|load| load["sequences"] == 4).unwrap()["best"].clone()
    };
    let alone = at_4(&["--gpus", "2xH100-80", "--draft-gpus", "1xL4"]);
    let each = at_4(&["--gpus", "8xH100-80", "--targets", "4", "--draft-gpus", "4xL4"]);
    let shared = at_4(&["--gpus", "8xH100-80", "--targets", "4", "--draft-gpus", "1xL4"]);
    assert!(number(&alone["draft_ms"]) > 0.0, "nothing is drafted: {alone}");
    assert_eq!(each, alone);
    assert!(number(&shared["tpot_ms"]) > 1.05 * number(&alone["tpot_ms"]), "{shared}, alone {alone}");
}

/// The shortage that is named must be a shortage: 20 GB left do not explain that 17 GB do not fit.
#[test]
fn a_sequence_that_does_not_fit_is_measured_where_it_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let target = published(directory.path(), "llama-3.1-70b");
    let draft = published(directory.path(), "llama-3.1-8b");
    let pair = ["--target", &target, "--draft", &draft, "--weights", "int8", "--context", "32768"];
    // 72.4 GB are left beside the target, 56.4 with the draft; a sequence takes 10.7 GB at the target, 4.3
    // at the draft.
    let of = |gpus: &[&str], name: &str| {
        let found = document(&[&pair[..], gpus].concat());
        found["placements"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap().clone()
    };
    for (gpus, name, at_draft, sequence_gb) in [
        (&["--gpus", "1xH100-80"][..], "plain", false, 10.737),
        (&["--gpus", "1xH100-80"], "colocated", false, 15.032),
        // 20.0 GB at two thirds of 24 GB, after 16.1 GB of weights: 1.5 GB.
        (&["--gpus", "2xH100-80", "--draft-gpus", "1xL4", "--memory-share", "0.73"], "apart", true, 4.295),
        // A draft GPU that four targets share holds one sequence.
        (
            &["--gpus", "8xH100-80", "--targets", "4", "--draft-gpus", "1xL4", "--memory-share", "0.9"],
            "apart",
            true,
            4.295,
        ),
    ] {
        let placement = of(gpus, name);
        assert_eq!(placement["concurrency"], 0, "{gpus:?}");
        let shortage = &placement["shortage"];
        assert_eq!(shortage["at_draft"], at_draft, "{gpus:?}: {placement}");
        assert!((number(&shortage["sequence_gb"]) - sequence_gb).abs() < 0.001, "{gpus:?}: {placement}");
        assert!(number(&shortage["left_gb"]) < sequence_gb, "{gpus:?}: {placement}");
    }
    let apart = ["--gpus", "2xH100-80", "--draft-gpus", "1xL4", "--memory-share", "0.73"];
    let text = String::from_utf8(plan(&[&pair[..], &apart].concat()).stdout).unwrap();
    let expected =
        "left for KV at a draft GPU for one target, and a sequence of 32768 tokens needs 4.3 GB there";
    assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    assert_eq!(of(&["--gpus", "2xH100-80"], "plain")["shortage"], Value::Null);
}

/// Drafts stop paying where the plan's own lines say so. Beyond the memory, where the search went, they pay
/// again in the model.
#[test]
fn drafting_stops_paying_where_k_is_0_from_then_on() {
    let directory = tempfile::tempdir().unwrap();
    let (target, draft) =
        (published(directory.path(), "llama-3.1-70b"), published(directory.path(), "llama-3.1-8b"));
    let pair = ["--target", &target, "--draft", &draft, "--gpus", "8xH100-80", "--context", "512"];
    let loads = "1,16,32,64,96,128,160,192,224,256,384,512,768,1024,1536";
    let found = document(&[&pair[..], &["--max-batch-rows", "4096", "--concurrency", loads]].concat());
    let colocated = &found["placements"][1];
    let limits = colocated["limits"].as_array().unwrap();
    let stops = limits.iter().find(|limit| limit["what"] == "speculation").unwrap()["sequences"].as_u64();
    let stops = stops.expect("it stops within the memory");
    for load in colocated["loads"].as_array().unwrap() {
        let (sequences, k) = (load["sequences"].as_u64().unwrap(), load["best"]["k"].as_u64().unwrap());
        assert!(k == 0 || sequences < stops, "k = {k} at {sequences}, but drafting stops at {stops}");
    }
    let pays_at = |load: &&Value| load["best"]["k"] != 0;
    let last = colocated["loads"].as_array().unwrap().iter().rfind(pays_at).unwrap();
    let next = stops - last["sequences"].as_u64().unwrap();
    assert!(next <= 128, "the last load that pays is {last}, but drafting stops at {stops}");
}

/// With 256 sequences of a small model the router's time is most of a round, which a plan without a draft
/// must not shorten by drafting.
#[test]
fn a_plan_without_a_draft_drafts_nothing() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target").display().to_string();
    let found =
        document(&["--target", &demo, "--gpus", "1xH100", "--context", "256", "--output-tokens", "64"]);
    for load in found["placements"][0]["loads"].as_array().unwrap() {
        assert_eq!((&load["best"]["k"], &load["speedup"]), (&json!(0), &json!(1.0)), "{load}");
    }
}

/// As `outrider plan | head` and a full disk do it.
#[test]
fn output_that_nobody_reads_is_no_panic_and_output_that_is_lost_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let target = published(directory.path(), "qwen3-8b");
    let into = |stdout: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
        command.args(["plan", "--target", &target, "--gpus", "1xL4", "--json"]).stdout(stdout);
        let output = command.output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(into(writer.into()), (Some(0), String::new()));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let (code, error) = into(full.into());
    assert_eq!(code, Some(1), "{error}");
    assert!(error.starts_with("outrider: cannot write to standard output: "), "{error}");
}

#[test]
fn more_acceptance_is_faster_and_prices_make_a_cost() {
    let directory = tempfile::tempdir().unwrap();
    let (target, draft) =
        (published(directory.path(), "qwen2.5-72b"), published(directory.path(), "qwen2.5-0.5b"));
    let at = |acceptance: &str| {
        let found = document(&[
            "--target",
            &target,
            "--draft",
            &draft,
            "--gpus",
            "8xA100-80",
            "--draft-gpus",
            "1xL4",
            "--acceptance",
            acceptance,
            "--gpu-price",
            "2",
            "--draft-gpu-price",
            "0.5",
            "--concurrency",
            "1,8",
            "--rate",
            "1",
        ]);
        found["placements"][2]["loads"][1].clone()
    };
    let (low, high) = (at("0.3"), at("0.9"));
    assert!(number(&high["speedup"]) > number(&low["speedup"]) && number(&low["speedup"]) >= 1.0);
    assert!(number(&high["cost_per_million"]) < number(&low["cost_per_million"]));
    let (best, cost) = (&high["best"], number(&high["cost_per_million"]));
    let expected = (8.0 * 2.0 + 0.5) / 3600.0 / number(&best["tokens_per_second"]) * 1e6;
    assert!((cost / expected - 1.0).abs() < 1e-9);
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let target = published(directory.path(), "qwen3-8b");
    let check = |args: &[&str], code: i32, expected: &str| {
        let output = plan(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(expected), "{expected:?} is not in {error}");
    };
    let unknown = write(directory.path(), "unknown", &json!({"architectures": ["MambaForCausalLM"]}));
    let unknown = unknown.display().to_string();
    check(
        &["--target", &unknown, "--gpus", "1xL4"],
        1,
        "[\"MambaForCausalLM\"] is not supported, expected one of Llama",
    );
    check(&["--target", &target, "--gpus", "3xL4"], 64, "1, 2, 4 or 8 GPUs for each of --targets");
    check(
        &["--target", &target, "--gpus", "4xL4", "--targets", "3"],
        64,
        "--targets is 3, expected a divisor of 4 GPUs",
    );
    check(
        &["--target", &target, "--gpus", "1xL4", "--acceptance", "1.2"],
        64,
        "--acceptance is 1.2, expected 0 to 1",
    );
    check(&["--target", &target, "--gpus", "1xL4", "--context", "99999"], 64, "expected 1 to 32768");
    check(&["--target", &target, "--gpus", "1xTPU"], 64, "known: B200-180");
    check(&["--target", &target, "--gpus", "1xL4", "--draft-gpus", "1xL4"], 64, "--draft <CONFIG>");
    check(&["--target", "nowhere.json", "--gpus", "1xL4"], 1, "cannot read nowhere.json");
}
