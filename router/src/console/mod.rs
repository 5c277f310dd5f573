//! The console: what a person sees of a router in a browser, at the operators' address (`--admin`). Its pages are static
//! files in the binary ([`files`]). What they show comes from here and from `/debug/lanes`: [`generate`] runs a request of
//! the playground and marks which tokens were drafted, [`requests`] lists how recent requests spent their time, [`pair`] has the pair of models checked.
//!
//! Everything but the files is behind the API keys, if there are any. It must never do more than a client could.

mod files;
mod generate;
pub mod pair;
mod requests;

use axum::Router;
use axum::routing::{get, post};

use self::pair::PairCheck;
use crate::pipeline::AppState;
use crate::scheduler::trails::Trails;

/// What the console's routes need.
#[derive(Clone)]
struct Console {
    state: AppState,
    trails: Trails,
    pair: PairCheck,
    /// Whether requests may come by this address: not where it is open to others and asks for no keys.
    generates: bool,
}

/// The console's routes.
pub fn console_app(state: AppState, trails: Trails, pair: PairCheck, generates: bool) -> Router {
    Router::new()
        .route("/", get(files::index))
        .route("/console/{name}", get(files::file))
        .route("/console/generate", post(generate::generate))
        .route("/console/requests", get(requests::requests))
        .route("/console/pair", get(pair::pair).post(pair::check_pair))
        .with_state(Console { state, trails, pair, generates })
}
