//! Nodes that are tasks of this process.

use std::future::pending;

use service::secret::Secret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::nodes::{end_with, unless_failed};

fn shared() -> Shared {
    Shared { lifetime: Lifetime::new(), health: Health::new(), has_served: Arc::default() }
}

/// Settings of a node of `count`, with an address that no other test uses.
async fn config(count: usize) -> NodesConfig {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    NodesConfig {
        count,
        node: 0,
        leader: free.local_addr().unwrap().to_string(),
        join_timeout: Duration::from_secs(100),
        silence: Duration::from_secs(100),
        secret: Secret::new("sesame"),
    }
}

fn of_node(node: usize, config: &NodesConfig) -> NodesConfig {
    NodesConfig { node, ..config.clone() }
}

fn facts(weights: &str) -> Facts {
    [("weights".to_owned(), weights.to_owned())].into()
}

/// Joins as `node`; the error if that fails.
async fn joined(node: usize, config: &NodesConfig, weights: &str) -> Result<Joined, String> {
    join(&of_node(node, config), facts(weights), &shared()).await.map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_join_in_any_order_also_before_node_0_is_there() {
    let config = config(4).await;
    let early = async { tokio::join!(joined(3, &config, "bf16"), joined(1, &config, "bf16")) };
    let late = async {
        sleep(2 * RETRY_INTERVAL).await;
        gather(&config, facts("bf16"), &shared()).await.unwrap()
    };
    let (leader, followers, last) = tokio::join!(late, early, joined(2, &config, "bf16"));
    assert!(leader.nodes.is_leader() && leader.nodes.count() == 4);
    let nodes = [followers.0, followers.1, last].map(|joined| joined.unwrap().nodes.node());
    assert_eq!(nodes, [3, 1, 2]);
}

/// What does not belong to the model is refused with a reason, and the others join.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_and_nodes_that_do_not_fit_keep_nobody_out() {
    let config = config(4).await;
    let all = async { gather(&config, facts("bf16"), &shared()).await.unwrap() };
    let others = async {
        let first = joined(1, &config, "bf16").await.unwrap();
        let mut stranger = TcpStream::connect(&config.leader).await.unwrap();
        stranger.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        // The protocol's name, then the end or a reset.
        drop(stranger.read_to_end(&mut answer).await);
        let mut silent = Vec::new();
        // More than node 0 talks to at a time.
        for _ in 0..50 {
            silent.push(TcpStream::connect(&config.leader).await.unwrap());
        }
        for (node, weights, says) in [
            (1, "bf16", "node 1 has joined already, from 127.0.0.1:"),
            (2, "int8", "weights: int8 on node 2, bf16 on node 0; give all nodes the same --weights"),
            (4, "bf16", "node 4 is not one of 1 to 3: check --node-rank"),
            (0, "bf16", "node 0 is not one of 1 to 3"),
        ] {
            let error = joined(node, &config, weights).await.err().unwrap();
            assert!(error.starts_with("node 0 at 127.0.0.1:") && error.contains(says), "{error}");
        }
        let unknown = NodesConfig { secret: Secret::new("mustard"), ..config.clone() };
        let error = joined(2, &unknown, "bf16").await.err().unwrap();
        assert!(
            error.ends_with("node 0 has another secret: give all nodes the same OUTRIDER_DIST_SECRET"),
            "{error}"
        );
        (first, joined(2, &config, "bf16").await.unwrap(), joined(3, &config, "bf16").await.unwrap())
    };
    let (leader, _followers) = tokio::join!(all, others);
    assert_eq!(leader.nodes.count(), 4);
}

/// A node may get the verdict on its last connection too late. For node 0 it has joined.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_missed_a_verdict_is_not_refused_for_good() {
    let config = config(4).await;
    let own = of_node(1, &config);
    let hello =
        |attempt| move |channel| Hello { node: 1, session: 7, attempt, channel, facts: facts("bf16") };
    let open = async |attempt, channel| {
        let stream = TcpStream::connect(&config.leader).await?;
        introduce(stream, &hello(attempt)(channel), &config.secret).await
    };
    let again = |error: HandshakeError| match error {
        HandshakeError::Io(error) => error.to_string(),
        other => panic!("{other}"),
    };
    let all = async { gather(&config, facts("bf16"), &shared()).await.unwrap() };
    let others = async {
        let _first = open(0, Channel::Operations).await.unwrap();
        let _second = open(1, Channel::Operations).await.unwrap();
        for late in [open(0, Channel::Sums).await, open(1, Channel::Pulse).await] {
            assert_eq!(again(late.unwrap_err()), "another connection came between its own");
        }
        let missed = connect(&own, &hello(2)).await.ok().unwrap();
        let early = connect(&own, &hello(3)).await.err().unwrap();
        assert_eq!(again(early), "its last connections are not closed yet");
        drop(missed);
        let joined_at_last = loop {
            match connect(&own, &hello(4)).await {
                Ok(connections) => break connections,
                // Node 0 may not have noticed yet.
                Err(error) => assert_eq!(again(error), "its last connections are not closed yet"),
            }
        };
        (joined_at_last, joined(2, &config, "bf16").await.unwrap(), joined(3, &config, "bf16").await.unwrap())
    };
    let (leader, _followers) = tokio::join!(all, others);
    assert_eq!(leader.nodes.count(), 4);
}

/// A process that ends before all have joined leaves its place to the next one.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_restarts_before_all_have_joined_joins_again() {
    let config = config(4).await;
    let all = async { gather(&config, facts("bf16"), &shared()).await.unwrap() };
    let others = async {
        let process = shared();
        let first = join(&of_node(1, &config), facts("bf16"), &process).await.unwrap();
        process.lifetime.shut_down(Duration::from_secs(100)).await;
        drop(first);
        let again = loop {
            // Node 0 may not have noticed yet.
            match joined(1, &config, "bf16").await {
                Ok(joined) => break joined,
                Err(error) => assert!(error.contains("has joined already"), "{error}"),
            }
        };
        (again, joined(2, &config, "bf16").await.unwrap(), joined(3, &config, "bf16").await.unwrap())
    };
    let (leader, _followers) = tokio::join!(all, others);
    assert_eq!(leader.nodes.count(), 4);
}

#[tokio::test(start_paused = true)]
async fn nodes_that_do_not_come_are_named() {
    let config = config(4).await;
    let error = gather(&config, facts("bf16"), &shared()).await.err().unwrap().to_string();
    assert!(error.starts_with("nodes 1, 2, 3 did not join within 100s: "), "{error}");
    let error = joined(2, &config, "bf16").await.err().unwrap();
    let says = format!("node 0 did not answer at {} within 100s: ", config.leader);
    assert!(error.starts_with(&says) && error.contains("refused"), "{error}");
}

/// Joins two nodes, ends one in some way, and returns how the other one hears of it.
async fn end_heard_by(
    silence: Duration,
    end_follower: impl AsyncFnOnce(&Shared, &Shared, Joined) -> Option<Joined>,
) -> End {
    let config = NodesConfig { silence, ..config(2).await };
    let (leader, follower) = (shared(), shared());
    let of_follower = of_node(1, &config);
    let (of_leader, joined) =
        tokio::join!(gather(&config, facts("bf16"), &leader), join(&of_follower, facts("bf16"), &follower));
    let (mut of_leader, joined) = (of_leader.unwrap(), joined.unwrap());
    let _kept = end_follower(&leader, &follower, joined).await;
    of_leader.ends.recv().await.unwrap().2
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_node_is_heard_by_the_other_one() {
    let long = Duration::from_secs(100);
    let closed = End::Lost("it closed the connection".to_owned());
    let stop = async |_: &Shared, follower: &Shared, joined| {
        follower.lifetime.shut_down(Duration::from_secs(100)).await;
        Some(joined)
    };
    assert_eq!(end_heard_by(long, stop).await, closed);

    let finish = async |_: &Shared, follower: &Shared, joined| {
        follower.has_served.store(true, std::sync::atomic::Ordering::Release);
        drop(joined);
        follower.lifetime.shut_down(Duration::from_secs(100)).await;
        None
    };
    assert_eq!(end_heard_by(long, finish).await, End::Ended);

    // A node that has failed has not finished.
    let fail = async |_: &Shared, follower: &Shared, joined| {
        follower.has_served.store(true, std::sync::atomic::Ordering::Release);
        follower.health.set_failed("rank 1 is lost");
        drop(joined);
        follower.lifetime.shut_down(Duration::from_secs(100)).await;
        None
    };
    assert_eq!(end_heard_by(long, fail).await, End::Lost("it failed: rank 1 is lost".to_owned()));

    // A node that drains asks the other one to stop first.
    let drain = async |leader: &Shared, follower: &Shared, joined| {
        follower.lifetime.drain(Duration::from_secs(100)).await;
        assert_eq!(leader.lifetime.stop_requested().await, "node 1 stops");
        leader.lifetime.shut_down(Duration::from_secs(100)).await;
        Some(joined)
    };
    assert_eq!(end_heard_by(long, drain).await, End::Stopping);
}

/// The end of a node that loads until another one is lost, and never has loaded otherwise.
async fn loading_ends_with(joined: Joined, process: &Shared) -> String {
    let Shared { lifetime, health, .. } = process;
    end_with(joined.ends, lifetime, health);
    let error = unless_failed(pending::<anyhow::Result<()>>(), health).await.unwrap_err();
    lifetime.shut_down(Duration::from_secs(100)).await;
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_lost_while_the_others_load_ends_all_by_name() {
    let config = config(4).await;
    let [leader, first, lost, third] = std::array::from_fn(|_| shared());
    let follow = async |node: usize, process: &Shared| {
        join(&of_node(node, &config), facts("bf16"), process).await.unwrap()
    };
    let (of_leader, of_first, of_lost, of_third) = tokio::join!(
        async { gather(&config, facts("bf16"), &leader).await.unwrap() },
        follow(1, &first),
        follow(2, &lost),
        follow(3, &third)
    );
    let crash = async {
        drop(of_lost);
        lost.lifetime.shut_down(Duration::from_secs(100)).await;
    };
    let (led, first, third, ()) = tokio::join!(
        loading_ends_with(of_leader, &leader),
        loading_ends_with(of_first, &first),
        loading_ends_with(of_third, &third),
        crash
    );
    assert_eq!(led, "node 2 is lost: it closed the connection");
    for follower in [first, third] {
        assert_eq!(follower, "node 0 is lost: it failed: node 2 is lost: it closed the connection");
    }
}

/// The others hear why a node cannot load.
#[tokio::test]
async fn a_node_that_cannot_load_has_failed_for_that_reason() {
    let health = Health::new();
    let loading = async { Err::<(), _>(anyhow::anyhow!("no memory")) };
    let error = unless_failed(loading, &health).await.unwrap_err().to_string();
    assert_eq!((error.as_str(), health.state().reason()), ("no memory", Some("no memory")));
    assert!(unless_failed(async { Ok(7) }, &Health::new()).await.is_ok_and(|loaded| loaded == 7));
}

#[tokio::test]
async fn a_name_stands_for_all_addresses_of_node_0() {
    let local = listen("localhost:0").await.unwrap().local_addr().unwrap();
    assert!(local.ip().is_loopback());
    let address = listen("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    assert_eq!(address.ip(), Ipv4Addr::LOCALHOST);
    // Not looked up.
    let named = listen("target-0.invalid:0").await.unwrap().local_addr().unwrap();
    assert!(named.ip().is_unspecified());
}
