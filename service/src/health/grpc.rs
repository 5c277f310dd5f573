//! The health state over `grpc.health.v1`, for gRPC clients and orchestrators.

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};
use tonic_health::server::{HealthReporter, health_reporter};

use super::{Health, State};
use crate::shutdown::Lifetime;

/// Name of the whole server, by the protocol's convention.
const WHOLE_SERVER: &str = "";

impl Health {
    /// Creates the `grpc.health.v1` service: the state of the whole server (the empty name) and of each of
    /// `services`, kept up to date until the lifetime is cancelled.
    pub async fn grpc_service(
        &self,
        services: &'static [&'static str],
        lifetime: &Lifetime,
    ) -> HealthServer<impl HealthService + use<>> {
        let (reporter, server) = health_reporter();
        self.mirror(reporter, services, lifetime).await;
        server
    }

    /// Mirrors the state into an existing reporter, which is up to date when this returns.
    async fn mirror(&self, reporter: HealthReporter, services: &'static [&'static str], lifetime: &Lifetime) {
        let mut state = self.subscribe();
        let first = state.borrow_and_update().clone();
        set_all(&reporter, services, &first).await;
        let cancelled = lifetime.cancelled();
        lifetime.spawn_essential("health-grpc", async move {
            tokio::pin!(cancelled);
            loop {
                tokio::select! {
                    biased;
                    // The state changed, or its last owner was dropped and it will not change again.
                    changed = state.changed() => if changed.is_err() { return },
                    () = &mut cancelled => return,
                }
                let next = state.borrow_and_update().clone();
                set_all(&reporter, services, &next).await;
            }
        });
    }
}

async fn set_all(reporter: &HealthReporter, services: &[&str], state: &State) {
    let status = match state {
        State::Ready => ServingStatus::Serving,
        State::NotReady(_) | State::Draining(_) | State::Failed(_) => ServingStatus::NotServing,
    };
    for service in services.iter().chain([&WHOLE_SERVER]) {
        reporter.set_service_status(service, status).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus as Wire;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;

    const SERVICE: &str = "outrider.v1.Target";

    #[tokio::test]
    async fn watchers_see_every_change() {
        let (health, lifetime) = (Health::new(), Lifetime::new());
        let service = health.grpc_service(&[SERVICE], &lifetime).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = tonic::transport::Server::builder().add_service(service);
        let cancelled = lifetime.cancelled();
        lifetime
            .spawn("grpc", server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), cancelled));

        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let mut client = HealthClient::new(channel);
        for service in ["", SERVICE] {
            let request = HealthCheckRequest { service: service.to_owned() };
            let status = client.check(request).await.unwrap().into_inner().status();
            assert_eq!(status, Wire::NotServing, "`{service}` before it is ready");
        }
        let request = HealthCheckRequest { service: SERVICE.to_owned() };
        let mut watch = client.watch(request).await.unwrap().into_inner();
        assert_eq!(watch.message().await.unwrap().unwrap().status(), Wire::NotServing);
        health.set_ready();
        assert_eq!(watch.message().await.unwrap().unwrap().status(), Wire::Serving);
        health.set_draining("SIGTERM");
        assert_eq!(watch.message().await.unwrap().unwrap().status(), Wire::NotServing);
    }
}
