//! The load generator of all programs that send requests and time responses.
//!
//! In the order of a run: [`prompts`] are read, [`request`] writes their bodies for an [`endpoint`], and
//! [`driver`] sends them on a [`schedule`] (closed or open loop) over `connection`s whose `stamped` sockets
//! record when bytes arrived. Only after a run does [`answer`] parse the bytes: during the run the generator
//! only receives. [`sample`] turns responses into numbers, [`figures`] summarizes them with intervals
//! (`statistics`), and [`cpu`] reports the generator's own cost.
//!
//! ```no_run
//! # async fn example() -> Result<(), outrider_cli::load::LoadError> {
//! use outrider_cli::load::{Client, Endpoint, FigureOptions, Figures, Prompt, Schedule, Settings};
//! let endpoint = Endpoint::connect("http://127.0.0.1:8000", Default::default()).await?;
//! let prompts = Prompt::built_in();
//! let settings = Settings::default();
//! let requests: Vec<_> = prompts.iter().map(|prompt| settings.request(&endpoint, prompt)).collect();
//! let run = Client::new(endpoint).drive(&requests, &Schedule::Closed { concurrency: 16 }, |_| ()).await;
//! let figures = Figures::of(&run.samples(&requests), run.duration(), &FigureOptions::default());
//! # drop(figures); Ok(()) }
//! ```
//!
//! It must never flatter a server: latency is measured from the intended sending time to the arrival of bytes
//! at this host.

pub mod answer;
mod connection;
pub mod counters;
pub mod cpu;
pub mod driver;
pub mod endpoint;
mod error;
pub mod figures;
pub mod prompts;
pub mod request;
pub mod sample;
pub mod schedule;
pub mod scripted;
mod sse;
mod stamped;
pub mod statistics;
mod tls;

pub use connection::{BodyRead, Exchange, ExchangeEnd};
pub use driver::{Client, Run};
pub use endpoint::{Access, Dialect, Endpoint};
pub use error::LoadError;
pub use figures::{FigureOptions, Figures, Slo};
pub use prompts::Prompt;
pub use request::{Request, Settings};
pub use sample::Sample;
pub use schedule::Schedule;
pub use tls::Trust;
