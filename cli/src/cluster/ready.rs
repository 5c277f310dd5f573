//! Polls the readiness of processes over HTTP until each has been ready once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::FuturesUnordered;

/// Time between two requests to one process. Processes offer no event for readiness, so they are polled.
const INTERVAL: Duration = Duration::from_millis(50);
/// Timeout of one request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Probes of processes that are not ready yet.
pub(super) struct Prober {
    probes: FuturesUnordered<BoxFuture<'static, String>>,
    /// The last answer of each process that is not ready, for the error message.
    answers: Arc<Mutex<BTreeMap<String, String>>>,
}

impl Prober {
    /// Starts a probe for each pair of process name and URL.
    pub(super) fn new(processes: Vec<(String, String)>) -> Self {
        let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).no_proxy().build();
        let client = client.expect("a client without TLS and proxy loads nothing that can fail");
        let answers = Arc::new(Mutex::new(BTreeMap::new()));
        let probes = processes
            .into_iter()
            .map(|(name, url)| {
                let (client, answers) = (client.clone(), Arc::clone(&answers));
                async move {
                    while let Err(answer) = ask(&client, &url).await {
                        answers.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), answer);
                        tokio::time::sleep(INTERVAL).await;
                    }
                    answers.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
                    name
                }
                .boxed()
            })
            .collect();
        Self { probes, answers }
    }

    /// Returns the next process that became ready, or `None` when all have.
    ///
    /// Cancel safety: nothing is lost when the returned future is dropped.
    pub(super) async fn next(&mut self) -> Option<String> {
        self.probes.next().await
    }

    /// Each process that is not ready, with its last answer.
    pub(super) fn missing(&self) -> Vec<String> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.iter().map(|(name, answer)| format!("{name}: {answer}")).collect()
    }
}

/// Requests the URL; `Err` describes the answer if it was not a success.
async fn ask(client: &reqwest::Client, url: &str) -> Result<(), String> {
    let response = match client.get(url).send().await {
        Ok(response) => response,
        Err(error) if error.is_connect() => return Err(format!("nothing listens at {url}")),
        Err(error) => return Err(format!("no answer from {url}: {error}")),
    };
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let body = response.text().await.unwrap_or_default();
    Err(format!("{url} answered {status} {}", body.trim()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// Answers each connection with the next of `statuses`.
    fn serve(statuses: &'static [&'static str]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for status in statuses {
                let (mut connection, _) = listener.accept().unwrap();
                let _ = connection.read(&mut [0; 1024]).unwrap();
                write!(connection, "HTTP/1.1 {status}\r\ncontent-length: 4\r\nconnection: close\r\n\r\nload")
                    .unwrap();
            }
        });
        format!("http://{address}/health/ready")
    }

    #[tokio::test]
    async fn a_process_is_asked_until_it_says_yes() {
        let url = serve(&["503 Service Unavailable", "503 Service Unavailable", "200 OK"]);
        let mut prober = Prober::new(vec![("router".to_owned(), url)]);
        assert_eq!(prober.next().await.as_deref(), Some("router"));
        assert_eq!(prober.next().await, None);
        assert!(prober.missing().is_empty());
    }

    #[tokio::test]
    async fn the_last_answer_is_kept_for_the_error() {
        let url = serve(&["503 Service Unavailable"; 40]);
        let mut prober = Prober::new(vec![("router".to_owned(), url)]);
        assert!(tokio::time::timeout(Duration::from_millis(300), prober.next()).await.is_err());
        let missing = prober.missing().join("");
        assert!(
            missing.contains("router: ") && missing.contains("503 Service Unavailable load"),
            "{missing}"
        );
    }
}
