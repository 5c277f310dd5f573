//! `check-pair` decodes in one process what a cluster of real processes serves: at the same seeds and fixed k
//! both verify and accept the same drafted tokens, in every acceptance mode and with every quantization.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use engine::{Engine, LoadOptions, WeightFormat};
use outrider_cli::check_pair::local::{DecodeOptions, Decoded, LocalModel, LocalPair, VerifiedRound};
use outrider_cli::check_pair::measure::{EvalOptions, EvalPrompt, Setting, sequence_spec, settings};
use outrider_cli::check_pair::texts::CheckpointText;
use outrider_cli::cluster::ProcessCluster;
use outrider_cli::load::Prompt;
use outrider_cli::load::prompts::Content;
use serde_json::{Value, json};
use speculation::AcceptanceMode;
use tests::http_client::{CHAT, HttpClient};
use tests::metrics::Page;
use tests::pair::{self, MODEL};
use tests::processes;

/// k of every round.
const K: u32 = 4;
const MAX_TOKENS: u32 = 40;
const TEMPERATURES: [f32; 2] = [0.0, 0.8];
const MODES: [AcceptanceMode; 3] =
    [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical];
/// Prompts up to this length have drafts from the first round on. With longer ones the draft worker prefills
/// in parallel with the target, and either may finish first: the first draft may follow some plain rounds,
/// which the cluster counts.
const SHORT_PROMPT: usize = 64;
/// Number of long prompts.
const LONG_PROMPTS: usize = 2;
/// A draft that is late on a busy machine changes the rounds: such a request is repeated, up to this many
/// times.
const ATTEMPTS: usize = 8;

fn load(directory: PathBuf, weights: &str, num_ids: u32) -> anyhow::Result<LocalModel> {
    let weights = match weights {
        "int8" => WeightFormat::Int8,
        "int4" => WeightFormat::Int4,
        _ => WeightFormat::AsStored,
    };
    let engine = Engine::load(&LoadOptions::new(directory, weights, 64 << 20))?;
    Ok(LocalModel::new(engine, num_ids))
}

/// The first short prompt of each task type and a few long ones, with their texts.
fn eval_prompts(text: &CheckpointText) -> anyhow::Result<Vec<(String, EvalPrompt)>> {
    let prompt_encoder = text.prompt_encoder()?;
    let mut eval_prompts: Vec<(String, EvalPrompt)> = Vec::new();
    let mut long = 0;
    for prompt in Prompt::built_in() {
        let Content::Prompt(words) = &prompt.content else { continue };
        let prompt_ids = prompt_encoder.encode(&prompt)?;
        let is_long = prompt_ids.len() > SHORT_PROMPT;
        let is_known =
            |(_, known): &(String, EvalPrompt)| !is_long_prompt(known) && known.task == prompt.task;
        let wanted = match is_long {
            true => long < LONG_PROMPTS,
            false => !eval_prompts.iter().any(is_known),
        };
        if wanted {
            long += usize::from(is_long);
            let seed = eval_prompts.len() as u64;
            eval_prompts.push((words.clone(), EvalPrompt { task: prompt.task.clone(), prompt_ids, seed }));
        }
    }
    ensure!(long == LONG_PROMPTS, "only {long} prompts have more than {SHORT_PROMPT} ids");
    ensure!(
        eval_prompts.len() > 6 + long,
        "only {} task types have a short prompt",
        eval_prompts.len() - long
    );
    Ok(eval_prompts)
}

fn is_long_prompt(eval_prompt: &EvalPrompt) -> bool {
    eval_prompt.prompt_ids.len() > SHORT_PROMPT
}

/// Counters of one request's rounds, as reported by the router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    rounds: u64,
    /// Rounds of these that verified a draft.
    drafts: u64,
    drafted: u64,
    accepted: u64,
}

impl Usage {
    fn of(decoded: &Decoded) -> Self {
        let sum = |of: fn(&VerifiedRound) -> u32| {
            decoded.verified_rounds.iter().map(|round| u64::from(of(round))).sum::<u64>()
        };
        Self {
            rounds: decoded.verified_rounds.len() as u64,
            drafts: sum(|round| u32::from(round.drafted > 0)),
            drafted: sum(|round| round.drafted),
            accepted: sum(|round| round.accepted),
        }
    }

    fn plain_rounds(&self) -> u64 {
        self.rounds - self.drafts
    }
}

/// Rounds that the router has ignored since its start, and drafts that were verified.
async fn counters(cluster: &ProcessCluster) -> anyhow::Result<(u64, u64)> {
    let page = Page::scrape(&cluster.admin_url("router")?).await?;
    Ok((page.sum("outrider_rounds_ignored_total"), page.sum("vllm:spec_decode_num_drafts_total")))
}

/// Repeats the request until no draft was late. The first draft of a short prompt may also be late on a busy
/// machine: then there are more plain rounds than the last one, in which only one token is left to draw.
async fn ask(
    cluster: &ProcessCluster,
    (words, eval_prompt): (&str, &EvalPrompt),
    setting: &Setting,
) -> anyhow::Result<Usage> {
    let client = HttpClient::new(cluster.http_url())?;
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": words}], "seed": eval_prompt.seed,
        "temperature": setting.temperature, "max_tokens": MAX_TOKENS,
        "speculation": {"acceptance": setting.mode.as_str()},
    });
    for _ in 0..ATTEMPTS {
        let (disturbances, drafts) = counters(cluster).await?;
        let answer = client.ask(CHAT, &body).await?;
        let after = counters(cluster).await?;
        if after.0 > disturbances {
            continue;
        }
        let count = |name: &str| {
            let value: &Value = &answer["usage"]["speculation"][name];
            value.as_u64().with_context(|| format!("usage.speculation.{name} is {value}"))
        };
        let usage = Usage {
            rounds: count("rounds")?,
            drafts: after.1 - drafts,
            drafted: count("draft_tokens")?,
            accepted: count("accepted_tokens")?,
        };
        if is_long_prompt(eval_prompt) || usage.plain_rounds() <= 1 {
            return Ok(usage);
        }
    }
    anyhow::bail!("in each of {ATTEMPTS} attempts a draft came late: the machine is too busy")
}

/// Decodes the same request in this process. The first draft of a long prompt follows as many plain rounds as
/// the cluster counted, or one less, because the last round of a text, with only one token left to draw, is
/// plain too.
fn decode_as(
    pair: &mut LocalPair<'_>,
    eval_prompt: &EvalPrompt,
    (setting, eval_options): (&Setting, &EvalOptions),
    served: Usage,
) -> anyhow::Result<Usage> {
    let late = if is_long_prompt(eval_prompt) { served.plain_rounds() as u32 } else { 0 };
    let mut decode = |late| {
        let options = DecodeOptions { num_draft_tokens: K, plain_rounds: late };
        let decoded = pair.decode_with_late_draft_prefill(
            sequence_spec(eval_prompt, setting, eval_options),
            &eval_prompt.prompt_ids,
            options,
        )?;
        anyhow::Ok(Usage::of(&decoded))
    };
    let local = decode(late)?;
    if local == served || late == 0 { Ok(local) } else { decode(late - 1) }
}

async fn check(weights: &str, draft_weights: &str) -> anyhow::Result<()> {
    let text = CheckpointText::read(&pair::target_dir())?;
    let mut target = load(pair::target_dir(), weights, text.num_ids())?;
    let mut draft = load(pair::draft_dir(), draft_weights, text.num_ids())?;
    let eval_options = EvalOptions {
        num_draft_tokens: K,
        max_tokens: MAX_TOKENS,
        stop_token_ids: target.info().eos_token_ids.clone(),
    };
    let mut pair = LocalPair { target: &mut target, draft: &mut draft };
    let cluster = processes::start(|spec| {
        spec.router_args.extend(["--draft-tokens".to_owned(), K.to_string()]);
        spec.target_args.extend(["--weights".to_owned(), weights.to_owned()]);
        spec.draft_args.extend(["--weights".to_owned(), draft_weights.to_owned()]);
    })
    .await?;
    let (mut drafted, mut accepted) = (0, 0);
    for setting in settings(&TEMPERATURES, &MODES) {
        for (words, eval_prompt) in eval_prompts(&text)? {
            let served = ask(&cluster, (&words, &eval_prompt), &setting).await?;
            let local = decode_as(&mut pair, &eval_prompt, (&setting, &eval_options), served)?;
            ensure!(
                local == served,
                "{} at {setting:?}, {weights} and {draft_weights}: {local:?} locally, {served:?} served",
                eval_prompt.task
            );
            drafted += local.drafted;
            accepted += local.accepted;
        }
    }
    cluster.stop().await;
    ensure!(accepted > 0 && accepted < drafted, "{accepted} of {drafted} drafted tokens were accepted");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_accepts_the_same_tokens_as_check_pair() -> anyhow::Result<()> {
    check("auto", "auto").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_a_quantized_draft_accepts_the_same_tokens_as_check_pair() -> anyhow::Result<()> {
    check("auto", "int4").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_a_quantized_target_accepts_the_same_tokens_as_check_pair() -> anyhow::Result<()> {
    check("int4", "auto").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_both_quantized_accepts_the_same_tokens_as_check_pair() -> anyhow::Result<()> {
    check("int8", "int8").await
}
