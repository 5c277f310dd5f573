//! `/admin/rollout`: an operator gives a new draft a share of the sequences, promotes it or rolls it back.
//! `GET` shows the state, `POST` begins a rollout, `POST` to `/admin/rollout/promote` gives the draft all
//! sequences, `DELETE` ends the rollout. Requires an operator's API key (`admin=true`) if keys are
//! configured.
//!
//! The order applies to this router until it is undone or the router ends; no text depends on it.

use std::collections::BTreeSet;

use axum::extract::{Request, State};
use axum::response::Json;
use http::HeaderMap;
use scheduling::rollout::{RolloutReport, RolloutRules, RolloutSettings};
use scheduling::scheduler::SchedulerReport;
use scheduling::scheduler::shadows::ShadowsReport;
use serde::{Deserialize, Serialize};
use speculation::Role;

use super::admin::check_operator;
use super::incoming::{deadline_from_headers, read_order};
use crate::error::RouterError;
use crate::generation::RolloutOrder;
use crate::pipeline::AppState;

/// Request body.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    draft: String,
    share: Option<f64>,
    decides: Option<bool>,
    min_drafts: Option<u64>,
    min_sequences: Option<u64>,
    margin: Option<f64>,
    max_slowdown: Option<f64>,
}

/// Response body.
#[derive(Debug, Serialize)]
pub(super) struct RolloutPage {
    /// The current rollout, if any.
    rollout: Option<RolloutReport>,
    /// Addresses of the candidate's connected draft workers.
    workers: Vec<String>,
    /// Set if there are none: the rollout then has no effect, until one connects.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    /// Scores of drafts on trial.
    shadows: ShadowsReport,
}

impl From<SchedulerReport> for RolloutPage {
    fn from(report: SchedulerReport) -> Self {
        let draft = report.rollout.as_ref().map(|rollout| rollout.settings.draft.clone());
        let drafts = report.workers.into_iter().filter(|worker| worker.role == Role::Draft);
        let (candidates, others): (Vec<_>, Vec<_>) =
            drafts.partition(|worker| draft.as_ref() == Some(&worker.model));
        let warning = draft.filter(|_| candidates.is_empty()).map(|draft| {
            let models: BTreeSet<String> = others.into_iter().map(|worker| worker.model).collect();
            let models = if models.is_empty() { "none".to_owned() } else { Vec::from_iter(models).join(", ") };
            format!(
                "no connected draft worker has the model id `{draft}` (connected: {models}): the rollout has no \
                 effect until one connects"
            )
        });
        Self {
            workers: candidates.into_iter().map(|worker| worker.address).collect(),
            warning,
            rollout: report.rollout,
            shadows: report.shadows,
        }
    }
}

/// `GET`.
pub(super) async fn show(
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Json<RolloutPage>, RouterError> {
    check_operator(&state, &headers)?;
    Ok(Json(state.generation.report().await?.into()))
}

/// `POST`.
pub(super) async fn begin(
    State(state): State<AppState>,
    request: Request,
) -> Result<Json<RolloutPage>, RouterError> {
    let (head, body) = request.into_parts();
    check_operator(&state, &head.headers)?;
    let body: Body = read_order(&head.headers, body, deadline_from_headers(&head.headers)?).await?;
    let settings = body.settings()?;
    let (draft, share, decides) = (settings.draft.clone(), settings.share, settings.decides);
    let report = state.generation.rollout(RolloutOrder::Begin(settings)).await?;
    tracing::info!(draft, share, decides, "an operator began the rollout of a draft");
    let page = RolloutPage::from(report);
    if let Some(warning) = &page.warning {
        tracing::warn!(draft, "{warning}");
    }
    Ok(Json(page))
}

/// `POST` to `promote`.
pub(super) async fn promote(
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Json<RolloutPage>, RouterError> {
    check_operator(&state, &headers)?;
    let report = state.generation.rollout(RolloutOrder::Promote).await?;
    match &report.rollout {
        Some(rollout) => {
            tracing::info!(draft = rollout.settings.draft, "an operator promoted the draft of a rollout");
            Ok(Json(report.into()))
        }
        None => Err(RouterError::InvalidRequest {
            message: "no rollout is in progress: POST /admin/rollout with a draft first".to_owned(),
            param: None,
        }),
    }
}

/// `DELETE`.
pub(super) async fn end(
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Json<RolloutPage>, RouterError> {
    check_operator(&state, &headers)?;
    let ended = state.generation.report().await?.rollout.map(|rollout| rollout.settings.draft);
    let report = state.generation.rollout(RolloutOrder::End).await?;
    if let Some(draft) = ended {
        tracing::info!(draft, "an operator cancelled the rollout of a draft");
    }
    Ok(Json(report.into()))
}

impl Body {
    fn settings(self) -> Result<RolloutSettings, RouterError> {
        let defaults = RolloutRules::default();
        let settings = RolloutSettings {
            draft: self.draft,
            share: self.share.unwrap_or(0.0),
            decides: self.decides.unwrap_or(true),
            rules: RolloutRules {
                min_drafts: self.min_drafts.unwrap_or(defaults.min_drafts),
                min_sequences: self.min_sequences.unwrap_or(defaults.min_sequences),
                margin: self.margin.unwrap_or(defaults.margin),
                max_slowdown: self.max_slowdown.unwrap_or(defaults.max_slowdown),
            },
        };
        match settings.fault() {
            None => Ok(settings),
            Some(message) => Err(RouterError::InvalidRequest { message, param: None }),
        }
    }
}
