//! Faults that `up` reports before it starts anything, and their texts.

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    up: UpArgs,
}

fn parse(arguments: &[&str]) -> UpArgs {
    let line = std::iter::once("up").chain(arguments.iter().copied());
    Cli::try_parse_from(line).unwrap().up
}

fn checkpoint(root: &Path, name: &str, vocab: &str) -> PathBuf {
    let directory = root.join(name);
    std::fs::create_dir(&directory).unwrap();
    let tokenizer = format!(r#"{{"model":{{"vocab":{vocab}}},"added_tokens":[]}}"#);
    for (file, text) in [("config.json", "{}"), ("tokenizer.json", &tokenizer), ("model.safetensors", "")] {
        std::fs::write(directory.join(file), text).unwrap();
    }
    directory
}

/// The description of the cluster that these arguments start.
fn cluster(arguments: &[&str]) -> ClusterSpec {
    let binaries = Binaries {
        router: "/bin/outrider-router".into(),
        draft_worker: "/bin/outrider-draft-worker".into(),
        target_worker: "/bin/outrider-target-worker".into(),
    };
    let args = parse(arguments);
    let engine = choose_engine(&args).unwrap();
    spec(args, binaries, engine)
}

fn messages(faults: &[PreflightFault]) -> String {
    faults.iter().map(|fault| format!("{fault}\n")).collect()
}

#[test]
fn the_draft_defaults_to_the_bundled_one_only_with_the_bundled_target() {
    let kind = |arguments: &[&str]| choose_models(&parse(arguments)).unwrap().1;
    assert!(matches!(kind(&[]), DraftKind::Model(directory) if directory.ends_with("models/demo/draft")));
    assert_eq!(kind(&["--target", "/x"]), DraftKind::Ngram);
    assert_eq!(kind(&["--target", "/x", "--draft", "/y"]), DraftKind::Model("/y".into()));
    assert_eq!(kind(&["--draft", "none"]), DraftKind::None);
    assert_eq!(kind(&["--draft", "./none"]), DraftKind::Model("./none".into()));
}

#[test]
fn only_the_bundled_target_gets_ballast_unasked() {
    let count = |arguments: &[&str]| ballast(&parse(arguments)).to_string();
    assert_eq!(count(&[]), "250M");
    assert_eq!(count(&["--draft", "ngram"]), "250M");
    assert_eq!(count(&["--ballast", "0"]), "0");
    assert_eq!(count(&["--ballast", "20m"]), "20M");
    assert_eq!(count(&["--target", "/x"]), "0");
    assert_eq!(count(&["--target", "/x", "--ballast", "1.5B"]), "1.5B");
    assert_eq!(count(&["--engine", "synthetic:/p.toml"]), "0");
    assert!(Cli::try_parse_from(["up", "--ballast", "much"]).is_err());
    assert!(Cli::try_parse_from(["up", "--engine", "synthetic:/p.toml", "--ballast", "1M"]).is_err());
}

#[test]
fn the_bundled_pair_passes() {
    let (target, draft) = choose_models(&parse(&[])).unwrap();
    assert!(matches!(check_models(&target, &draft), Ok(false)));
}

#[test]
fn the_first_token_that_differs_is_named() {
    let root = tempfile::tempdir().unwrap();
    let target = checkpoint(root.path(), "t", r#"{"a":0,"b":1,"c":2}"#);
    let draft = checkpoint(root.path(), "d", r#"{"a":0,"b":1,"d":2}"#);
    let message = messages(&check_models(&target, &DraftKind::Model(draft)).unwrap_err());
    assert!(message.contains(r#"token 2 is "d" in one and "c" in the other"#), "{message}");
    assert!(message.contains("; and tokens cannot be mapped: the target's tokenizer: "), "{message}");
    assert_eq!(message.lines().count(), 1);
}

#[test]
fn a_draft_with_another_tokenizer_gets_the_targets() {
    let root = tempfile::tempdir().unwrap();
    let (target, draft) = choose_models(&parse(&[])).unwrap();
    let DraftKind::Model(draft) = draft else { panic!("the bundled draft is a model") };
    let foreign = root.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    for entry in std::fs::read_dir(&draft).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, foreign.join(path.file_name().unwrap())).unwrap();
    }
    // Swaps two tokens.
    let file = foreign.join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    for id in vocabulary.values_mut() {
        *id = match id.as_u64() {
            Some(1_000) => 1_001.into(),
            Some(1_001) => 1_000.into(),
            _ => continue,
        };
    }
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let [target, foreign] = [&target, &foreign].map(|path| path.to_str().unwrap());
    let args = parse(&["--target", target, "--draft", foreign]);
    let engine = choose_engine(&args).unwrap();
    assert_eq!(engine.target_tokenizer, Some(target.into()));
    assert!(pair_check_args(&args, &engine).is_empty(), "check-pair is for one tokenizer");
}

#[test]
fn all_faults_come_at_once() {
    let root = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let (target, keys) = (root.path().join("nowhere"), root.path().join("no-keys"));
    let faults = check(parse(&[
        "--target",
        target.to_str().unwrap(),
        "--draft",
        root.path().to_str().unwrap(),
        "--http",
        &taken,
        "--api-keys",
        keys.to_str().unwrap(),
    ]))
    .unwrap_err();
    let text = messages(&faults);
    for expected in [
        "nowhere is not a directory",
        "has no config.json",
        &format!("--http {taken} is taken"),
        "no-keys is not a file",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing in:\n{text}");
    }
}

#[test]
fn one_port_cannot_serve_both_doors() {
    let address = crate::cluster::free_address().unwrap().to_string();
    let faults = check(parse(&["--http", &address, "--grpc", &address])).unwrap_err();
    let expected = format!("--grpc {address} is taken by --http: ");
    assert!(messages(&faults).contains(&expected), "{}", messages(&faults));
}

#[test]
fn an_address_that_is_not_this_machines_is_not_called_taken() {
    // Reserved for documentation, so that no machine has it.
    let foreign = "192.0.2.1:8000".parse().unwrap();
    let fault = address_fault(("--http", foreign), &[]).unwrap().to_string();
    assert!(fault.starts_with("--http 192.0.2.1:8000 cannot be bound: "), "{fault}");
    assert!(address_fault(("--http", "192.0.2.1:0".parse().unwrap()), &[]).is_none());
}

#[test]
fn the_weight_format_reaches_models_and_the_consoles_check() {
    let pair = cluster(&["--weights", "int8"]);
    let int8 = vec!["--weights=int8".to_owned()];
    assert_eq!((&pair.target_args, &pair.draft_args), (&int8, &int8));
    for flag in ["--weights", "--draft-weights"] {
        let argument = format!("--pair-check={flag}=int8");
        assert!(pair.router_args.contains(&argument), "{argument} is not in {:?}", pair.router_args);
    }
    let ngram = cluster(&["--weights", "int8", "--draft", "ngram"]);
    assert_eq!((ngram.target_args.len(), ngram.draft_args.len()), (1, 0), "a table has no weights");
}

#[test]
fn each_worker_gets_its_device_and_its_memory() {
    let gpu = cluster(&["--device", "cuda:0,1", "--gpu-memory-utilization", "0.8"]);
    assert_eq!((gpu.target_device, gpu.draft_device), (ComputeDevice::Cuda(vec![0, 1]), ComputeDevice::Cpu));
    assert_eq!(gpu.target_args, ["--gpu-memory-utilization=0.8"]);
    assert!(gpu.draft_args.is_empty(), "a worker on the CPU refuses it: {:?}", gpu.draft_args);
    assert!(gpu.router_args.is_empty(), "the console's check would measure the CPU: {:?}", gpu.router_args);
    let sizes = ["--device=cuda:0", "--draft-device=cuda:0", "--kv-memory=4GiB", "--draft-kv-memory=1GiB"];
    let shared = cluster(&sizes);
    assert_eq!(shared.draft_device, ComputeDevice::Cuda(vec![0]));
    assert_eq!(shared.target_args, ["--kv-memory=4GiB"]);
    assert_eq!(shared.draft_args, ["--kv-memory=1GiB"]);
    let cpu = cluster(&[]);
    assert_eq!((cpu.target_device, cpu.draft_device), (ComputeDevice::Cpu, ComputeDevice::Cpu));
    assert!(!cpu.router_args.is_empty());
}

#[test]
fn workers_on_one_gpu_need_sizes_and_flags_without_effect_are_refused() {
    let found = |arguments: &[&str]| {
        let args = parse(arguments);
        let engine = choose_engine(&args).unwrap();
        messages(&devices::faults(&args, &engine))
    };
    let (target, draft) = ("--device=cuda:0", "--draft-device=cuda:0");
    for accepted in [
        &["--kv-memory=60%"][..],
        &[],
        &[target],
        &[target, "--draft-workers=4", "--draft-kv-memory=10%"],
        &[target, "--draft-device=cuda:1", "--gpu-memory-utilization=0.5"],
        &[target, draft, "--kv-memory=4GiB", "--draft-kv-memory=1GiB"],
        &[target, "--draft=ngram", "--kv-memory=4GiB"],
    ] {
        assert_eq!(found(accepted), "", "{accepted:?}");
    }
    for (refused, expected) in [
        (
            &[target, draft][..],
            "2 workers share cuda:0, and without a size each takes most of its memory: \
             give sizes with --kv-memory and --draft-kv-memory, ",
        ),
        (&["--device=cuda:1,0", draft, "--kv-memory=4GiB"], "give sizes with --draft-kv-memory, "),
        (&[target, "--target-workers=2"], "give sizes with --kv-memory, "),
        (&[draft, "--draft-workers=3", "--kv-memory=4GiB"], "3 workers share cuda:0"),
        (&[target, "--kv-memory=60%"], "--kv-memory 60% is a part of the host's memory"),
        (&[draft, "--draft-kv-memory=60%"], "--draft-kv-memory 60% is a part of the host's memory"),
        (&[draft, "--draft=ngram"], "--draft-device cuda:0 is for a draft that is a model"),
        (&[draft, "--draft=none"], "--draft-device cuda:0 is for a draft that is a model"),
        (&["--gpu-memory-utilization=0.5"], "--gpu-memory-utilization 0.5 has no effect"),
        (&[target, "--kv-memory=4GiB", "--gpu-memory-utilization=0.5"], "0.5 has no effect"),
    ] {
        let text = found(refused);
        assert!(text.contains(expected) && text.lines().count() == 1, "{refused:?}: {text}");
    }
}

#[test]
fn devices_and_memory_that_cannot_be_meant_are_refused_by_the_parser() {
    for (arguments, expected) in [
        (&["--device", "gpu"][..], "`gpu` is not a device, expected cpu, cuda:0 or cuda:0,1,.."),
        (&["--draft-device", "cuda"], "`cuda` is not a device"),
        (&["--kv-memory", "4GB"], "unknown unit `GB`"),
        (&["--draft-kv-memory", "0%"], "expected a whole number from 1 to 100"),
        (&["--gpu-memory-utilization", "1.1"], "expected a part above 0 and at most 1"),
        (&["--engine", "synthetic:/p.toml", "--device", "cuda:0"], "cannot be used with"),
        (&["--engine", "synthetic:/p.toml", "--draft-device", "cuda:0"], "cannot be used with"),
    ] {
        let line = std::iter::once("up").chain(arguments.iter().copied());
        let error = Cli::try_parse_from(line).err().unwrap().to_string();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

#[test]
fn no_worker_at_all_and_no_time_at_all_are_refused_by_the_parser() {
    assert!(Cli::try_parse_from(["up", "--draft-workers", "0"]).is_err());
    for factor in ["0", "-1", "nan", "fast"] {
        let scale = format!("--time-scale={factor}");
        let error = Cli::try_parse_from(["up", "--engine", "synthetic:/p.toml", &scale]).err().unwrap();
        assert!(error.to_string().contains("--time-scale <FACTOR>': expected a factor above 0"), "{error}");
    }
}
