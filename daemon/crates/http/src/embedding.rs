//! Code that the embedding routes of all dialects share, and the fields that describe embedding
//! models.

use rocmforge_chat::prompt::Prompt;
use rocmforge_engine::{LoadedModel, Purpose};
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::adapters::AdapterChoice;
use rocmforge_service::check;
use rocmforge_service::embedding::{Embedded, Norm, Texts};
use serde_json::Value;

use super::call::Call;

/// The capabilities of a model, in Ollama's terms where it has them.
pub(super) fn capabilities(model: &LoadedModel) -> Vec<&'static str> {
    let ranks = model.model().hparams().ranks_yes_no;
    let mut capabilities = match model.model().purpose() {
        Purpose::Text if ranks => vec!["completion", "rerank"],
        Purpose::Text => vec!["completion"],
        Purpose::Embedding => vec!["embedding"],
        Purpose::Ranking => vec!["rerank"],
    };
    if model.tower().is_some() {
        capabilities.push("vision");
    }
    capabilities
}

/// A request of an embedding route.
pub(super) struct Asked<'a> {
    pub(super) model: &'a str,
    pub(super) texts: Vec<Prompt>,
    /// The field of the texts in error messages.
    pub(super) field: &'static str,
    pub(super) dimensions: Option<i64>,
    pub(super) n_ctx: Option<i64>,
    /// Whether a text that is too long is truncated instead of rejected.
    pub(super) truncate: bool,
    /// Purpose of the embedding, which selects the model's prompt.
    pub(super) input_type: Option<String>,
    /// Normalization of vectors; `None` for the route's default.
    pub(super) norm: Option<Norm>,
    /// Whether the response can have a vector for each token.
    pub(super) each_token: bool,
}

/// Parses a text, a list of texts, token ids, or a list of lists of ids.
pub(super) fn texts(input: Value, field: &str) -> Result<Vec<Prompt>, Failure> {
    let wrong = || {
        let why = "give a text, a list of texts, token ids, or a list of lists of them";
        failure::invalid(field, why)
    };
    match input {
        Value::String(text) => Ok(vec![of_text(text)]),
        Value::Array(list) if list.iter().all(Value::is_number) && !list.is_empty() => {
            Ok(vec![of_ids(&list).ok_or_else(wrong)?])
        }
        Value::Array(list) => list
            .into_iter()
            .map(|text| match text {
                Value::String(text) => Ok(of_text(text)),
                Value::Array(ids) => of_ids(&ids).ok_or_else(wrong),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}

/// A prompt in which names of control tokens are plain text.
fn of_text(text: String) -> Prompt {
    Prompt::Text {
        text,
        add_special: true,
        parse_special: false,
    }
}

fn of_ids(ids: &[Value]) -> Option<Prompt> {
    let ids = ids
        .iter()
        .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
    ids.collect::<Option<Vec<u32>>>().map(Prompt::Ids)
}

/// Bytes of all vectors of a response.
pub(super) fn vector_bytes(embedded: &Embedded) -> usize {
    let vectors = embedded.vectors.iter();
    let values: usize = vectors.map(|(vector, _)| vector.capacity()).sum();
    values * size_of::<f32>()
}

/// Computes the requested embeddings, and records the request in the log.
pub(super) async fn embed(call: &Call, asked: Asked<'_>) -> Result<Embedded, Failure> {
    let mut log = call.log(asked.model);
    let result = async {
        let mut violations = Violations::default();
        let n_ctx = asked.n_ctx.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        let n_ctx = check::n_ctx(n_ctx, &mut violations);
        violations.result()?;
        let dimensions = asked.dimensions.map(|n| {
            let why = format!("{n} is out of range: at least 1");
            u32::try_from(n).map_err(|_| failure::invalid("dimensions", &why))
        });
        let service = &call.service;
        let model = call.model(asked.model).await?;
        let n_ctx = service.n_ctx_at_most(n_ctx, &model);
        let choice = AdapterChoice::by_name(asked.model);
        let wanted = Texts {
            adapters: service.adapters_for(&choice, &model)?,
            model,
            texts: asked.texts,
            field: asked.field,
            n_ctx,
            truncate: asked.truncate,
            pooling: None,
            each_token: asked.each_token,
            norm: asked.norm,
            dimensions: dimensions.transpose()?,
            input_type: asked.input_type,
            class: service.class(asked.model, None),
        };
        service.embed(wanted, call.arrival, &mut log).await
    };
    let result = result.await;
    log.prompt_tokens = result.as_ref().ok().map(|embedded| embedded.tokens);
    log.end(result)
}
