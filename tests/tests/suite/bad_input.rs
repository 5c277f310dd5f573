//! Requests that must be rejected, over both protocols of a real router: each with the right status and an
//! error that names the field and its limit. The next request must work and return the same text as before.

mod grpc;
mod http;

use anyhow::{Context as _, ensure};
use outrider_cli::cluster::ProcessCluster;
use serde_json::{Value, json};
use tests::http_client::{COMPLETIONS, HttpClient, completion_text};
use tests::pair::MODEL;
use tests::processes;
use tests::wait::WAIT_TIMEOUT;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PROMPT: &str = "Write a Python function that reverses a list.\n";

/// A cluster, and the text that a valid request must return after every invalid one.
struct Fixture {
    cluster: ProcessCluster,
    http: HttpClient,
    text: String,
}

fn valid_request() -> Value {
    json!({ "model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": 1 })
}

impl Fixture {
    async fn start() -> anyhow::Result<Self> {
        let cluster = processes::start(processes::without_drafts).await?;
        let http = HttpClient::new(cluster.http_url())?;
        let text = completion_text(&http.ask(COMPLETIONS, &valid_request()).await?)?.to_owned();
        Ok(Self { cluster, http, text })
    }

    async fn next_request_works(&self, after: &str) -> anyhow::Result<()> {
        let answer =
            self.http.ask(COMPLETIONS, &valid_request()).await.with_context(|| format!("after: {after}"))?;
        let text = completion_text(&answer)?;
        ensure!(text == self.text, "after {after} another text: {text:?} instead of {:?}", self.text);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_bytes_at_a_port_disturb_no_other_request() -> anyhow::Result<()> {
    let fixture = Fixture::start().await?;
    let length_of_another_body = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{{\"model\":"
    );
    for url in [fixture.cluster.http_url(), fixture.cluster.grpc_url()] {
        let address = url.trim_start_matches("http://").to_owned();
        for noise in [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
            vec![0xff; 100_000],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
            length_of_another_body.clone().into_bytes(),
        ] {
            let mut connection = TcpStream::connect(&address).await?;
            // The server may close the connection at any byte.
            if connection.write_all(&noise).await.is_ok() && connection.shutdown().await.is_ok() {
                let mut answer = Vec::new();
                let read = tokio::time::timeout(WAIT_TIMEOUT, connection.read_to_end(&mut answer)).await;
                ensure!(read.is_ok(), "{url} neither answers nor hangs up after {:?}..", &noise[..9]);
            }
            fixture.next_request_works("noise").await?;
        }
    }
    fixture.cluster.stop().await;
    Ok(())
}
