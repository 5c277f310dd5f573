//! A real etcd on loopback, with its own data directory, that a test can kill and restart.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_client::{Client, ConnectOptions};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::super::EtcdCluster;
use crate::tls::{ClientTls, tests::Files};

/// Timeout for etcd to start; it needs well under a second on an idle machine.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A start may lose a port to another process between choosing and binding it.
const START_ATTEMPTS: usize = 5;

pub(super) struct EtcdServer {
    directory: tempfile::TempDir,
    client_port: u16,
    peer_port: u16,
    child: Option<Child>,
    /// For TLS with client certificates: an authority, and a certificate signed by it.
    files: Option<Files>,
}

impl EtcdServer {
    /// A server that was never started: its address is known, but nothing listens there.
    pub(super) fn stopped() -> Self {
        let (one, other) = (free_port(), free_port());
        let (client_port, peer_port) = (one.local_addr().unwrap().port(), other.local_addr().unwrap().port());
        Self { directory: tempfile::tempdir().unwrap(), client_port, peer_port, child: None, files: None }
    }

    pub(super) async fn start_new() -> Self {
        Self::start_some(|| None).await
    }

    /// Starts a server that uses TLS and requires client certificates.
    pub(super) async fn start_over_tls() -> Self {
        Self::start_some(|| Some(Files::new())).await
    }

    async fn start_some(files: impl Fn() -> Option<Files>) -> Self {
        for _ in 0..START_ATTEMPTS {
            let mut server = Self::stopped();
            server.files = files();
            if server.try_start().await {
                return server;
            }
        }
        panic!("etcd did not start in {START_ATTEMPTS} attempts on different ports");
    }

    /// Starts the server on its existing data, if any.
    pub(super) async fn start(&mut self) {
        assert!(self.try_start().await, "etcd ended at its start:\n{}", self.log());
    }

    pub(super) fn uri(&self, prefix: &str) -> String {
        format!("etcd://127.0.0.1:{}/{prefix}", self.client_port)
    }

    pub(super) async fn client(&self) -> Client {
        let options = self.tls().map(|tls| ConnectOptions::new().with_tls(tls.config()));
        Client::connect([format!("127.0.0.1:{}", self.client_port)], options).await.unwrap()
    }

    pub(super) fn files(&self) -> &Files {
        self.files.as_ref().expect("a server that speaks TLS")
    }

    /// TLS settings of its legitimate clients.
    pub(super) fn tls(&self) -> Option<ClientTls> {
        let files = self.files.as_ref()?;
        let [ca, cert, key] = ["ca.pem", "cert.pem", "key.pem"].map(|name| files.path(name));
        Some(ClientTls::read(&ca, Some((&cert, &key))).unwrap())
    }

    /// Client configuration with these TLS settings.
    pub(super) fn cluster(&self, tls: Option<ClientTls>) -> EtcdCluster {
        EtcdCluster::new(self.endpoints(), "team/outrider").with_tls(tls)
    }

    pub(super) fn endpoints(&self) -> Vec<String> {
        vec![format!("127.0.0.1:{}", self.client_port)]
    }

    /// Kills the server, as in a crash.
    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Deletes all data of a killed server.
    pub(super) fn lose_data(&self) {
        std::fs::remove_dir_all(self.directory.path().join("data")).unwrap();
    }

    pub(super) fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().expect("a running etcd").id();
        nix::sys::signal::kill(Pid::from_raw(id.try_into().unwrap()), signal).unwrap();
    }

    async fn try_start(&mut self) -> bool {
        self.child = Some(self.spawn());
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                eprintln!("etcd ended with {status}:\n{}", self.log());
                self.child = None;
                return false;
            }
            let probe = async { self.client().await.status().await };
            if tokio::time::timeout(Duration::from_millis(500), probe)
                .await
                .is_ok_and(|answer| answer.is_ok())
            {
                return true;
            }
            assert!(
                Instant::now() < deadline,
                "etcd does not answer after {START_TIMEOUT:?}:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn spawn(&self) -> Child {
        let scheme = if self.files.is_some() { "https" } else { "http" };
        let client_url = format!("{scheme}://127.0.0.1:{}", self.client_port);
        let peer_url = format!("http://127.0.0.1:{}", self.peer_port);
        let log = File::options().create(true).append(true).open(self.log_path()).unwrap();
        let mut command = Command::new("etcd");
        if let Some(files) = &self.files {
            command.arg("--client-cert-auth");
            for (flag, name) in
                [("--trusted-ca-file", "ca.pem"), ("--cert-file", "cert.pem"), ("--key-file", "key.pem")]
            {
                command.arg(flag).arg(files.path(name));
            }
        }
        command
            .arg("--data-dir")
            .arg(self.directory.path().join("data"))
            .args(["--name", "test", "--logger", "zap", "--log-level", "warn"])
            // Shorter than the interval of any calls, so that tokens expire in tests.
            .args(["--auth-token-ttl", "1"])
            // A single member elects itself: no need to wait a second for it at each start.
            .args(["--heartbeat-interval", "20", "--election-timeout", "200"])
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("test={peer_url}")])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("cannot run `etcd` ({error}): install Debian's package etcd-server")
            })
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that is free while the listener exists.
fn free_port() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}
