//! The first messages on a connection between nodes: who connects, for what, and whether both know the same
//! secret. Each end proves that with a hash over the secret and numbers that the other end has just drawn, so
//! the secret itself is never sent, and a recorded handshake is of no use. No message has unlimited time.
//!
//! Node 0 begins: 16 bytes that name the protocol, and 32 random bytes. The other node answers with the same,
//! then its hello (length, JSON) and 32 bytes of proof; node 0 answers with its verdict and proof.

use std::io;
use std::time::Duration;

use ring::hmac;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use service::secret::Secret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::facts::Facts;

/// Protocol and, in the last byte, its version: of the handshake, of operations and of sums.
const PROTOCOL: [u8; 16] = *b"outrider-nodes\0\x01";
/// Maximum length of a hello or a verdict, in bytes.
const JSON_BYTES_MAX: u32 = 64 << 10;
/// Length of a proof, in bytes.
const PROOF_BYTES: usize = 32;
/// Maximum duration of one handshake, and of sending its verdict.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

type Nonce = [u8; 32];

/// What a connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Channel {
    Operations,
    Sums,
    Pulse,
}

/// What a node says about itself and the connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) node: usize,
    /// Drawn when the process starts.
    pub(super) session: u64,
    /// Counts the process's attempts to join: the three connections of one belong together.
    pub(super) attempt: u32,
    pub(super) channel: Channel,
    pub(super) facts: Facts,
}

/// Node 0's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Joined,
    Refused(String),
    /// Not now, for this reason: the node may try again.
    Again(String),
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The connection failed or ended, or node 0 asks for another attempt.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The other end is no node, or one of another release.
    #[error("{0}")]
    Foreign(String),
    /// Node 0 says why the node cannot join, or the ends know different secrets.
    #[error("{0}")]
    Refused(String),
}

const OTHER_SECRET: &str = "it has another secret: give all nodes the same OUTRIDER_DIST_SECRET";

/// A node whose hello was read, and which waits for the verdict.
#[derive(Debug)]
pub(super) struct Guest {
    stream: TcpStream,
    pub(super) hello: Hello,
    proofs: Proofs,
}

impl Guest {
    /// Reads the hello of a node that has connected to node 0. Calls `on_begun` once the other end has named
    /// the protocol. The caller limits the time.
    pub(super) async fn greet(
        mut stream: TcpStream,
        secret: &Secret,
        on_begun: impl FnOnce(),
    ) -> Result<Self, HandshakeError> {
        let own = begin(&mut stream).await?;
        let other = read_beginning(&mut stream).await?;
        on_begun();
        let proofs = Proofs::new(secret, own, other);
        match read_message(&mut stream, &proofs, b"follower").await {
            Ok(hello) => Ok(Self { stream, hello, proofs }),
            Err(HandshakeError::Refused(reason)) => {
                let refused = Verdict::Refused(OTHER_SECRET.replace("it has", "node 0 has"));
                // Without a proof: a stranger could test guesses of the secret with it.
                write_with_proof(&mut stream, &to_json(&refused)?, &[0; PROOF_BYTES]).await?;
                Err(HandshakeError::Refused(reason))
            }
            Err(error) => Err(error),
        }
    }

    /// Sends the verdict within [`HANDSHAKE_TIMEOUT`], and returns the connection.
    pub(super) async fn answer(mut self, verdict: &Verdict) -> Result<TcpStream, HandshakeError> {
        let written = write_message(&mut self.stream, &self.proofs, b"leader", verdict);
        timeout(HANDSHAKE_TIMEOUT, written).await.map_err(io::Error::from)??;
        Ok(self.stream)
    }
}

/// Introduces this node to node 0 at the other end of the connection. The caller limits the time.
pub(super) async fn introduce(
    mut stream: TcpStream,
    hello: &Hello,
    secret: &Secret,
) -> Result<TcpStream, HandshakeError> {
    let other = read_beginning(&mut stream).await?;
    let own = begin(&mut stream).await?;
    let proofs = Proofs::new(secret, other, own);
    write_message(&mut stream, &proofs, b"follower", hello).await?;
    let (verdict, is_proven) = read_json(&mut stream, &proofs, b"leader").await?;
    match verdict {
        // Whoever refuses need not know the secret.
        Verdict::Refused(reason) => Err(HandshakeError::Refused(reason)),
        Verdict::Again(reason) => Err(io::Error::other(reason).into()),
        Verdict::Joined if is_proven => Ok(stream),
        Verdict::Joined => Err(HandshakeError::Refused(OTHER_SECRET.to_owned())),
    }
}

/// Sends the protocol and fresh random bytes.
async fn begin(stream: &mut TcpStream) -> io::Result<Nonce> {
    let nonce: Nonce = rand::random();
    stream.write_all(&[&PROTOCOL[..], &nonce].concat()).await?;
    Ok(nonce)
}

async fn read_beginning(stream: &mut TcpStream) -> Result<Nonce, HandshakeError> {
    let (mut protocol, mut nonce) = ([0; PROTOCOL.len()], Nonce::default());
    stream.read_exact(&mut protocol).await?;
    let ((version, name), (other_version, other_name)) =
        (PROTOCOL.split_last().expect("it is not empty"), protocol.split_last().expect("it is not empty"));
    if name != other_name {
        return Err(HandshakeError::Foreign("it is not a node of a target".to_owned()));
    }
    if version != other_version {
        let reason = format!(
            "it speaks version {other_version} of the protocol between nodes and this one version {version}: run the same \
             release on all nodes"
        );
        return Err(HandshakeError::Foreign(reason));
    }
    stream.read_exact(&mut nonce).await?;
    Ok(nonce)
}

/// What both ends prove themselves with: HMAC-SHA256 of ring, which TLS uses here, too.
#[derive(Debug)]
struct Proofs {
    key: hmac::Key,
    leader: Nonce,
    follower: Nonce,
}

impl Proofs {
    fn new(secret: &Secret, leader: Nonce, follower: Nonce) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
        Self { key, leader, follower }
    }

    /// The proof of a message from the end with this role.
    fn of(&self, role: &[u8], message: &[u8]) -> hmac::Tag {
        hmac::sign(&self.key, &self.proven(role, message))
    }

    /// Whether this is that proof. Takes the same time for every other one.
    fn verify(&self, proof: &[u8], role: &[u8], message: &[u8]) -> bool {
        hmac::verify(&self.key, &self.proven(role, message), proof).is_ok()
    }

    /// What a proof is over: the sender's role, the numbers of both ends and the message.
    fn proven(&self, role: &[u8], message: &[u8]) -> Vec<u8> {
        [role, &self.leader, &self.follower, message].concat()
    }
}

async fn write_message<T: Serialize>(
    stream: &mut TcpStream,
    proofs: &Proofs,
    role: &[u8],
    message: &T,
) -> Result<(), HandshakeError> {
    let json = to_json(message)?;
    let proof = proofs.of(role, &json);
    write_with_proof(stream, &json, proof.as_ref()).await
}

fn to_json<T: Serialize>(message: &T) -> Result<Vec<u8>, HandshakeError> {
    Ok(serde_json::to_vec(message).map_err(io::Error::other)?)
}

async fn write_with_proof(stream: &mut TcpStream, json: &[u8], proof: &[u8]) -> Result<(), HandshakeError> {
    let len = u32::try_from(json.len()).map_err(io::Error::other)?;
    stream.write_all(&[&len.to_le_bytes()[..], json, proof].concat()).await?;
    Ok(())
}

/// Reads a message whose sender has to know the secret.
async fn read_message<T: DeserializeOwned>(
    stream: &mut TcpStream,
    proofs: &Proofs,
    role: &[u8],
) -> Result<T, HandshakeError> {
    match read_json(stream, proofs, role).await? {
        (message, true) => Ok(message),
        (_, false) => Err(HandshakeError::Refused(OTHER_SECRET.to_owned())),
    }
}

/// Reads a message, and whether its sender knows the secret.
async fn read_json<T: DeserializeOwned>(
    stream: &mut TcpStream,
    proofs: &Proofs,
    role: &[u8],
) -> Result<(T, bool), HandshakeError> {
    let len = stream.read_u32_le().await?;
    if len > JSON_BYTES_MAX {
        return Err(HandshakeError::Foreign(format!("its message has {len} bytes")));
    }
    let (mut json, mut proof) = (vec![0; len as usize], [0; PROOF_BYTES]);
    stream.read_exact(&mut json).await?;
    stream.read_exact(&mut proof).await?;
    let is_proven = proofs.verify(&proof, role, &json);
    let message = serde_json::from_slice(&json);
    Ok((
        message.map_err(|error| HandshakeError::Foreign(format!("its message is malformed: {error}")))?,
        is_proven,
    ))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn hello() -> Hello {
        let facts = [("weights".to_owned(), "bf16".to_owned())].into();
        Hello { node: 1, session: 77, attempt: 3, channel: Channel::Sums, facts }
    }

    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (connected, accepted) = tokio::join!(connecting, listener.accept());
        (connected.unwrap(), accepted.unwrap().0)
    }

    /// What node 0 and the other node end with.
    async fn shake(secrets: [&str; 2], verdict: Verdict) -> (Result<Hello, String>, Result<(), String>) {
        let (follower, leader) = connected().await;
        let [own, other] = secrets.map(Secret::new);
        let lead = async {
            let guest = Guest::greet(leader, &own, || ()).await?;
            let hello = guest.hello.clone();
            guest.answer(&verdict).await?;
            Ok::<_, HandshakeError>(hello)
        };
        let hello = hello();
        let (led, followed) = tokio::join!(lead, introduce(follower, &hello, &other));
        (led.map_err(|error| error.to_string()), followed.map(drop).map_err(|error| error.to_string()))
    }

    #[tokio::test]
    async fn nodes_with_one_secret_hear_each_other() {
        for secret in ["", "sesame"] {
            assert_eq!(shake([secret; 2], Verdict::Joined).await, (Ok(hello()), Ok(())));
            for verdict in [Verdict::Refused, Verdict::Again] {
                let found = shake([secret; 2], verdict("not so".to_owned())).await;
                assert_eq!(found, (Ok(hello()), Err("not so".to_owned())));
            }
        }
    }

    #[tokio::test]
    async fn another_secret_is_refused_on_both_sides() {
        for secrets in [["sesame", ""], ["", "sesame"], ["sesame", "mustard"]] {
            let (led, followed) = shake(secrets, Verdict::Joined).await;
            assert_eq!(led.unwrap_err(), OTHER_SECRET);
            let said = followed.unwrap_err();
            assert_eq!(said, "node 0 has another secret: give all nodes the same OUTRIDER_DIST_SECRET");
        }
    }

    /// A false node 0 that does not know the secret.
    #[tokio::test]
    async fn a_leader_proves_that_it_knows_the_secret() {
        let (follower, mut leader) = connected().await;
        let false_leader = async {
            let own = begin(&mut leader).await.unwrap();
            let other = read_beginning(&mut leader).await.unwrap();
            let proofs = Proofs::new(&Secret::new("guessed"), own, other);
            let (_, is_proven) = read_json::<Hello>(&mut leader, &proofs, b"follower").await.unwrap();
            assert!(!is_proven);
            write_message(&mut leader, &proofs, b"leader", &Verdict::Joined).await.unwrap();
        };
        let (secret, hello) = (Secret::new("sesame"), hello());
        let ((), joined) = tokio::join!(false_leader, introduce(follower, &hello, &secret));
        assert_eq!(joined.unwrap_err().to_string(), OTHER_SECRET);
    }

    #[tokio::test]
    async fn strangers_and_other_releases_are_named() {
        let mut other_version = PROTOCOL;
        other_version[15] += 1;
        for (bytes, says) in [
            (&b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"[..], "it is not a node of a target"),
            (&other_version, "it speaks version 2 of the protocol between nodes and this one version 1"),
            (&[&PROTOCOL[..], &[0; 32], &[0xff; 4]].concat(), "its message has 4294967295 bytes"),
            (&[&PROTOCOL[..], &[0; 32], &[2, 0, 0, 0], b"{}", &[0; 32]].concat(), "its message is malformed"),
        ] {
            let (mut stranger, leader) = connected().await;
            stranger.write_all(bytes).await.unwrap();
            let said = Guest::greet(leader, &Secret::new(""), || ()).await.unwrap_err().to_string();
            assert!(said.starts_with(says), "{said}");
        }
    }

    /// The caller counts a connection as silent until then.
    #[tokio::test]
    async fn an_end_has_begun_once_it_has_named_the_protocol() {
        let has_begun = |bytes: Vec<u8>| async move {
            let (mut stranger, leader) = connected().await;
            stranger.write_all(&bytes).await.unwrap();
            stranger.shutdown().await.unwrap();
            let mut has_begun = false;
            Guest::greet(leader, &Secret::new(""), || has_begun = true).await.unwrap_err();
            has_begun
        };
        assert!(!has_begun(Vec::new()).await);
        assert!(!has_begun(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n".to_vec()).await);
        assert!(has_begun([&PROTOCOL[..], &[0; 32]].concat()).await);
    }

    /// The verdict is longer than what both sockets hold.
    #[tokio::test(start_paused = true)]
    async fn a_verdict_that_is_not_read_is_given_up() {
        let (_follower, leader) = connected().await;
        let proofs = Proofs::new(&Secret::new(""), Nonce::default(), Nonce::default());
        let guest = Guest { stream: leader, hello: hello(), proofs };
        let error = guest.answer(&Verdict::Refused("x".repeat(32 << 20))).await.unwrap_err();
        let is_late = matches!(&error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::TimedOut);
        assert!(is_late, "{error}");
    }

    #[test]
    fn a_proof_is_of_one_secret_one_sender_two_numbers_and_one_message() {
        let proofs =
            |secret, leader, follower| Proofs::new(&Secret::new(secret), [leader; 32], [follower; 32]);
        let own = proofs("sesame", 1, 2);
        let proof = own.of(b"leader", b"joined");
        assert!(own.verify(proof.as_ref(), b"leader", b"joined"));
        assert!(!own.verify(proof.as_ref(), b"follower", b"joined"));
        assert!(!own.verify(proof.as_ref(), b"leader", b"refused"));
        for other in [proofs("mustard", 1, 2), proofs("sesame", 2, 2), proofs("sesame", 1, 1)] {
            assert!(!other.verify(proof.as_ref(), b"leader", b"joined"));
        }
    }

    /// Ends of different releases would otherwise refuse each other for their secrets.
    #[test]
    fn the_proof_is_hmac_of_rfc_4231() {
        let hex = |secret: &str, message: &[u8]| {
            let proofs = Proofs::new(&Secret::new(secret), Nonce::default(), Nonce::default());
            let tag = hmac::sign(&proofs.key, message);
            tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let second = hex("Jefe", b"what do ya want for nothing?");
        assert_eq!(second, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }
}
