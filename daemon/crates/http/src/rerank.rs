//! `POST /v1/rerank`, in the format that Jina, Cohere, llama-server and vLLM share.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::adapters::AdapterChoice;
use rocmforge_service::check;
use rocmforge_service::rerank::{Documents, Ranked};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Http;
use super::call::{Call, fresh_id, json as answer};
use super::prompt::{model_name, take};
use super::sampling::refuse_unsupported;

#[derive(Debug, Deserialize)]
struct RerankRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    query: String,
    /// Documents to rank: texts, or objects with a `text`.
    #[serde(default, alias = "texts")]
    documents: Vec<Value>,
    top_n: Option<i64>,
    return_documents: Option<bool>,
    instruction: Option<String>,
    /// Field of text-embeddings-inference: whether a classification's outputs are returned as they
    /// are.
    raw_scores: Option<bool>,
    // Refused where it asks for anything.
    max_chunks_per_doc: Option<i64>,
    max_tokens_per_doc: Option<i64>,
}

/// Handler of `POST /v1/rerank`.
pub(super) async fn rerank(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /v1/rerank", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    const WHOLE: &str = "documents are read as a whole; send shorter ones, and leave it unset";
    let mut asked: RerankRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    refuse_unsupported(&[
        (
            "max_chunks_per_doc",
            asked.max_chunks_per_doc.is_some(),
            WHOLE,
        ),
        (
            "max_tokens_per_doc",
            asked.max_tokens_per_doc.is_some(),
            WHOLE,
        ),
    ])?;
    let documents = asked.documents.into_iter().enumerate();
    let documents: Vec<String> = documents
        .map(|(at, document)| text(at, document))
        .collect::<Result<_, _>>()?;
    let returned = match asked.return_documents {
        Some(true) => documents.clone(),
        _ => Vec::new(),
    };
    let (query, instruction, top_n) = (asked.query, asked.instruction, asked.top_n);
    let raw = asked.raw_scores == Some(true);
    let mut log = call.log(&asked.model);
    let result = async {
        let mut violations = Violations::default();
        let top_n = top_n.map(|n| i32::try_from(n).unwrap_or(i32::MIN));
        let top_n = check::best(top_n, &mut violations);
        violations.result()?;
        let service = &call.service;
        let model = call.model(&asked.model).await?;
        let choice = AdapterChoice::by_name(&asked.model);
        let wanted = Documents {
            adapters: service.adapters_for(&choice, &model)?,
            n_ctx: service.n_ctx_at_most(None, &model),
            model,
            query,
            documents,
            instruction: instruction.unwrap_or_default(),
            raw,
            top_n,
            class: service.class(&asked.model, None),
        };
        service.rerank(wanted, call.arrival, &mut log).await
    };
    let result = result.await;
    log.prompt_tokens = result.as_ref().ok().map(|ranked| ranked.tokens);
    let ranked = log.end(result)?;
    answer(&spelled(&asked.model, &ranked, &returned))
}

fn text(at: usize, mut document: Value) -> Result<String, Failure> {
    let text = match document {
        Value::Object(_) => take(&mut document, "text"),
        text => text,
    };
    match text {
        Value::String(text) => Ok(text),
        _ => Err(failure::invalid(
            &format!("documents[{at}]"),
            "give a text, or an object with a text",
        )),
    }
}

/// A ranked document's index and score, with its text if requested.
#[derive(Debug, Serialize)]
struct Place<'a> {
    index: u32,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document<'a>>,
}

#[derive(Debug, Serialize)]
struct Document<'a> {
    text: &'a str,
}

#[derive(Debug, Serialize)]
struct RerankReply<'a> {
    id: String,
    object: &'static str,
    model: &'a str,
    results: Vec<Place<'a>>,
    usage: Value,
}

fn spelled<'a>(model: &'a str, ranked: &Ranked, returned: &'a [String]) -> RerankReply<'a> {
    let results = ranked.ranks.iter().map(|rank| Place {
        index: rank.index,
        relevance_score: rank.score,
        document: returned
            .get(rank.index as usize)
            .map(|text| Document { text }),
    });
    RerankReply {
        id: format!("rerank-{}", fresh_id()),
        object: "list",
        model,
        results: results.collect(),
        usage: json!({"prompt_tokens": ranked.tokens, "total_tokens": ranked.tokens}),
    }
}
