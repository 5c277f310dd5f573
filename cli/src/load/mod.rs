//! The load generator: every program that needs requests sent and answers timed uses this one.
//!
//! In the order of a run: [`prompts`] are read, [`request`] writes their bodies for an [`endpoint`], [`driver`] sends them on a [`schedule`]
//! (closed or open loop) over `connection`s whose `stamped` sockets know when bytes arrived. Only when a run has ended does
//! [`answer`] read the bytes: while it lasts the generator does nothing but receive. [`sample`] turns answers into numbers,
//! [`figures`] sums them up with intervals (`statistics`), [`cpu`] says what the generator itself took.
//!
//! ```no_run
//! # async fn example() -> Result<(), outrider_cli::load::LoadError> {
//! use outrider_cli::load::{Client, Endpoint, FigureOptions, Figures, Prompt, Schedule, Settings};
//! let endpoint = Endpoint::reach("http://127.0.0.1:8000", Default::default()).await?;
//! let prompts = Prompt::built_in();
//! let settings = Settings::default();
//! let requests: Vec<_> = prompts.iter().map(|prompt| settings.request(&endpoint, prompt)).collect();
//! let run = Client::new(endpoint).drive(&requests, &Schedule::Closed { concurrency: 16 }, |_| ()).await;
//! let figures = Figures::of(&run.samples(&requests), run.duration(), &FigureOptions::default());
//! # drop(figures); Ok(()) }
//! ```
//!
//! It must never flatter a server: latency counts from the intended moment of sending, bytes from their arrival at this host.

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

pub use connection::{End, Exchange, Read};
pub use driver::{Client, Run};
pub use endpoint::{Access, Dialect, Endpoint};
pub use error::LoadError;
pub use figures::{FigureOptions, Figures, Slo};
pub use prompts::Prompt;
pub use request::{Request, Settings};
pub use sample::Sample;
pub use schedule::Schedule;
pub use tls::Trust;
