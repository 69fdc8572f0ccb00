//! llama-server's own text routes: `/completion` (and `/completions`), `/infill`, `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::infill::Gap;
use rocmforge_chat::parts::Part;
use rocmforge_chat::prompt::Prompt;
use rocmforge_engine::LoadedModel;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::answers::Generation;
use rocmforge_service::chat_model::chat_model;
use rocmforge_service::check;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer};
use super::super::format::WireFormat;
use super::super::openai::completions;
use super::super::prompt::{TextOr, model_name};
use super::super::reply::stream;
use super::super::sampling::{WireSampling, small, whole_number};
use super::super::start::{self, Continuation};
use super::super::timings::SoFar;
use super::pieces::Pieces;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    #[serde(default, deserialize_with = "whole_number")]
    n_predict: Option<i64>,
    /// OpenAI's name of `n_predict`.
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    #[serde(flatten)]
    format: WireFormat,
    /// Fields of the response to return, as paths: `content`, `timings/predicted_n`.
    response_fields: Option<Vec<String>>,
    // What stands around a gap.
    input_prefix: Option<String>,
    input_suffix: Option<String>,
    input_extra: Option<Vec<Extra>>,
    /// Number of most likely tokens that are returned for each generated token; 0 for none.
    #[serde(default, deserialize_with = "whole_number")]
    n_probs: Option<i64>,
    /// Whether probabilities are those after all samplers.
    post_sampling_probs: Option<bool>,
    /// Whether each piece of a stream has the times so far.
    timings_per_token: Option<bool>,
}

/// Context from another file.
#[derive(Debug, Deserialize)]
struct Extra {
    #[serde(default)]
    filename: String,
    #[serde(default)]
    text: String,
}

/// Handler of `POST /completion`.
pub(in super::super) async fn completion(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /completion", &request);
    let result = async {
        let mut asked: CompletionRequest = call.read(request).await?;
        asked.model = call.meant(asked.model).await?;
        let prompt = prompt_of(&call, &asked.model, asked.prompt.take()).await?;
        continued(&call, asked, prompt, "prompt").await
    };
    let result = result.await;
    call.respond(result)
}

/// Parses a prompt in llama-server's forms: those of `/v1/completions`, an object with
/// `prompt_string`, and a list of texts and ids.
async fn prompt_of(call: &Call, model: &str, asked: Value) -> Result<Prompt, Failure> {
    let list = match asked {
        Value::Object(mut members) => {
            let media = members.get("multimodal_data").and_then(Value::as_array);
            if media.is_some_and(|media| !media.is_empty()) {
                let why = "no image or sound can be continued by this route; leave it out";
                return Err(failure::unsupported_field("prompt.multimodal_data", why));
            }
            let text = members.get_mut("prompt_string").map(Value::take);
            return completions::prompt(text.unwrap_or_default());
        }
        Value::Array(list) if list.iter().any(Value::is_string) => list,
        other => return completions::prompt(other),
    };
    let (texts, others): (Vec<_>, Vec<_>) = list.iter().partition(|one| one.is_string());
    if others.is_empty() && texts.len() > 1 {
        let why =
            "several prompts are continued by /v1/completions; send a request for each, or ask it";
        return Err(failure::unsupported_field("prompt", why));
    }
    if let Some(other) = others.into_iter().find(|other| id_of(other).is_none()) {
        let why =
            format!("{other} is neither a text nor an id; give texts and whole numbers from 0");
        return Err(failure::invalid("prompt", &why));
    }
    let model = call.model(model).await?;
    let (peer, bytes) = (
        call.arrival.peer(),
        Value::from(&list[..]).to_string().len(),
    );
    let work = move |_: &_| ids_of(&model, &list);
    let ids = call.arrival.limit(call.service.text.run(peer, bytes, work));
    Ok(Prompt::Ids(ids.await?))
}

fn id_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Token ids of a list of texts and ids. The first text is tokenized like the beginning of a
/// prompt.
fn ids_of(model: &LoadedModel, list: &[Value]) -> Result<Vec<u32>, Failure> {
    let mut ids = Vec::new();
    for (at, one) in list.iter().enumerate() {
        let Some(text) = one.as_str() else {
            ids.extend(id_of(one));
            continue;
        };
        let of_text = model.tokenizer().encode(text, at == 0, true);
        ids.extend(of_text.map_err(|error| failure::invalid("prompt", &error.to_string()))?);
    }
    Ok(ids)
}

/// Handler of `POST /infill`: fills in the middle of a text.
pub(in super::super) async fn infill(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /infill", &request);
    let result = async {
        let mut asked: CompletionRequest = call.read(request).await?;
        asked.model = call.meant(asked.model).await?;
        let begun = asked.prompt.as_str().unwrap_or_default().to_owned();
        let others = asked.input_extra.take().unwrap_or_default().into_iter();
        let gap = Gap {
            prefix: asked.input_prefix.take().unwrap_or_default() + &begun,
            suffix: asked.input_suffix.take().unwrap_or_default(),
            others: others.map(|extra| (extra.filename, extra.text)).collect(),
        };
        let prompt = around(&call, &asked.model, gap, "input_suffix").await?;
        continued(&call, asked, prompt, "input_prefix").await
    };
    let result = result.await;
    call.respond(result)
}

/// The prompt for a gap to fill.
pub(in super::super) async fn around(
    call: &Call,
    model: &str,
    gap: Gap,
    field: &'static str,
) -> Result<Prompt, Failure> {
    let model = call.model(model).await?;
    let (peer, bytes) = (call.arrival.peer(), gap.bytes());
    let work = move |_: &_| gap.encode(field, &chat_model(&model));
    let ids = call.arrival.limit(call.service.text.run(peer, bytes, work));
    Ok(Prompt::Ids(ids.await?))
}

async fn continued(
    call: &Call,
    asked: CompletionRequest,
    prompt: Prompt,
    field: &'static str,
) -> Result<Response, Failure> {
    let mut violations = Violations::named(name);
    let n_predict = asked.n_predict.or(asked.max_tokens);
    // Nothing is to be generated: editors have prompts computed ahead so.
    let only_prompt = n_predict == Some(0);
    // -1 is without a bound, as is -2: up to the end of the context.
    let max_tokens = n_predict.filter(|&n| n >= 0).map(|n| n.max(1));
    let stop = asked.stop.map(TextOr::stops);
    let mut sampling = asked.sampling.fields(max_tokens, stop, &mut violations);
    sampling.decoding.format = asked.format.format()?;
    let tells_scores = asked.n_probs.is_some_and(|n| n != 0) && !only_prompt;
    let after_sampling = asked.post_sampling_probs == Some(true);
    if tells_scores {
        sampling.decoding.logprobs = asked.n_probs.map(small);
        sampling.decoding.after_sampling = after_sampling;
    }
    let continuation = Continuation {
        model: asked.model.clone(),
        prompt,
        sampling,
        n_ctx: None,
        choices: 1,
        field,
    };
    let generation = start::text(call, continuation, violations).await?;
    let scored = generation.model().filter(|_| tells_scores).cloned();
    let mut pieces = Pieces {
        model: asked.model,
        request_id: call.id.as_str().to_owned(),
        only_prompt,
        fields: asked.response_fields.unwrap_or_default(),
        scored: scored.map(|model| (model, after_sampling)),
        scores: Vec::new(),
        so_far: None,
    };
    if asked.stream == Some(true) {
        let times = asked.timings_per_token == Some(true);
        pieces.so_far = times.then(|| SoFar::new(generation.prompt_tokens()));
        return stream(generation, pieces, call).await;
    }
    whole(generation, pieces).await
}

async fn whole(generation: Generation, mut pieces: Pieces) -> Result<Response, Failure> {
    let (parts, mut ended) = generation.collect().await?;
    pieces.scores = std::mem::take(&mut ended.scores);
    let texts = parts.into_iter().filter_map(|part| match part {
        Part::Text(text) => Some(text),
        _ => None,
    });
    answer(&pieces.last(&texts.collect::<String>(), &ended))
}

/// The name of a field in llama-server's requests.
fn name(field: &str) -> String {
    match field {
        "sampling.max_tokens" => "n_predict".to_owned(),
        "logprobs" => "n_probs".to_owned(),
        _ => field.strip_prefix("sampling.").unwrap_or(field).to_owned(),
    }
}

#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    tokens: Vec<u32>,
}

/// The handler of `POST /detokenize`.
pub(in super::super) async fn detokenize(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /detokenize", &request);
    let result = text_of(&call, request).await;
    call.respond(result)
}

async fn text_of(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: DetokenizeRequest = call.read(request).await?;
    let model = super::named(call, Some(&asked.model)).await?;
    check::ids("tokens", &asked.tokens, model.model().info().n_vocab)?;
    let (peer, bytes) = (call.arrival.peer(), size_of_val(&asked.tokens[..]));
    let work = move |_: &_| {
        let text = model.tokenizer().decode(&asked.tokens);
        text.map_err(|error| failure::invalid("tokens", &error.to_string()))
    };
    let text = call.arrival.limit(call.service.text.run(peer, bytes, work));
    answer(&json!({"content": text.await?}))
}
