//! `outrider bench` as a program against a scripted server: two settings of one server, its table, JSON and
//! page, and its errors.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outrider_cli::load::scripted::{Script, ScriptedServer, Step};
use serde_json::Value;

/// Prompts that begin with "slow" take ten times as long per token: far longer than a scheduling delay.
fn server() -> ScriptedServer {
    ScriptedServer::start(|prompt| {
        let gap = Duration::from_millis(if prompt.starts_with("slow") { 60 } else { 6 });
        let mut script = Script::tokens(&[gap; 5]);
        if prompt.ends_with("refused") {
            script = Script::refusal(503);
        }
        if prompt.ends_with("cut") {
            script.steps.truncate(3);
            script.steps.push(Step::Cut);
        }
        script
    })
    .expect("a free port")
}

fn bench(url: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
    command.args(["bench", "--url", url, "--blocks", "4", "--warmup", "2"]).args(args);
    command.output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn prompts(directory: &Path, lines: &[&str]) -> String {
    let path = directory.join("prompts.jsonl");
    std::fs::write(&path, lines.join("\n")).expect("the directory takes files");
    path.display().to_string()
}

/// One arm's body overrides the prompt, so that the server can distinguish the arms: the second is slow.
#[test]
fn two_settings_of_one_server_are_told_apart() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let file = prompts(
        directory.path(),
        &[r#"{"task": "sql", "prompt": "one"}"#, r#"{"task": "<chat>", "prompt": "two"}"#],
    );
    let page = directory.path().join("page.html");
    let json = directory.path().join("report.json");
    let arguments = [
        "--prompts",
        &file,
        "--concurrency",
        "1,2",
        "--rate",
        "20",
        "--temperatures",
        "0,0.8",
        "--slo",
        "ttft:60s,tpot:60s",
        "--block-requests",
        "2",
        "--arm",
        "fast",
        "--arm",
        "slow:prompt=slow",
        "--html",
        page.to_str().unwrap(),
        "--save-json",
        json.to_str().unwrap(),
    ];
    let output = bench(&server.url(), &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for expected in ["== 2 at a time, temperature 0.8 ==", "== 20/s, temperature 0 ==", "generator: ", "ship"]
    {
        assert!(table.contains(expected), "no `{expected}` in\n{table}");
    }

    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let results = report["results"].as_array().unwrap();
    // Three loads, two temperatures, two arms; all task types together and two task types.
    assert_eq!(results.len(), 36);
    for result in results {
        let requests = if result["task"] == "all" { 8 } else { 4 };
        assert_eq!((&result["completed"], &result["failed"]), (&requests.into(), &0.into()), "{result}");
        assert_eq!(result["total_output_tokens"].as_u64(), Some(requests * 5));
        assert_eq!(result["request_goodput"], result["request_throughput"]);
        for field in ["mean_ttft_ms", "median_tpot_ms", "p90_itl_ms", "p99_e2el_ms", "std_ttft_ms"] {
            assert!(result[field].as_f64().is_some_and(|value| value > 0.0), "{field} of {result}");
        }
    }
    for comparison in report["comparisons"].as_array().unwrap() {
        let found = &comparison["comparison"];
        assert!(found["speedup"]["value"].as_f64().is_some_and(|speedup| speedup > 1.2), "{comparison}");
        assert_eq!((&found["observations"], &found["failed"]), (&4.into(), &0.into()));
        assert_eq!(found["same_text"], found["pairs"]);
    }
    assert_eq!(report["stops_paying"][0]["state"], "pays_throughout");

    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("&lt;chat&gt;") && !page.contains("<chat>"));
    for outside in ["<script", "<link", "<img", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "the page must need nothing else: {outside}");
    }
}

#[test]
fn a_verdict_can_decide_the_exit_code() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let file = prompts(directory.path(), &[r#"{"task": "sql", "prompt": "one"}"#]);
    let common = ["--prompts", &file, "--concurrency", "1", "--block-requests", "2", "--fail-unless-ship"];
    let code_of = |arms: &[&str]| {
        let output = bench(&server.url(), &[&common[..], arms].concat());
        (output.status.code(), text(&output.stderr))
    };
    let (code, stderr) = code_of(&["--arm", "fast", "--arm", "slow:prompt=slow"]);
    assert_eq!(code, Some(0), "{stderr}");
    let (code, stderr) = code_of(&["--arm", "slow:prompt=slow", "--arm", "fast"]);
    assert_eq!(code, Some(3), "{stderr}");
    let (code, stderr) = code_of(&["--arm", "alone"]);
    assert_eq!(code, Some(64), "{stderr}");
    assert!(stderr.contains("--arm is `alone`, expected two arms"), "{stderr}");
}

/// The server stops answering in the middle of the first load.
#[test]
fn an_interrupted_run_reports_the_blocks_that_ended() {
    let (asked, waits) = (AtomicU64::new(0), std::sync::mpsc::channel());
    let server = ScriptedServer::start(move |_| {
        if asked.fetch_add(1, Ordering::Relaxed) < 12 {
            return Script::tokens(&[Duration::from_millis(1); 5]);
        }
        waits.0.send(()).expect("the test waits");
        Script::tokens(&[Duration::from_secs(3_600)])
    })
    .expect("a free port");
    let directory = tempfile::tempdir().unwrap();
    let file = prompts(directory.path(), &[r#"{"task": "sql", "prompt": "one"}"#]);
    let json = directory.path().join("report.json");
    let bench = Command::new(env!("CARGO_BIN_EXE_outrider"))
        .args(["bench", "--url", &server.url(), "--prompts", &file, "--blocks", "4", "--warmup", "2"])
        .args(["--concurrency", "1,2", "--block-requests", "2", "--arm", "a", "--arm", "b"])
        .args(["--save-json", json.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    waits.1.recv_timeout(Duration::from_secs(60)).expect("the server is asked");
    kill(Pid::from_raw(bench.id() as i32), Signal::SIGINT).unwrap();
    let output = bench.wait_with_output().unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("interrupted; this is what was measured until then"), "{stderr}");
    assert!(stdout.contains("== 1 at a time") && !stdout.contains("== 2 at a time"), "{stdout}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let all = report["results"].as_array().unwrap().iter().filter(|result| result["task"] == "all");
    let completed: u64 = all.map(|result| result["completed"].as_u64().unwrap()).sum();
    assert!(
        (1..12).contains(&completed) && completed.is_multiple_of(2),
        "{completed} in whole blocks of two"
    );
}

/// A server that responds as vLLM does: several tokens per chunk, speculation totals next to the usage,
/// counters in `/metrics`.
fn vllm() -> ScriptedServer {
    let asked = Arc::new(AtomicU64::new(0));
    let answered = asked.clone();
    let page = move |path: &str| {
        match path {
        "/v1/models" => {
            Some(r#"{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","max_model_len":2048}]}"#.to_owned())
        }
        "/metrics" => {
            let n = asked.load(Ordering::Relaxed);
            let line = |name: &str, labels: &str, value: u64| {
                format!("vllm:spec_decode_num_{name}_total{{engine=\"0\",model_name=\"m\"{labels}}} {value}.0\n")
            };
            Some(
                [
                    line("drafts", "", 4 * n),
                    line("draft_tokens", "", 12 * n),
                    line("accepted_tokens", "", 5 * n),
                    line("accepted_tokens_per_pos", ",position=\"0\"", 3 * n),
                    line("accepted_tokens_per_pos", ",position=\"1\"", n),
                    line("accepted_tokens_per_pos", ",position=\"2\"", n),
                ]
                .concat(),
            )
        }
        _ => None,
    }
    };
    let script = move |_: &str| {
        answered.fetch_add(1, Ordering::Relaxed);
        let chunk = |text: &str, reason: &str| {
            Step::Event(format!(
                r#"{{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason},"stop_reason":null}}]}}"#
            ))
        };
        let wait = || Step::Wait(Duration::from_millis(5));
        let usage = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":7,"total_tokens":16,"completion_tokens":9},"metrics":{"speculative_decoding":{"mean_acceptance_length":2.25,"draft_acceptance_rate":0.4167,"acceptance_histogram":[1,2,0,1],"num_spec_steps":4,"num_accepted_draft_tokens":5,"num_draft_tokens":12,"num_spec_tokens":3}}}"#;
        let steps = vec![
            wait(),
            chunk("a b c d", "null"),
            wait(),
            chunk(" e f", "null"),
            wait(),
            chunk(" g h", "null"),
            wait(),
            chunk(" i", "\"length\""),
            Step::Event(usage.to_owned()),
            Step::Event("[DONE]".to_owned()),
        ];
        Script { status: 200, steps }
    };
    ScriptedServer::start_with_pages(page, script).expect("a free port")
}

/// Additional fields of vLLM are used, and no outrider fields are sent to it.
#[test]
fn a_foreign_server_is_read_as_far_as_it_goes() {
    let server = vllm();
    let output = bench(&server.url(), &["--concurrency", "2", "--block-requests", "11", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["arms"][0]["served_by"], &report["arms"][1]), (&"vllm".into(), &Value::Null));
    let all = &report["results"][0];
    assert_eq!((&all["completed"], &all["total_output_tokens"]), (&44.into(), &(44 * 9).into()), "{all}");
    let close = |field: &str, expected: f64| {
        assert!(all[field].as_f64().is_some_and(|found| (found - expected).abs() < 1e-9), "{field} of {all}");
    };
    close("spec_decode_acceptance_rate", 500.0 / 12.0);
    close("spec_decode_acceptance_length", 2.25);
    assert_eq!(all["spec_decode_per_position_acceptance_rates"], serde_json::json!([0.75, 0.25, 0.25]));
    // Four chunks, nine tokens: the time per token is latency / 8, and there are three gaps between chunks.
    assert!(all["mean_tpot_ms"].as_f64() < all["mean_itl_ms"].as_f64(), "{all}");
}

/// The cache salts of all requests, each with its number of requests.
fn cache_salts(server: &ScriptedServer) -> BTreeMap<Option<String>, usize> {
    let mut salts = BTreeMap::new();
    for entry in server.log() {
        *salts.entry(entry.body["cache_salt"].as_str().map(str::to_owned)).or_default() += 1;
    }
    salts
}

/// Both blocks of a pair send the same prompts: neither may find the other's in the server's prefix cache.
#[test]
fn blocks_share_no_cached_prompt() {
    let arguments = ["--concurrency", "2", "--block-requests", "11", "--arm", "a", "--arm", "b"];
    let salted = vllm();
    let output = bench(&salted.url(), &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let salts = cache_salts(&salted);
    assert!(!salts.contains_key(&None), "{salts:?}");
    let mut requests: Vec<usize> = salts.values().copied().collect();
    requests.sort_unstable();
    // The warm-up of each arm, then four blocks per arm.
    assert_eq!(requests, [2, 2, 11, 11, 11, 11, 11, 11, 11, 11], "a salt of each block: {salts:?}");

    let unsalted = server();
    let output = bench(&unsalted.url(), &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found = cache_salts(&unsalted);
    assert!(found.keys().eq([&None]), "a server that does not know the field gets none: {found:?}");
}

/// A server that requires a key: the error names the ways to give one.
#[test]
fn a_missing_key_has_a_remedy() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let _ = connection.read(&mut [0; 4096]).unwrap();
        let answer = "HTTP/1.1 401 Unauthorized\r\ncontent-length: 6\r\nconnection: close\r\n\r\nno key";
        connection.write_all(answer.as_bytes()).unwrap();
    });
    let output = bench(&url, &[]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let expected = format!("{url}/v1/models failed: 401: no key; give a key with OPENAI_API_KEY");
    assert!(stderr.contains(&expected), "{stderr}");
}

/// Failures are counted and quoted, prevent a verdict, and decide the exit code.
#[test]
fn failed_requests_are_shown_and_nothing_is_claimed() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let lines = [r#"{"task": "a", "prompt": "fine"}"#, r#"{"task": "b", "prompt": "is cut"}"#];
    let file = prompts(directory.path(), &lines);
    let url = server.url();
    let arguments = ["--prompts", &file, "--concurrency", "2", "--arm", "x", "--arm", "y", "--json"];
    let output = bench(&url, &[&arguments[..], &["--metrics-url", &url]].concat());
    let stderr = text(&output.stderr);
    assert!(stderr.contains(&format!("--metrics-url {url} shows no speculation counters")), "{stderr}");
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    assert!(stderr.contains("outrider: 16 of 32 requests failed; in one arm at one load 50.0%"), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = &report["results"][0];
    assert_eq!(
        (&all["task"], &all["completed"], &all["failures"]["cut"]),
        (&"all".into(), &8.into(), &8.into())
    );
    assert_eq!(report["comparisons"][0]["comparison"]["verdict"], "undecided");
    assert!(
        report["faults"][0].as_str().is_some_and(|fault| fault.starts_with("cut")),
        "{}",
        report["faults"]
    );
}

#[test]
fn a_path_that_is_not_unicode_can_be_measured_with() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(OsStr::from_bytes(b"caf\xe9.jsonl"));
    std::fs::write(&file, r#"{"task": "a", "prompt": "one"}"#).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
    command.args(["bench", "--url", &server.url(), "--blocks", "1", "--concurrency", "1", "--warmup", "0"]);
    let output = command.arg("--prompts").arg(&file).output().expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("caf\u{fffd}.jsonl"), "{}", text(&output.stdout));
}

/// A report that nobody reads on standard output is written to its file, and one that cannot be written is
/// refused before the measurement.
#[test]
fn the_saved_report_does_not_depend_on_standard_output() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let file = prompts(directory.path(), &[r#"{"task": "a", "prompt": "one"}"#]);
    let saved = directory.path().join("report.json").display().to_string();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
    command.args(["bench", "--url", &server.url(), "--blocks", "1", "--concurrency", "1", "--warmup", "0"]);
    command.args(["--prompts", &file, "--save-json", &saved]).stdout(writer);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(report["results"][0]["completed"], 2);

    let fresh = directory.path().join("fresh.json");
    let arguments = ["--prompts", &file, "--tasks", "none", "--save-json", fresh.to_str().unwrap()];
    assert_eq!(bench(&server.url(), &arguments).status.code(), Some(64));
    assert!(!fresh.exists(), "nothing was measured");

    let below_a_file = format!("{saved}/report.json");
    let output =
        bench(&server.url(), &["--prompts", &file, "--concurrency", "1", "--save-json", &below_a_file]);
    let fault = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{fault}");
    assert!(fault.starts_with(&format!("outrider: cannot write {below_a_file}")), "{fault}");
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_reason() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let refused = prompts(directory.path(), &[r#"{"task": "a", "prompt": "is refused"}"#]);
    let rows: [(&[&str], i32, &str); 6] = [
        (&["--prompts", &refused], 1, "every warm-up request failed; the first: refused with 503"),
        (&["--prompts", "nowhere.jsonl"], 1, "cannot read prompts from nowhere.jsonl"),
        (&["--tasks", "poetry"], 64, "--tasks is `poetry`, expected task types of the prompts: api_call, "),
        (&["--arm", "a:speculation=off"], 64, "`speculation` is a setting of an outrider router"),
        (&["--arm", "a", "--arm", "a"], 64, "two different names"),
        (&["--model", "other"], 1, "it lists no model `other`"),
    ];
    for (arguments, code, reason) in rows {
        let output = bench(&server.url(), arguments);
        let fault = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{fault}");
        assert!(fault.contains(reason), "{arguments:?}: {fault}");
    }
    // The listener is closed at once: nothing listens at its address.
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap();
    let url = format!("http://{closed}");
    let unreachable = "start a server there, such as `outrider up`";
    for (url, reason) in [
        (url.as_str(), unreachable),
        ("ftp://h", "expected http:// or https://"),
        ("127.0.0.1:8000", "expected http://HOST:PORT"),
        ("localhost:8000", "it has no host: expected http://HOST:PORT"),
    ] {
        let output = bench(url, &[]);
        assert!(text(&output.stderr).contains(reason), "{url}: {}", text(&output.stderr));
    }
}
