//! `Embed` and `Rerank`: embeddings and relevance scores.

use std::sync::Arc;

use rocmforge_chat::prompt::Prompt;
use rocmforge_failure::{Failure, Violations};
use rocmforge_proto::v1;
use rocmforge_service::Service;
use rocmforge_service::adapters::AdapterChoice;
use rocmforge_service::arrival::Arrival;
use rocmforge_service::check;
use rocmforge_service::embedding::{Norm, Pooling, Texts};
use rocmforge_service::request_log::RequestLog;
use rocmforge_service::rerank::Documents;

use super::inference::class;

/// Embeds the texts of a request.
pub(super) async fn embed(
    service: &Arc<Service>,
    request: v1::EmbedRequest,
    arrival: Arrival,
    log: &mut RequestLog,
) -> Result<v1::EmbedResponse, Failure> {
    service.admit()?;
    service.opened(&request.model, &arrival).await?;
    let mut violations = Violations::default();
    check::model_name("model", &request.model, &mut violations);
    let n_ctx = check::n_ctx(request.n_ctx, &mut violations);
    let class = class(request.priority, &mut violations);
    let class = service.class(&request.model, class);
    let pooling = pooling(request.pooling, &mut violations);
    let dimensions = request.dimensions.map(|n| {
        u32::try_from(n).unwrap_or_else(|_| {
            violations.add("dimensions", format!("{n} is out of range: at least 1"));
            1
        })
    });
    let (add_special, parse_special) = (
        request.add_special.unwrap_or(true),
        request.parse_special.unwrap_or(false),
    );
    let inputs = request.inputs.into_iter().enumerate();
    let texts = inputs.map(|(at, input)| match input.input {
        Some(v1::embed_input::Input::Text(text)) => Prompt::Text {
            text,
            add_special,
            parse_special,
        },
        Some(v1::embed_input::Input::Tokens(v1::TokenIds { ids })) => Prompt::Ids(ids),
        None => {
            let why = "empty; give a text or token ids";
            violations.add(&format!("inputs[{at}]"), why);
            Prompt::Ids(Vec::new())
        }
    });
    let texts = texts.collect();
    violations.result()?;
    let model = service
        .model_as_its_file_is(&request.model, &arrival)
        .await?;
    let choice = AdapterChoice::by_name(&request.model);
    let wanted = Texts {
        adapters: service.adapters_for(&choice, &model)?,
        n_ctx: service.n_ctx(n_ctx, &model)?,
        model,
        texts,
        field: "inputs",
        truncate: false,
        pooling,
        each_token: true,
        norm: request.normalise.map(norm),
        dimensions,
        input_type: Some(request.input_type).filter(|name| !name.is_empty()),
        class,
    };
    let embedded = service.embed(wanted, arrival, log).await?;
    let pooling = match embedded.pooling {
        Pooling::None => v1::Pooling::None,
        Pooling::Mean => v1::Pooling::Mean,
        Pooling::First => v1::Pooling::First,
        Pooling::Last => v1::Pooling::Last,
    };
    let vectors = embedded.vectors.into_iter();
    Ok(v1::EmbedResponse {
        embeddings: vectors
            .map(|(values, tokens)| v1::Embedding { values, tokens })
            .collect(),
        pooling: pooling.into(),
        prompt_tokens: embedded.tokens,
        total_ms: arrival.at.elapsed().as_secs_f64() * 1e3,
    })
}

/// The scaling of embeddings that a request asks for.
fn norm(normalise: bool) -> Norm {
    match normalise {
        true => Norm::LENGTH,
        false => Norm::None,
    }
}

/// The pooling that a request asks for; `None` for the model's default.
fn pooling(said: i32, violations: &mut Violations) -> Option<Pooling> {
    match v1::Pooling::try_from(said) {
        Ok(v1::Pooling::Unspecified) => None,
        Ok(v1::Pooling::None) => Some(Pooling::None),
        Ok(v1::Pooling::Mean) => Some(Pooling::Mean),
        Ok(v1::Pooling::First) => Some(Pooling::First),
        Ok(v1::Pooling::Last) => Some(Pooling::Last),
        Err(_) => {
            violations.add(
                "pooling",
                "give 1 for mean, 2 for first, 3 for last, or 4 for none",
            );
            None
        }
    }
}

/// Ranks the documents of a request.
pub(super) async fn rerank(
    service: &Arc<Service>,
    request: v1::RerankRequest,
    arrival: Arrival,
    log: &mut RequestLog,
) -> Result<v1::RerankResponse, Failure> {
    service.admit()?;
    service.opened(&request.model, &arrival).await?;
    let mut violations = Violations::default();
    check::model_name("model", &request.model, &mut violations);
    let n_ctx = check::n_ctx(request.n_ctx, &mut violations);
    let class = class(request.priority, &mut violations);
    let class = service.class(&request.model, class);
    let top_n = check::best(request.top_n, &mut violations);
    violations.result()?;
    let model = service
        .model_as_its_file_is(&request.model, &arrival)
        .await?;
    let choice = AdapterChoice::by_name(&request.model);
    let wanted = Documents {
        adapters: service.adapters_for(&choice, &model)?,
        n_ctx: service.n_ctx(n_ctx, &model)?,
        model,
        query: request.query,
        documents: request.documents,
        instruction: request.instruction,
        raw: false,
        top_n,
        class,
    };
    let ranked = service.rerank(wanted, arrival, log).await?;
    let results = ranked.ranks.into_iter().map(|rank| v1::RerankResult {
        index: rank.index,
        score: rank.score,
    });
    Ok(v1::RerankResponse {
        results: results.collect(),
        prompt_tokens: ranked.tokens,
        total_ms: arrival.at.elapsed().as_secs_f64() * 1e3,
    })
}
