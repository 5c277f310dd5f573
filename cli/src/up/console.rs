//! Terminal output of `outrider up`: progress while the models load, one ready line, prefixed logs of the
//! processes.
//!
//! Everything goes to standard error except results (the ready line with the command to paste, the evidence
//! and the console's address), which go to standard output. Animated lines are used only on a terminal,
//! colours only there and without `NO_COLOR` (<https://no-color.org>).

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::evidence::PROMPT;
use super::preflight::Checked;
use crate::cluster::{LogSink, ProcessCluster, TargetKind};
use crate::{output, shell};

/// ANSI colours of the prefixes, by order of first appearance.
const COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 31];
/// Names are padded to this width so that log lines align.
const NAME_WIDTH: usize = 9;
/// Log lines kept while processes load; the oldest are dropped first.
const BUFFERED_LINES_MAX: usize = 2_000;
/// Timeout of the request for the model's name.
const NAME_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two frames of a spinner.
const TICK: Duration = Duration::from_millis(120);

/// The terminal or the log file that `up` writes to.
pub(super) struct Console {
    terminal: bool,
    coloured: bool,
    progress: MultiProgress,
    bars: Mutex<HashMap<String, ProgressBar>>,
    names: Mutex<Vec<String>>,
    /// Log lines of processes that are still loading, unless they are shown immediately.
    buffered: Mutex<Option<VecDeque<String>>>,
}

impl Console {
    pub(super) fn new() -> Self {
        let progress = MultiProgress::new();
        let terminal = !progress.is_hidden();
        Self {
            terminal,
            coloured: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            progress,
            bars: Mutex::default(),
            names: Mutex::default(),
            buffered: Mutex::default(),
        }
    }

    /// Buffers log lines from now on, so that a failed start is explained by one line.
    pub(super) fn buffer_logs(&self) {
        *self.buffered.lock().unwrap_or_else(PoisonError::into_inner) = Some(VecDeque::new());
    }

    /// Writes the buffered lines, and later lines directly.
    pub(super) fn flush_logs(&self) {
        let mut buffered = self.buffered.lock().unwrap_or_else(PoisonError::into_inner);
        buffered.take().into_iter().flatten().for_each(|line| self.write(&line));
    }

    /// Shows what each process does until it is ready.
    pub(super) fn begin_loading(&self, processes: &[(String, String)]) {
        let style = ProgressStyle::with_template("{prefix} {spinner} {msg} ({elapsed})");
        let style = style.expect("the template is a constant that names known fields");
        for (name, doing) in processes {
            if !self.terminal {
                self.write(&format!("{name}: {doing}"));
                continue;
            }
            let bar = self.progress.add(ProgressBar::new_spinner().with_style(style.clone()));
            bar.set_prefix(self.prefix(name));
            bar.set_message(doing.clone());
            bar.enable_steady_tick(TICK);
            self.bars.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), bar);
        }
    }

    /// Reports that one process is ready.
    pub(super) fn loaded(&self, name: &str, after: Duration) {
        match self.bars.lock().unwrap_or_else(PoisonError::into_inner).remove(name) {
            Some(bar) => bar.finish_and_clear(),
            None if self.terminal => return,
            None => (),
        }
        self.write(&format!("{}: ready after {:.1} s", name, after.as_secs_f64()));
    }

    /// Removes the remaining progress lines.
    pub(super) fn end_loading(&self) {
        let bars = std::mem::take(&mut *self.bars.lock().unwrap_or_else(PoisonError::into_inner));
        bars.into_values().for_each(|bar| bar.finish_and_clear());
    }

    /// Prints where the cluster serves `model`, and a command to paste.
    pub(super) fn ready(
        &self,
        checked: &Checked,
        cluster: &ProcessCluster,
        (model, after): (&str, Duration),
    ) {
        let url = cluster.http_url();
        let curl = curl_command(&url, model, checked.spec.api_keys.is_some());
        let text = format!(
            "\noutrider is ready at {url} (gRPC at {}) after {:.1} s\n{}\n\n{curl}\n",
            cluster.grpc_url(),
            after.as_secs_f64(),
            checked.pair(),
        );
        self.print_result(&text);
    }

    /// Prints the evidence line: what drafting gains.
    pub(super) fn evidence(&self, line: &str) {
        self.print_result(line);
    }

    /// Prints the last lines of the start: the console's address, how to measure under load and how to stop.
    pub(super) fn open(&self, checked: &Checked, cluster: &ProcessCluster, admin: &str) {
        let with_key = checked.spec.api_keys.is_some();
        let bench = bench_command(&own_program(), (&cluster.http_url(), admin), with_key);
        self.print_result(&format!("console: {admin}/\nunder load: {bench}\n\nCtrl-C stops it.\n"));
    }

    /// Prints a note.
    pub(super) fn info(&self, text: &str) {
        self.write(&format!("outrider: {text}"));
    }

    /// Prints an error.
    pub(super) fn error(&self, text: &str) {
        let label = if self.coloured { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
        self.write(&format!("{label} {text}"));
    }

    fn prefix(&self, name: &str) -> String {
        if !self.coloured {
            return format!("{name:NAME_WIDTH$}|");
        }
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let known = names.iter().position(|known| known == name);
        let position = known.unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        });
        format!("\x1b[{}m{name:NAME_WIDTH$}|\x1b[0m", COLOURS[position % COLOURS.len()])
    }

    fn write(&self, line: &str) {
        // Suspends progress lines while this line is printed.
        self.progress.suspend(|| output::note(line));
    }

    /// The cluster serves whether or not somebody reads where.
    fn print_result(&self, text: &str) {
        self.progress.suspend(|| output::print(&format!("{text}\n")).ok());
    }
}

impl LogSink for Console {
    fn line(&self, process: &str, line: &str) {
        let line = format!("{} {line}", self.prefix(process));
        let mut buffered = self.buffered.lock().unwrap_or_else(PoisonError::into_inner);
        match buffered.as_mut() {
            None => self.write(&line),
            Some(buffered) => {
                if buffered.len() == BUFFERED_LINES_MAX {
                    buffered.pop_front();
                }
                buffered.push_back(line);
            }
        }
    }
}

/// The name under which the router serves the target. With API keys the router does not report it, and the
/// name is found as the worker finds it.
pub(super) async fn served_model(url: &str, target: &TargetKind) -> String {
    let ask = async {
        // A proxy of the environment does not reach this machine's loopback addresses.
        let client = reqwest::Client::builder().timeout(NAME_TIMEOUT).no_proxy().build().ok()?;
        let response = client.get(format!("{url}/v1/models")).send().await.ok()?;
        let models = response.json::<serde_json::Value>().await.ok()?;
        Some(models["data"][0]["id"].as_str()?.to_owned())
    };
    ask.await.unwrap_or_else(|| model_name(target))
}

/// The name that the worker gives the checkpoint.
fn model_name(target: &TargetKind) -> String {
    let TargetKind::Model(directory) = target else { return "synthetic".to_owned() };
    let config = std::fs::read_to_string(directory.join("config.json")).ok();
    let config = config.and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok());
    let name = config.as_ref().and_then(|config| config["_name_or_path"].as_str());
    engine::model_name(name, directory)
}

fn curl_command(url: &str, model: &str, with_key: bool) -> String {
    let body = serde_json::json!({
        "model": model,
        "messages": [{ "role": "user", "content": PROMPT }],
        "max_tokens": 64,
        "stream": true,
    });
    let key = if with_key { " -H \"Authorization: Bearer $OUTRIDER_API_KEY\"" } else { "" };
    let [url, body] = [format!("{url}/v1/chat/completions"), body.to_string()];
    let [url, body] = [&url, &body].map(|word| shell::quote(word));
    format!("curl -N {url}{key} -H 'Content-Type: application/json' -d {body}")
}

/// This program as it was called.
fn own_program() -> String {
    let program = std::env::args_os().next();
    program.map_or("outrider".into(), |program| program.to_string_lossy().into_owned())
}

/// The command that measures the cluster under load.
fn bench_command(program: &str, (url, admin): (&str, &str), with_key: bool) -> String {
    let [program, url, admin] = [program, url, admin].map(shell::quote);
    // Not a flag: other users can see those.
    let key = if with_key { "OPENAI_API_KEY=\"$OUTRIDER_API_KEY\" " } else { "" };
    format!("{key}{program} bench --url {url} --metrics-url {admin}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_for_load_names_both_addresses_and_the_key_where_one_is_needed() {
        let (url, admin) = ("http://127.0.0.1:8000", "http://127.0.0.1:8002");
        let command = |program, with_key| bench_command(program, (url, admin), with_key);
        let both = format!("bench --url {url} --metrics-url {admin}");
        assert_eq!(command("target/debug/outrider", false), format!("target/debug/outrider {both}"));
        let expected = format!("OPENAI_API_KEY=\"$OUTRIDER_API_KEY\" '/my programs/outrider' {both}");
        assert_eq!(command("/my programs/outrider", true), expected);
    }

    #[test]
    fn the_command_to_paste_is_one_line_with_valid_json() {
        let command = curl_command("http://127.0.0.1:8000", "target", false);
        assert_eq!(command.lines().count(), 1);
        let body = command.split_once("-d '").unwrap().1.strip_suffix('\'').unwrap();
        assert!(!body.contains('\''), "a quote would end the shell's string: {body}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(body).unwrap()["model"], "target");
        let quoted = curl_command("http://127.0.0.1:8000", "it's", false);
        assert!(quoted.contains(r#""model":"it'\''s""#), "{quoted}");
        assert!(curl_command("http://h", "m", true).contains("Bearer $OUTRIDER_API_KEY"));
    }

    #[test]
    fn colours_are_left_out_where_they_are_not_wanted() {
        let prefix = |coloured| Console { coloured, ..Console::new() }.prefix("router");
        assert_eq!(prefix(false), "router   |");
        assert_eq!(prefix(true), "\x1b[36mrouter   |\x1b[0m");
    }

    #[test]
    fn a_target_is_named_as_its_directory() {
        let name = |directory: &str| model_name(&TargetKind::Model(directory.into()));
        assert_eq!((name("models/demo/target/").as_str(), name("qwen").as_str()), ("target", "qwen"));
    }
}
