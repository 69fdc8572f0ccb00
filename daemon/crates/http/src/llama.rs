//! llama-server's routes: health, properties, tokens, and the loading of models.

pub(super) mod embedding;
pub(super) mod native;
mod pieces;
pub(super) mod slots;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::conversation::{self, Conversation};
use rocmforge_chat::prompt::Prompt;
use rocmforge_chat::tools;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{MirostatVersion, SamplingParams};
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::chat_model::chat_model;
use rocmforge_service::check;
use rocmforge_service::samplers;
use rocmforge_tokenizer::{ChatTemplate, TemplateOrigin};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Http;
use super::call::{Call, json as answer, query};
use super::embedding::capabilities;
use super::prompt::{WireMessage, messages, model_name};
use super::template::WireTemplate;
use super::written::List;

/// `GET /health`: 200 while work is accepted, 503 otherwise.
pub(super) async fn health(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /health", &request);
    let snapshot = http.service.engine.snapshot();
    let failure = match &snapshot.device_lost {
        Some(_) => Some(failure::engine_gone()),
        None => http.service.admit().err(),
    };
    match failure {
        Some(failure) => call.refuse(&failure),
        None => call.respond(answer(&json!({"status": "ok"}))),
    }
}

/// The model that a request names; without a name the only loaded model, or the only one.
pub(super) async fn named(call: &Call, name: Option<&str>) -> Result<Arc<LoadedModel>, Failure> {
    let name = name.unwrap_or_default();
    if name.is_empty() {
        call.service.admit()?;
        let snapshot = call.service.engine.snapshot();
        if let [only] = snapshot.models.as_slice() {
            return Ok(Arc::clone(&only.model));
        }
    }
    let name = call.meant(name.to_owned()).await?;
    call.model(&name).await
}

/// `GET /props`: properties of the model in `?model=`.
pub(super) async fn props(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /props", &request);
    let name = query(request.uri(), "model");
    let result = properties(&call, name.as_deref()).await;
    call.respond(result)
}

async fn properties(call: &Call, name: Option<&str>) -> Result<Response, Failure> {
    let limits = call.service.limits;
    let mut props = json!({
        "total_slots": limits.max_sequences,
        "modalities": {"vision": false, "audio": false},
        "build_info": concat!("rocmforged ", env!("CARGO_PKG_VERSION")),
    });
    // Without a name and with no single model, what holds for all of them.
    let several = call.service.engine.snapshot().models.len() != 1;
    if name.is_none() && several {
        return answer(&props);
    }
    let model = named(call, name).await?;
    let info = model.model().info();
    let (tokenizer, template) = (model.tokenizer(), model.template());
    let text = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id));
        String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
    };
    props["modalities"]["vision"] = model.tower().is_some().into();
    props["model_alias"] = model.name().into();
    props["model_path"] = model.path().display().to_string().into();
    props["chat_template"] = template
        .and_then(|template| template.source().ok())
        .unwrap_or_default()
        .into();
    props["chat_template_origin"] = match template.map(ChatTemplate::origin) {
        None => Value::Null,
        Some(TemplateOrigin::Given) => "given".into(),
        Some(TemplateOrigin::Named(name)) => name.into(),
        Some(TemplateOrigin::Default) => "default".into(),
    };
    props["capabilities"] = capabilities(&model).into();
    props["bos_token"] = text(tokenizer.bos()).into();
    props["eos_token"] = text(tokenizer.eos()).into();
    let (params, max_tokens) = call.service.defaults(model.name()).params();
    props["default_generation_settings"] = json!({
        "n_ctx": info.n_ctx_train.min(limits.n_ctx_max),
        "params": settings(&params, max_tokens),
    });
    answer(&props)
}

/// Default generation settings of a model, in llama-server's fields.
fn settings(params: &SamplingParams, max_tokens: Option<u32>) -> Value {
    let order: Vec<_> = params.order.iter().map(|kind| kind.name()).collect();
    let version = match params.mirostat.map(|held| held.version) {
        None => 0,
        Some(MirostatVersion::V1) => 1,
        Some(MirostatVersion::V2) => 2,
    };
    let held = params.mirostat;
    let held = held.unwrap_or_else(|| samplers::mirostat(MirostatVersion::V2));
    json!({
        "temperature": params.temperature,
        "dynatemp_range": params.dynatemp.range,
        "dynatemp_exponent": params.dynatemp.exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "typical_p": params.typical_p,
        "xtc_probability": params.xtc.probability,
        "xtc_threshold": params.xtc.threshold,
        "min_keep": params.min_keep,
        "repeat_penalty": params.repeat_penalty,
        "repeat_last_n": params.penalty_last_n,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry.multiplier,
        "dry_base": params.dry.base,
        "dry_allowed_length": params.dry.allowed_length,
        // llama-server's word for the whole context.
        "dry_penalty_last_n": i32::try_from(params.dry.last_n).unwrap_or(-1),
        "dry_sequence_breakers": params.dry.breakers,
        "mirostat": version,
        "mirostat_tau": held.tau,
        "mirostat_eta": held.eta,
        "samplers": order,
        // And for no limit.
        "n_predict": max_tokens.map_or(-1, i64::from),
    })
}

#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    content: String,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
}

/// `POST /tokenize`: token ids of a text.
pub(super) async fn tokenize(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /tokenize", &request);
    let result = tokens(&call, request).await;
    call.respond(result)
}

async fn tokens(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: TokenizeRequest = call.read(request).await?;
    let mut log = call.log(asked.model.as_deref().unwrap_or_default());
    let model = match named(call, asked.model.as_deref()).await {
        Ok(model) => model,
        Err(failure) => return log.end(Err(failure)),
    };
    log.about(model.name());
    let prompt = Prompt::Text {
        text: asked.content,
        add_special: asked.add_special.unwrap_or(false),
        parse_special: asked.parse_special.unwrap_or(true),
    };
    let with_pieces = asked.with_pieces.unwrap_or(false);
    let (peer, bytes) = (call.arrival.peer(), prompt.bytes());
    let work = call.service.text.run(peer, bytes, {
        let model = Arc::clone(&model);
        // Its spare room would be held until the answer is read.
        move |_| {
            Ok(prompt
                .encode("content", &chat_model(&model), None, None)?
                .ids
                .into_boxed_slice())
        }
    });
    let result = call.arrival.limit(work).await;
    log.prompt_tokens = result.as_ref().ok().map(|ids| ids.len() as u32);
    let ids = log.end(result)?;
    let list = List {
        begin: "{\"tokens\":[".to_owned(),
        n: ids.len(),
        source_bytes: size_of_val(&ids[..]),
        item: move |at, out: &mut Vec<u8>| {
            let id = ids[at];
            match with_pieces {
                true => serde_json::to_writer(out, &Token::of(&model, id)),
                false => serde_json::to_writer(out, &id),
            }
        },
        end: "]}".to_owned(),
    };
    list.answer(call)
}

/// A token id with its piece of text.
#[derive(Debug, Serialize)]
struct Token<'a> {
    id: u32,
    piece: Piece<'a>,
}

/// The piece of a token: text, or a list of bytes if it is not valid UTF-8 by itself.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Piece<'a> {
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl<'a> Token<'a> {
    fn of(model: &'a LoadedModel, id: u32) -> Self {
        let bytes = model.tokenizer().token_bytes(id).unwrap_or_default();
        let piece = std::str::from_utf8(bytes).map_or(Piece::Bytes(bytes), Piece::Text);
        Self { id, piece }
    }
}

#[derive(Debug, Deserialize)]
struct TemplateRequest {
    #[serde(default)]
    model: Option<String>,
    messages: Vec<WireMessage>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    #[serde(flatten)]
    template: WireTemplate,
}

/// `POST /apply-template`: renders a conversation to a prompt.
pub(super) async fn apply_template(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /apply-template", &request);
    let result = template(&call, request).await;
    call.respond(result)
}

async fn template(call: &Call, request: Request) -> Result<Response, Failure> {
    let mut asked: TemplateRequest = call.read(request).await?;
    let mut log = call.log(asked.model.as_deref().unwrap_or_default());
    let result = async {
        let mut violations = Violations::default();
        let ending = asked.template.ending(&mut violations);
        let mut conversation = Conversation {
            messages: messages(asked.messages)?,
            tools: tools::checked(asked.tools, asked.tool_choice.as_ref(), None)?,
            documents: asked.template.documents()?,
            kwargs: asked.template.kwargs(false),
            ending,
            field: "messages",
        };
        let roles = conversation.messages.iter().map(|m| m.role.as_str());
        let roles: Vec<_> = roles.collect();
        check::messages(&roles, &mut violations);
        let last = roles.last().copied();
        conversation::check_continued(conversation.ending, last, &mut violations);
        violations.result()?;
        let model = named(call, asked.model.as_deref()).await?;
        let messages = &mut conversation.messages;
        call.fetch_images(messages, &model).await?;
        call.service
            .render(&model, conversation, call.arrival)
            .await
    };
    let result = result.await;
    log.prompt_tokens = result.as_ref().ok().map(|(_, ids)| ids.len() as u32);
    let (text, _) = log.end(result)?;
    answer(&json!({"prompt": text}))
}

/// `GET /models`: all models, and whether they are loaded.
pub(super) async fn models(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /models", &request);
    let result = listed(&call).await;
    call.respond(result)
}

async fn listed(call: &Call) -> Result<Response, Failure> {
    let models = call.service.available().await?;
    let data: Vec<_> = models
        .iter()
        .map(|model| {
            let status = match model.loaded() {
                Some(_) => "loaded",
                None => "unloaded",
            };
            let mut listed = json!({
                "id": model.name(),
                "object": "model",
                "owned_by": "rocmforge",
                "created": model.mtime_unix_ms() / 1000,
                "in_cache": true,
                "status": {"value": status},
            });
            if let Some(status) = model.loaded() {
                listed["capabilities"] = capabilities(&status.model).into();
            }
            listed
        })
        .collect();
    answer(&json!({"object": "list", "data": data}))
}

#[derive(Debug, Deserialize)]
struct Named {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
}

/// `POST /models/load`: loads a model.
pub(super) async fn load(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /models/load", &request);
    let result = loaded(&call, request).await;
    call.respond(result)
}

async fn loaded(call: &Call, request: Request) -> Result<Response, Failure> {
    let mut asked: Named = call.read_small(request).await?;
    asked.model = call.meant(asked.model).await?;
    // The load itself leaves a line of its own, where there is one to do.
    let log = call.audit(&asked.model, "");
    log.end(call.model(&asked.model).await)?;
    answer(&json!({"success": true}))
}

/// `POST /models/unload`: unloads a model.
pub(super) async fn unload(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /models/unload", &request);
    let result = unloaded(&http, &call, request).await;
    call.respond(result)
}

async fn unloaded(http: &Http, call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: Named = call.read_small(request).await?;
    // Of a model that is being downloaded this ends the download.
    if http.pulls.cancel(&asked.model) {
        return answer(&json!({"success": true}));
    }
    let log = call.audit(&asked.model, "force=false");
    if let Err(failure) = call.has_name(&asked.model) {
        return log.end(Err(failure));
    }
    let done = call.service.unload(&asked.model, false).await;
    let unloaded = log.end(done)?;
    answer(&json!({"success": true, "freed_bytes": unloaded.freed_bytes}))
}
