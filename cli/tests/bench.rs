//! `outrider bench` as a program against a scripted server: two settings of one server, its table, JSON and page, and how it refuses.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use outrider_cli::load::scripted::{Script, ScriptedServer, Step};
use serde_json::Value;

/// Prompts that begin with "slow" take twice as long for each token.
fn server() -> ScriptedServer {
    ScriptedServer::start(|prompt| {
        let gap = Duration::from_millis(if prompt.starts_with("slow") { 12 } else { 6 });
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

/// One arm's body overrides the prompt, so that the server can tell the arms apart: the second takes twice as long.
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
    // Three loads, two temperatures, two arms; all and two task types.
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

/// Failures are counted, quoted, and keep the judge from judging.
#[test]
fn failed_requests_are_shown_and_nothing_is_claimed() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let lines = [r#"{"task": "a", "prompt": "fine"}"#, r#"{"task": "b", "prompt": "is cut"}"#];
    let file = prompts(directory.path(), &lines);
    let arguments = ["--prompts", &file, "--concurrency", "2", "--arm", "x", "--arm", "y", "--json"];
    let output = bench(&server.url(), &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
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
fn what_cannot_be_measured_is_refused_with_a_reason() {
    let server = server();
    let directory = tempfile::tempdir().unwrap();
    let refused = prompts(directory.path(), &[r#"{"task": "a", "prompt": "is refused"}"#]);
    let rows: [(&[&str], i32, &str); 6] = [
        (
            &["--prompts", &refused],
            1,
            "no request of the warm-up was answered, the first was refused with 503",
        ),
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
    let url = server.url();
    drop(server);
    std::thread::sleep(Duration::from_millis(100));
    for (url, reason) in [(url.as_str(), "cannot ask http://"), ("ftp://h", "expected http:// or https://")]
    {
        let output = bench(url, &[]);
        assert!(text(&output.stderr).contains(reason), "{url}: {}", text(&output.stderr));
    }
}
