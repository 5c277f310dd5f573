//! A server that responds by a script and logs when it sent each event: the reference for the generator's
//! figures.
//!
//! One blocking thread per connection writes the socket directly, so that nothing delays a script's events
//! relative to their log. There is no model; tests and `examples/generator_cost.rs` use it.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// One step of a response.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Wait.
    Wait(Duration),
    /// Send an event with this data.
    Event(String),
    /// Close the connection in the middle of the body.
    Cut,
    /// Send nothing more until the client disconnects.
    Stall,
    /// End the body properly, then close the connection without notice, as servers do with idle connections.
    EndAndClose,
}

/// A scripted response.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    /// HTTP status. With any other than 200 the body is an error and there are no steps.
    pub status: u16,
    /// Steps in order.
    pub steps: Vec<Step>,
}

impl Script {
    /// A completion with one token per chunk, each after its wait, then usage and `[DONE]`.
    pub fn tokens(waits: &[Duration]) -> Self {
        let mut steps = Vec::new();
        for wait in waits {
            steps.extend([Step::Wait(*wait), Step::token()]);
        }
        steps.push(Step::Event(chunk(json!([{ "index": 0, "text": "", "finish_reason": "length" }]))));
        let usage = json!({ "prompt_tokens": 1, "completion_tokens": waits.len() });
        steps.push(Step::Event(json!({ "choices": [], "usage": usage }).to_string()));
        steps.push(Step::Event("[DONE]".to_owned()));
        Self { status: 200, steps }
    }

    /// A response with an error status.
    pub fn refusal(status: u16) -> Self {
        Self { status, steps: Vec::new() }
    }
}

impl Step {
    /// A chunk of one token.
    pub fn token() -> Self {
        Self::Event(chunk(json!([{ "index": 0, "text": "x", "finish_reason": null }])))
    }
}

fn chunk(choices: Value) -> String {
    json!({ "id": "scripted", "object": "text_completion", "choices": choices }).to_string()
}

/// Log of one request.
#[derive(Debug, Clone)]
pub struct LogEntry {
    /// The prompt as received.
    pub prompt: String,
    /// The whole request body.
    pub body: Value,
    /// When it had been received completely.
    pub received: Instant,
    /// The events sent.
    pub events: Vec<SentEvent>,
}

/// An event and the time range in which it was sent.
#[derive(Debug, Clone)]
pub struct SentEvent {
    /// Its data.
    pub data: String,
    /// Time before it was passed to the operating system.
    pub before: Instant,
    /// Time after it was passed to the operating system.
    pub after: Instant,
}

impl LogEntry {
    /// The events with text.
    pub fn tokens(&self) -> impl Iterator<Item = &SentEvent> {
        self.events.iter().filter(|event| event.data.contains(r#""text":"x""#))
    }
}

type ScriptOf = dyn Fn(&str) -> Script + Send + Sync;
type PageOf = dyn Fn(&str) -> Option<String> + Send + Sync;

struct Shared {
    page_of: Box<PageOf>,
    script_of: Box<ScriptOf>,
    log: Mutex<Vec<LogEntry>>,
    ending: AtomicBool,
}

/// The server. It stops listening when dropped.
pub struct ScriptedServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl ScriptedServer {
    /// Listens on a free loopback port; `script_of` returns the script for each prompt.
    ///
    /// # Errors
    /// The operating system provides no port.
    pub fn start(script_of: impl Fn(&str) -> Script + Send + Sync + 'static) -> io::Result<Self> {
        let models = json!({ "object": "list", "data": [{ "id": "scripted", "owned_by": "scripted" }] });
        Self::start_with_pages(move |path| (path == "/v1/models").then(|| models.to_string()), script_of)
    }

    /// Like [`Self::start`], with pages at other paths: `page_of` is called first.
    ///
    /// # Errors
    /// The operating system provides no port.
    pub fn start_with_pages(
        page_of: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
        script_of: impl Fn(&str) -> Script + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            page_of: Box::new(page_of),
            script_of: Box::new(script_of),
            log: Mutex::default(),
            ending: AtomicBool::new(false),
        });
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                if serving.ending.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(connection) = connection else { continue };
                let shared = Arc::clone(&serving);
                // A client that disconnects in the middle of a response is part of the tests.
                std::thread::spawn(move || serve(&connection, &shared).ok());
            }
        });
        Ok(Self { address, shared })
    }

    /// Base URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The log so far, in the order in which requests arrived.
    pub fn log(&self) -> Vec<LogEntry> {
        let mut log = self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clone();
        log.sort_by_key(|entry| entry.received);
        log
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Relaxed);
        // Wakes the listener. If connecting fails, there is no listener to wake.
        drop(TcpStream::connect(self.address));
    }
}

/// Serves all requests of one connection.
fn serve(connection: &TcpStream, shared: &Shared) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection);
    while let Some((path, body)) = read_request(&mut reader)? {
        if let Some(page) = (shared.page_of)(&path) {
            respond(connection, 200, &page)?;
            continue;
        }
        let received = Instant::now();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let Some(prompt) = body["prompt"].as_str().map(str::to_owned) else {
            respond(connection, 404, r#"{"error":{"message":"no such page"}}"#)?;
            continue;
        };
        let script = (shared.script_of)(&prompt);
        let mut entry = LogEntry { prompt, body, received, events: Vec::new() };
        let played = run_script(connection, &script, &mut entry);
        shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        if !played? {
            return Ok(());
        }
    }
    Ok(())
}

/// Plays a script. Returns whether the connection can be reused.
fn run_script(mut connection: &TcpStream, script: &Script, entry: &mut LogEntry) -> io::Result<bool> {
    if script.status != 200 {
        respond(connection, script.status, r#"{"error":{"message":"the script says no"}}"#)?;
        return Ok(true);
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    connection.write_all(head.as_bytes())?;
    for step in &script.steps {
        match step {
            Step::Wait(time) => std::thread::sleep(*time),
            Step::Cut => {
                connection.shutdown(std::net::Shutdown::Both)?;
                return Ok(false);
            }
            Step::EndAndClose => {
                connection.write_all(b"0\r\n\r\n")?;
                connection.shutdown(std::net::Shutdown::Both)?;
                return Ok(false);
            }
            Step::Stall => {
                // The client sends nothing more: this returns when it disconnects.
                io::copy(&mut connection, &mut io::sink())?;
                return Ok(false);
            }
            Step::Event(data) => {
                let event = format!("data: {data}\n\n");
                let bytes = format!("{:x}\r\n{event}\r\n", event.len());
                let before = Instant::now();
                connection.write_all(bytes.as_bytes())?;
                entry.events.push(SentEvent { data: data.clone(), before, after: Instant::now() });
            }
        }
    }
    connection.write_all(b"0\r\n\r\n")?;
    Ok(true)
}

fn respond(mut connection: &TcpStream, status: u16, body: &str) -> io::Result<()> {
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n");
    connection.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice())
}

/// Path and body of the next request; `None` if the client has disconnected.
fn read_request(reader: &mut BufReader<&TcpStream>) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some((path, body)))
}
