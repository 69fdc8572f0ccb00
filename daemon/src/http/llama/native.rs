//! llama-server's own routes of text: `/completion` (and `/completions`), `/infill`, `/detokenize`,
//! `/embedding` (and `/embeddings`), and `/slots`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::FinishReason;
use rocmforge_service::answers::{Ended, Generation};
use rocmforge_service::check::{self, Violations};
use rocmforge_service::failure::{self, Failure};
use rocmforge_service::infill::Gap;
use rocmforge_service::parts::Part;
use rocmforge_service::prompt::Prompt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer};
use super::super::embedding::{Asked, embed, texts, vector_bytes};
use super::super::error::Dialect;
use super::super::format::WireFormat;
use super::super::openai::{completions, embeddings};
use super::super::prompt::{TextOr, model_name};
use super::super::reply::{Events, SSE, SSE_HEARTBEAT, event, stream};
use super::super::sampling::{WireSampling, refuse_unsupported, whole_number};
use super::super::start::{self, Continuation};
use super::super::written::List;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    #[serde(default, deserialize_with = "whole_number")]
    n_predict: Option<i64>,
    /// What OpenAI's clients call it.
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    #[serde(flatten)]
    format: WireFormat,
    /// What of the answer is told, as paths: `content`, `timings/predicted_n`.
    response_fields: Option<Vec<String>>,
    // What stands around a gap.
    input_prefix: Option<String>,
    input_suffix: Option<String>,
    input_extra: Option<Vec<Extra>>,
    // Refused where it asks for anything.
    #[serde(default, deserialize_with = "whole_number")]
    n_probs: Option<i64>,
}

/// A text of another file.
#[derive(Debug, Deserialize)]
struct Extra {
    #[serde(default)]
    filename: String,
    #[serde(default)]
    text: String,
}

/// The handler of a text that is continued.
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

/// A prompt in llama-server's forms: those of `/v1/completions`, an object with `prompt_string`,
/// and a list in which texts and ids follow each other.
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

/// The ids of texts and ids that follow each other. The first text begins as a prompt does.
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

/// The handler of a gap that is filled.
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

/// The prompt of a gap.
pub(in super::super) async fn around(
    call: &Call,
    model: &str,
    gap: Gap,
    field: &'static str,
) -> Result<Prompt, Failure> {
    let model = call.model(model).await?;
    let (peer, bytes) = (call.arrival.peer(), gap.bytes());
    let work = move |_: &_| gap.encode(field, &model);
    let ids = call.arrival.limit(call.service.text.run(peer, bytes, work));
    Ok(Prompt::Ids(ids.await?))
}

async fn continued(
    call: &Call,
    asked: CompletionRequest,
    prompt: Prompt,
    field: &'static str,
) -> Result<Response, Failure> {
    const ELSEWHERE: &str = "not told by this route; use logprobs of /v1/completions";
    let probs = asked.n_probs.is_some_and(|n| n > 0);
    refuse_unsupported(&[("n_probs", probs, ELSEWHERE)])?;
    let mut violations = Violations::named(name);
    let n_predict = asked.n_predict.or(asked.max_tokens);
    // Nothing is to be generated: editors have prompts computed ahead so.
    let only_prompt = n_predict == Some(0);
    // -1 is without a bound, as is -2: up to the end of the context.
    let max_tokens = n_predict.filter(|&n| n >= 0).map(|n| n.max(1));
    let stop = asked.stop.map(TextOr::stops);
    let mut sampling = asked.sampling.fields(max_tokens, stop, &mut violations);
    sampling.decoding.format = asked.format.format()?;
    let continuation = Continuation {
        model: asked.model.clone(),
        prompt,
        sampling,
        n_ctx: None,
        choices: 1,
        field,
    };
    let generation = start::text(call, continuation, violations).await?;
    let pieces = Pieces {
        model: asked.model,
        request_id: call.id.as_str().to_owned(),
        only_prompt,
        fields: asked.response_fields.unwrap_or_default(),
    };
    if asked.stream == Some(true) {
        return stream(generation, pieces, call).await;
    }
    whole(generation, &pieces).await
}

async fn whole(generation: Generation, pieces: &Pieces) -> Result<Response, Failure> {
    let (parts, ended) = generation.collect().await?;
    let texts = parts.into_iter().filter_map(|part| match part {
        Part::Text(text) => Some(text),
        _ => None,
    });
    answer(&pieces.last(&texts.collect::<String>(), &ended))
}

/// A field as llama-server's requests have it.
fn name(field: &str) -> String {
    match field {
        "sampling.max_tokens" => "n_predict".to_owned(),
        _ => field.strip_prefix("sampling.").unwrap_or(field).to_owned(),
    }
}

/// The pieces of a text.
#[derive(Debug)]
struct Pieces {
    model: String,
    request_id: String,
    /// What is generated is not wanted.
    only_prompt: bool,
    /// What of the last piece is told; all where there are none.
    fields: Vec<String>,
}

impl Pieces {
    /// The last piece, or all of it.
    fn last(&self, content: &str, ended: &Ended) -> Value {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let rate = |n: u32, ms: f64| {
            if ms > 0.0 {
                f64::from(n) / ms * 1e3
            } else {
                0.0
            }
        };
        let per_token = |n: u32, ms: f64| if n > 0 { ms / f64::from(n) } else { 0.0 };
        let computed = ended.prompt_tokens.saturating_sub(ended.reused_tokens);
        let (prompt, predicted) = (ms(ended.times.prompt), ms(ended.times.generation));
        let (content, n) = match self.only_prompt {
            true => ("", 0),
            false => (content, ended.generated_tokens),
        };
        let all = json!({
            "index": 0,
            "content": content,
            "stop": true,
            "model": self.model,
            "tokens_predicted": n,
            "tokens_evaluated": ended.prompt_tokens,
            "tokens_cached": ended.reused_tokens,
            "has_new_line": content.contains('\n'),
            "truncated": false,
            "stop_type": stop_type(ended.finish),
            "stopping_word": ended.stop_string.as_deref().unwrap_or_default(),
            "timings": {
                "cache_n": ended.reused_tokens,
                "prompt_n": computed,
                "prompt_ms": prompt,
                "prompt_per_token_ms": per_token(computed, prompt),
                "prompt_per_second": rate(computed, prompt),
                "predicted_n": n,
                "predicted_ms": predicted,
                "predicted_per_token_ms": per_token(n, predicted),
                "predicted_per_second": rate(n, predicted),
            },
        });
        if self.fields.is_empty() {
            return all;
        }
        let told = self.fields.iter().filter_map(|field| {
            let value = all.pointer(&format!("/{field}"))?;
            Some((field.clone(), value.clone()))
        });
        Value::Object(told.collect())
    }
}

fn stop_type(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::StopToken { .. } => "eos",
        FinishReason::StopString { .. } => "word",
        FinishReason::MaxTokens | FinishReason::ContextFull => "limit",
    }
}

impl Events for Pieces {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, _: &mut String) {}

    fn part(&mut self, part: Part, out: &mut String) {
        if let Part::Text(text) = part
            && !self.only_prompt
        {
            let piece = json!({"index": 0, "content": text, "stop": false});
            event(None, &piece, out);
        }
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        event(None, &self.last("", ended), out);
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        event(None, &Dialect::OpenAi.body(failure, &self.request_id), out);
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

#[derive(Debug, Deserialize)]
struct EmbeddingRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    content: Value,
}

/// The vectors of a text, of which there is one.
#[derive(Debug, Serialize)]
struct Row<'a> {
    index: usize,
    embedding: [&'a [f32]; 1],
}

/// The handler of `POST /embedding`: llama-server's list where the texts are called `content`, else
/// what `/v1/embeddings` gives.
pub(in super::super) async fn embedding(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /embedding", &request);
    let result = async {
        let body: Value = call.read(request).await?;
        if body.get("content").is_none() {
            return embeddings::answered(&call, body).await;
        }
        let asked: EmbeddingRequest = serde_json::from_value(body)
            .map_err(|error| failure::invalid("body", &error.to_string()))?;
        let model = call.meant(asked.model).await?;
        let embedded = embed(
            &call,
            Asked {
                model: &model,
                texts: texts(asked.content, "content")?,
                field: "content",
                dimensions: None,
                n_ctx: None,
                truncate: false,
            },
        );
        let embedded = embedded.await?;
        let list = List {
            begin: "[".to_owned(),
            n: embedded.vectors.len(),
            source_bytes: vector_bytes(&embedded),
            item: move |index, out: &mut Vec<u8>| {
                let (vector, _): &(Vec<f32>, u32) = &embedded.vectors[index];
                let embedding = [vector.as_slice()];
                serde_json::to_writer(out, &Row { index, embedding })
            },
            end: "]".to_owned(),
        };
        list.answer(&call)
    };
    let result = result.await;
    call.respond(result)
}

/// The handler of `GET /slots`: a slot for each request that may run at once.
pub(in super::super) async fn slots(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /slots", &request);
    let snapshot = call.service.engine.snapshot();
    let limits = call.service.limits;
    let slot = |id: u32| {
        json!({
            "id": id,
            "n_ctx": limits.n_ctx_max,
            "speculative": false,
            "is_processing": id < snapshot.running,
        })
    };
    let slots: Vec<_> = (0..limits.max_sequences).map(slot).collect();
    call.respond(answer(&slots))
}
