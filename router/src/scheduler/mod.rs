//! The driver of the scheduler: requests and worker frames in, steps and tokens out.
//!
//! All decisions are made in `scheduling::scheduler`, which is pure. This folder reads the clock, moves
//! messages and counts: [`driver`] is the one task that owns the scheduler, [`outbox`] queues frames for
//! workers, [`clients`] events for clients, [`reports`] writes metrics and logs, [`timelines`] records
//! timelines of some sequences, [`pool_gauges`] exports how many workers are needed. [`SchedulerHandle`] is
//! the entry point.

mod clients;
pub mod driver;
mod outbox;
pub mod pool_gauges;
mod reports;
pub mod timelines;

use async_trait::async_trait;
use scheduling::scheduler::SchedulerReport;
use tokio::sync::{mpsc, oneshot};

use crate::error::RouterError;
use crate::generation::{
    Drain, DrainState, GenerationRequest, GenerationService, GenerationStream, RolloutOrder,
};
use crate::workers::WorkerEvent;

/// Capacity of the queue of requests; further ones are refused.
const SUBMISSION_QUEUE_LEN: usize = 1_024;

/// Capacity of the queue of worker events, of which one worker's frames take few; when it is full, the
/// workers' streams are not read.
const WORKER_EVENT_QUEUE_LEN: usize = 4_096;

/// Capacity of the queue of orders.
const ORDER_QUEUE_LEN: usize = 32;

/// A request on its way to the driver.
#[derive(Debug)]
struct Submission {
    request: GenerationRequest,
    reply_tx: oneshot::Sender<GenerationStream>,
}

/// An operator's order, or a request for a report.
#[derive(Debug)]
enum Order {
    /// Drains a worker, or undoes that. The address may be just HOST:PORT.
    Drain(Drain, oneshot::Sender<Option<DrainState>>),
    /// Starts, advances or undoes the rollout of a draft.
    Rollout(RolloutOrder, oneshot::Sender<SchedulerReport>),
    /// Reports the scheduler's state.
    Report(oneshot::Sender<SchedulerReport>),
}

/// Handle to the driver.
#[derive(Debug, Clone)]
pub struct SchedulerHandle {
    submissions: mpsc::Sender<Submission>,
    orders: mpsc::Sender<Order>,
}

/// The driver's receiving ends.
#[derive(Debug)]
pub struct Inbox {
    submissions: mpsc::Receiver<Submission>,
    workers: mpsc::Receiver<WorkerEvent>,
    orders: mpsc::Receiver<Order>,
}

/// Creates the queues that connect the APIs and the workers' connections to the driver.
pub fn queues() -> (SchedulerHandle, mpsc::Sender<WorkerEvent>, Inbox) {
    let (submit, submissions) = mpsc::channel(SUBMISSION_QUEUE_LEN);
    let (events, workers) = mpsc::channel(WORKER_EVENT_QUEUE_LEN);
    let (order, orders) = mpsc::channel(ORDER_QUEUE_LEN);
    let handle = SchedulerHandle { submissions: submit, orders: order };
    (handle, events, Inbox { submissions, workers, orders })
}

/// Name of the queue of orders in errors.
const ORDERS: &str = "the scheduler's queue of orders";

/// Sends a message to the driver, without waiting for room in this queue, and waits for the reply.
async fn ask<M, R>(
    queue: &mpsc::Sender<M>,
    what: &'static str,
    message: impl FnOnce(oneshot::Sender<R>) -> M,
) -> Result<R, RouterError> {
    let (reply_tx, reply_rx) = oneshot::channel();
    queue.try_send(message(reply_tx)).map_err(|error| match error {
        mpsc::error::TrySendError::Full(_) => RouterError::Overloaded { what },
        mpsc::error::TrySendError::Closed(_) => RouterError::Draining,
    })?;
    reply_rx.await.map_err(|_| RouterError::Draining)
}

#[async_trait]
impl GenerationService for SchedulerHandle {
    async fn submit(&self, request: GenerationRequest) -> Result<GenerationStream, RouterError> {
        let submission = |reply_tx| Submission { request, reply_tx };
        ask(&self.submissions, "the scheduler's queue", submission).await
    }

    async fn drain(&self, drain: Drain) -> Result<Option<DrainState>, RouterError> {
        ask(&self.orders, ORDERS, |reply_tx| Order::Drain(drain, reply_tx)).await
    }

    async fn rollout(&self, order: RolloutOrder) -> Result<SchedulerReport, RouterError> {
        ask(&self.orders, ORDERS, |reply_tx| Order::Rollout(order, reply_tx)).await
    }

    async fn report(&self) -> Result<SchedulerReport, RouterError> {
        ask(&self.orders, ORDERS, Order::Report).await
    }
}
