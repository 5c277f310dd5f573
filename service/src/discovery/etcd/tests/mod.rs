//! Workers and routers with a real etcd that dies and comes back.

mod server;

use std::collections::BTreeMap;
use std::time::Duration;

use etcd_client::{
    AlarmAction, AlarmType, Client, CompactionOptions, ConnectOptions, DeleteOptions, Permission,
};
use nix::sys::signal::Signal;
use tokio::sync::watch;

use self::server::EtcdServer;
use super::follow::follow_changes;
use super::{CALL_TIMEOUT, EtcdCluster, Fault, LEASE_TTL, RENEW_EVERY};
use crate::discovery::{Discovery, DiscoveryUri, EtcdUser, Member, Members, Source, TARGET, open};
use crate::secret::Secret;
use crate::shutdown::{Lifetime, ShutdownOutcome};
use crate::tls::{ClientTls, tests::Files};

/// Timeout of expected events; only a failing test waits this long.
const AMPLE: Duration = Duration::from_secs(25);

/// One process as seen by etcd: its own connection and its own tasks.
struct Process {
    discovery: std::sync::Arc<dyn Discovery>,
    lifetime: Lifetime,
}

impl Process {
    async fn start(server: &EtcdServer) -> Self {
        Self::start_as(server, None).await
    }

    async fn start_as(server: &EtcdServer, user: Option<EtcdUser>) -> Self {
        let lifetime = Lifetime::new();
        let uri: DiscoveryUri = server.uri("team/outrider").parse().unwrap();
        let source = Source { uri, tls: server.tls(), user };
        Self { discovery: open(&source, &lifetime).await.unwrap(), lifetime }
    }

    async fn members(&self) -> watch::Receiver<Members> {
        self.discovery.watch().await.unwrap()
    }
}

fn worker(id: &str) -> Member {
    let facts = serde_json::json!({ "model": "demo", "task_types": ["code", "sql"] });
    let (role, address) = (TARGET.to_owned(), "http://127.0.0.1:9001".to_owned());
    Member { id: id.to_owned(), role, address, facts }
}

/// Waits until exactly these workers are known.
async fn see(members: &mut watch::Receiver<Members>, expected: &[&str]) {
    let same = |members: &Members| members.keys().eq(expected);
    let in_time = tokio::time::timeout(AMPLE, members.wait_for(same)).await.is_ok_and(|seen| seen.is_ok());
    assert!(in_time, "waited for {expected:?}, have {:?}", members.borrow().keys());
}

/// Reads all members over a new connection.
async fn read_all(cluster: &EtcdCluster) -> Result<BTreeMap<String, Member>, Fault> {
    let mut client = cluster.connect(cluster.next_member()).await?;
    Ok(cluster.read_all(&mut client).await?.1)
}

fn key_of(id: &str) -> String {
    format!("team/outrider/workers/{id}")
}

/// Waits until a worker's key is under a lease other than `before`; returns the lease.
async fn lease_of(client: &mut Client, id: &str, before: Option<i64>) -> i64 {
    let changed = async {
        loop {
            let answer = client.get(key_of(id), None).await.unwrap();
            if let Some(lease) = answer.kvs().first().map(etcd_client::KeyValue::lease)
                && Some(lease) != before
            {
                return lease;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(AMPLE, changed).await.expect("the worker's key under a new lease")
}

/// Deletes a worker's key and waits until the worker has written it again; returns the lease it is under.
async fn lease_of_next_write(client: &mut Client, id: &str) -> i64 {
    assert_eq!(client.delete(key_of(id), None).await.unwrap().deleted(), 1);
    lease_of(client, id, None).await
}

#[tokio::test]
async fn two_routers_see_workers_come_and_go() {
    let server = EtcdServer::start_new().await;
    let (one, two, workers) =
        (Process::start(&server).await, Process::start(&server).await, Process::start(&server).await);
    let (mut first, mut second) = (one.members().await, two.members().await);
    let a = workers.discovery.register(worker("a")).await.unwrap();
    let b = workers.discovery.register(worker("b")).await.unwrap();
    see(&mut first, &["a", "b"]).await;
    see(&mut second, &["a", "b"]).await;
    assert_eq!(first.borrow()["a"], worker("a"), "facts travel as they are");

    a.leave().await;
    assert!(
        server.client().await.get(key_of("a"), None).await.unwrap().kvs().is_empty(),
        "leave waits until it is done"
    );
    see(&mut first, &["b"]).await;
    see(&mut second, &["b"]).await;
    drop(b);
    see(&mut first, &[]).await;
    let mut late = two.members().await;
    see(&mut late, &[]).await;
}

/// With an etcd that requires client certificates, only a client with a certificate of its authority sees the
/// workers.
#[tokio::test]
async fn over_tls_only_who_shows_a_certificate_is_answered() {
    let server = EtcdServer::start_over_tls().await;
    let known = Process::start(&server).await;
    let (_registration, mut members) =
        (known.discovery.register(worker("a")).await.unwrap(), known.members().await);
    see(&mut members, &["a"]).await;

    let others = Files::new();
    let (ca, other_ca) = (server.files().path("ca.pem"), others.path("ca.pem"));
    let (cert, key) = (others.path("cert.pem"), others.path("key.pem"));
    let strangers = [
        ("speaks no TLS", None),
        ("shows nothing", Some(ClientTls::read(&ca, None))),
        ("shows what another authority signed", Some(ClientTls::read(&ca, Some((&cert, &key))))),
        ("trusts another authority", Some(ClientTls::read(&other_ca, Some((&cert, &key))))),
    ];
    for (who, tls) in strangers {
        let cluster = server.cluster(tls.map(Result::unwrap));
        assert!(Box::pin(read_all(&cluster)).await.is_err(), "etcd answered one who {who}");
    }
    let cluster = server.cluster(server.tls());
    let present = Box::pin(read_all(&cluster)).await.unwrap();
    assert_eq!(present.into_keys().collect::<Vec<_>>(), ["a"]);
}

/// With an etcd that requires authentication, a user with its password registers and is seen; others are
/// refused.
#[tokio::test]
async fn a_user_who_proves_it_is_answered_and_nobody_else() {
    let server = EtcdServer::start_new().await;
    let mut root = server.client().await;
    root.user_add("root", "of all", None).await.unwrap();
    root.user_grant_role("root", "root").await.unwrap();
    root.role_add("outrider").await.unwrap();
    let ours = Permission::read_write("team/outrider/").with_prefix();
    root.role_grant_permission("outrider", ours).await.unwrap();
    root.user_add("workers", "sesame", None).await.unwrap();
    root.user_grant_role("workers", "outrider").await.unwrap();
    root.auth_enable().await.unwrap();

    let user = |password| EtcdUser { name: "workers".to_owned(), password: Secret::new(password) };
    let known = Process::start_as(&server, Some(user("sesame"))).await;
    let (_registration, mut members) =
        (known.discovery.register(worker("a")).await.unwrap(), known.members().await);
    see(&mut members, &["a"]).await;
    // Its token expires before it writes its key again.
    let options = ConnectOptions::new().with_user("root", "of all").with_auto_token_refresh(true);
    let mut reader = Client::connect(server.endpoints(), Some(options)).await.unwrap();
    let lease = lease_of(&mut reader, "a", None).await;
    assert_eq!(lease_of_next_write(&mut reader, "a").await, lease, "a new token costs no lease");
    for (who, user) in [("says nothing", None), ("is wrong", Some(user("open")))] {
        let cluster = server.cluster(None).with_user(user);
        let fault = Box::pin(read_all(&cluster)).await.map(|_| who).unwrap_err().to_string();
        assert!(!fault.contains("sesame"), "{fault}");
    }
    // Its password gives no access to others' keys.
    let others = EtcdCluster::new(server.endpoints(), "team/others").with_user(Some(user("sesame")));
    assert!(Box::pin(read_all(&others)).await.is_err());
}

#[tokio::test]
async fn the_end_of_a_process_takes_its_workers_off_the_list() {
    let server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let _kept = worker_process.discovery.register(worker("a")).await.unwrap();
    see(&mut members, &["a"]).await;
    assert_eq!(worker_process.lifetime.shut_down(AMPLE).await, ShutdownOutcome::Clean);
    assert!(server.client().await.get(key_of("a"), None).await.unwrap().kvs().is_empty());
    see(&mut members, &[]).await;
    assert_eq!(router.lifetime.shut_down(AMPLE).await, ShutdownOutcome::Clean, "the watch ends as well");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_worker_that_dies_without_a_word_goes_with_its_lease() {
    let server = EtcdServer::start_new().await;
    let router = Process::start(&server).await;
    let mut members = router.members().await;
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let uri: DiscoveryUri = server.uri("team/outrider").parse().unwrap();
    let registration = doomed.spawn(async move {
        let discovery = open(&uri.into(), &Lifetime::new()).await.unwrap();
        discovery.register(worker("doomed")).await.unwrap()
    });
    let registration = registration.await.unwrap();
    see(&mut members, &["doomed"]).await;
    let mut client = server.client().await;
    let lease = lease_of(&mut client, "doomed", None).await;
    // No task of that runtime runs again, as after SIGKILL: nothing is revoked.
    doomed.shutdown_background();
    assert_eq!(lease_of(&mut client, "doomed", None).await, lease, "it is listed until its lease expires");
    see(&mut members, &[]).await;
    drop(registration);
}

#[tokio::test]
async fn a_restart_of_etcd_loses_nobody() {
    let mut server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let old = worker_process.discovery.register(worker("old")).await.unwrap();
    let (mut listed, mut watched) = (old.listed(), router.discovery.watched());
    see(&mut members, &["old"]).await;
    wait_listed(&mut watched, true).await;
    let lease = lease_of(&mut server.client().await, "old", None).await;

    server.kill();
    wait_listed(&mut watched, false).await;
    let _new = worker_process.discovery.register(worker("new")).await.unwrap();
    // Time for the watch to fail a few times, in case that made it forget members.
    tokio::time::sleep(Duration::from_millis(300)).await;
    see(&mut members, &["old"]).await;
    wait_listed(&mut listed, false).await;

    server.start().await;
    see(&mut members, &["new", "old"]).await;
    wait_listed(&mut listed, true).await;
    wait_listed(&mut watched, true).await;
    assert_eq!(lease_of(&mut server.client().await, "old", None).await, lease, "the lease is continued");
    see(&mut members, &["new", "old"]).await;
}

/// An etcd that is out of space renews leases, but refuses keys and new leases until an operator acts.
#[tokio::test]
async fn an_etcd_out_of_space_loses_nobody() {
    let server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let registration = worker_process.discovery.register(worker("a")).await.unwrap();
    let mut listed = registration.listed();
    see(&mut members, &["a"]).await;
    let mut client = server.client().await;
    let lease = lease_of(&mut client, "a", None).await;

    client.alarm(AlarmAction::Activate, AlarmType::Nospace, None).await.unwrap();
    wait_listed(&mut listed, false).await;
    // Longer than a lease lasts that is not renewed, and etcd needs to notice.
    tokio::time::sleep(LEASE_TTL + Duration::from_secs(2)).await;
    see(&mut members, &["a"]).await;
    assert_eq!(lease_of(&mut client, "a", None).await, lease);

    client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, None).await.unwrap();
    wait_listed(&mut listed, true).await;
    assert_eq!(lease_of_next_write(&mut client, "a").await, lease);
}

#[tokio::test]
async fn an_etcd_that_hangs_is_left_for_a_fresh_connection() {
    let server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let _registration = worker_process.discovery.register(worker("a")).await.unwrap();
    see(&mut members, &["a"]).await;
    let lease = lease_of(&mut server.client().await, "a", None).await;

    // The connections stay open and silent until the lease has expired on both sides.
    server.signal(Signal::SIGSTOP);
    tokio::time::sleep(LEASE_TTL + Duration::from_millis(500)).await;
    see(&mut members, &["a"]).await;
    server.signal(Signal::SIGCONT);
    lease_of(&mut server.client().await, "a", Some(lease)).await;
    see(&mut members, &["a"]).await;
}

/// etcd answers nothing for longer than the interval of renewals, but within the timeout of a call.
#[tokio::test]
async fn slow_answers_cost_no_lease() {
    let server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let _registration = worker_process.discovery.register(worker("a")).await.unwrap();
    see(&mut members, &["a"]).await;
    let mut client = server.client().await;
    let lease = lease_of(&mut client, "a", None).await;
    let pause = RENEW_EVERY + Duration::from_millis(200);
    assert!(pause < CALL_TIMEOUT);

    server.signal(Signal::SIGSTOP);
    tokio::time::sleep(pause).await;
    server.signal(Signal::SIGCONT);
    assert_eq!(lease_of_next_write(&mut client, "a").await, lease, "the lease was kept");
    see(&mut members, &["a"]).await;
}

#[tokio::test]
async fn an_etcd_that_is_away_at_the_start_is_waited_for() {
    let mut server = EtcdServer::stopped();
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let early = worker_process.discovery.register(worker("early")).await.unwrap();
    assert!(members.borrow().is_empty());
    server.start().await;
    see(&mut members, &["early"]).await;

    server.kill();
    // etcd cannot be notified, but leaving ends; the lease expires by itself.
    tokio::time::timeout(AMPLE, early.leave()).await.expect("leaving ends without etcd");
}

#[tokio::test]
async fn a_lost_lease_is_replaced() {
    let server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let _registration = worker_process.discovery.register(worker("a")).await.unwrap();
    see(&mut members, &["a"]).await;
    let mut client = server.client().await;
    let lease = lease_of(&mut client, "a", None).await;
    client.lease_revoke(lease).await.unwrap();
    see(&mut members, &[]).await;
    see(&mut members, &["a"]).await;
}

/// Waits until a registration reports this.
async fn wait_listed(listed: &mut watch::Receiver<bool>, expected: bool) {
    let seen = tokio::time::timeout(AMPLE, listed.wait_for(|listed| *listed == expected)).await;
    assert!(seen.is_ok_and(|seen| seen.is_ok()), "waited for listed = {expected}");
}

#[tokio::test]
async fn keys_that_are_deleted_while_their_leases_live_are_put_again() {
    let server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let one = worker_process.discovery.register(worker("one")).await.unwrap();
    let _two = worker_process.discovery.register(worker("two")).await.unwrap();
    see(&mut members, &["one", "two"]).await;
    let mut client = server.client().await;
    let lease = lease_of(&mut client, "one", None).await;
    // Twice, to see that it works repeatedly.
    for _ in 0..2 {
        let all = Some(DeleteOptions::new().with_prefix());
        assert_eq!(client.delete("team/outrider/", all).await.unwrap().deleted(), 2);
        see(&mut members, &[]).await;
        see(&mut members, &["one", "two"]).await;
    }
    assert_eq!(lease_of(&mut client, "one", None).await, lease, "the lease was never lost");
    one.leave().await;
    see(&mut members, &["two"]).await;
}

#[tokio::test]
async fn an_etcd_that_lost_its_data_hears_of_every_worker_again() {
    let mut server = EtcdServer::start_new().await;
    let (router, worker_process) = (Process::start(&server).await, Process::start(&server).await);
    let mut members = router.members().await;
    let registration = worker_process.discovery.register(worker("a")).await.unwrap();
    let mut listed = registration.listed();
    wait_listed(&mut listed, true).await;
    see(&mut members, &["a"]).await;

    server.kill();
    wait_listed(&mut listed, false).await;
    server.lose_data();
    server.start().await;
    wait_listed(&mut listed, true).await;
    see(&mut members, &["a"]).await;
    registration.leave().await;
    assert!(!*listed.borrow(), "who left is not listed");
}

#[tokio::test]
async fn a_key_that_is_no_worker_harms_no_other() {
    let server = EtcdServer::start_new().await;
    let mut client = server.client().await;
    let json = |member: &Member| serde_json::to_string(member).unwrap();
    client.put(key_of("garbage"), "{", None).await.unwrap();
    client.put(key_of("other-id"), json(&worker("someone")), None).await.unwrap();
    client
        .put(key_of("verifier"), json(&Member { role: "verifier".to_owned(), ..worker("verifier") }), None)
        .await
        .unwrap();
    client.put("team/outrider/elsewhere", "1", None).await.unwrap();
    client.put(key_of("good"), json(&worker("good")), None).await.unwrap();

    let router = Process::start(&server).await;
    let mut members = router.members().await;
    see(&mut members, &["good"]).await;
    client.put(key_of("better"), json(&worker("better")), None).await.unwrap();
    see(&mut members, &["better", "good"]).await;
    client.put(key_of("good"), "no worker any more", None).await.unwrap();
    see(&mut members, &["better"]).await;
}

#[tokio::test]
async fn a_compacted_revision_ends_the_watch_so_that_all_is_read_anew() {
    let server = EtcdServer::start_new().await;
    let mut client = server.client().await;
    let mut revision = 0;
    for _ in 0..3 {
        let answer =
            client.put(key_of("a"), serde_json::to_string(&worker("a")).unwrap(), None).await.unwrap();
        revision = answer.header().unwrap().revision();
    }
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();

    let cluster = server.cluster(None);
    let from_the_start = cluster.changes_from(&mut client, 1).await.unwrap();
    let Err(fault) =
        follow_changes(&cluster, from_the_start, BTreeMap::new(), &watch::Sender::default()).await;
    let expected = format!("revisions up to {revision} were compacted");
    assert!(matches!(&fault, Fault::WatchCancelled(reason) if *reason == expected), "{fault}");
}
