//! llama-server's own route of embeddings: `/embedding` (and `/embeddings`).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::embedding::{Embedded, Norm, Pooling};
use serde::Deserialize;
use serde_json::Value;

use super::super::Http;
use super::super::call::Call;
use super::super::embedding::{Asked, embed, texts, vector_bytes};
use super::super::openai::embeddings;
use super::super::prompt::model_name;
use super::super::written::List;

#[derive(Debug, Deserialize)]
struct EmbeddingRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    content: Option<Value>,
    #[serde(default)]
    input: Value,
    embd_normalize: Option<i64>,
    dimensions: Option<i64>,
    truncate: Option<bool>,
    #[serde(alias = "task", alias = "prompt_name")]
    input_type: Option<String>,
}

/// Handler of `POST /embedding`: llama-server's list if the texts are in `content` or each token
/// has a vector, else the response of `/v1/embeddings`.
pub(in super::super) async fn embedding(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /embedding", &request);
    let result = answered(&call, request).await;
    call.respond(result)
}

async fn answered(call: &Call, request: Request) -> Result<Response, Failure> {
    let body: Value = call.read(request).await?;
    if body.get("content").is_none() && !gives_each_token(call, &body).await? {
        return embeddings::answered(call, body).await;
    }
    let asked: EmbeddingRequest = serde_json::from_value(body)
        .map_err(|error| failure::invalid("body", &error.to_string()))?;
    let model = call.meant(asked.model).await?;
    let norm = asked.embd_normalize.map(|number| {
        let why = "give -1 for none, 0 for the largest element, 1, 2 for the length, or a power";
        Norm::numbered(number).ok_or_else(|| failure::invalid("embd_normalize", why))
    });
    let (texts, field) = match asked.content {
        Some(content) => (texts(content, "content")?, "content"),
        None => (texts(asked.input, "input")?, "input"),
    };
    let embedded = embed(
        call,
        Asked {
            model: &model,
            texts,
            field,
            dimensions: asked.dimensions,
            n_ctx: None,
            truncate: asked.truncate == Some(true),
            input_type: asked.input_type,
            norm: norm.transpose()?,
            each_token: true,
        },
    );
    list(embedded.await?).answer(call)
}

/// Whether a request's model computes a vector for each token.
async fn gives_each_token(call: &Call, body: &Value) -> Result<bool, Failure> {
    let name = match body.get("model") {
        Some(Value::String(name)) => name.clone(),
        // The model that is meant without a name.
        None | Some(Value::Null) => String::new(),
        // Refused with the rest.
        Some(_) => return Ok(false),
    };
    let name = call.meant(name).await?;
    match call.model(&name).await {
        Ok(model) => Ok(call.service.pooling(&model) == Pooling::None),
        Err(failure) => call.log(&name).end(Err(failure)),
    }
}

/// For each text its index and the list of its vectors, written one vector at a time, since a text
/// can have thousands.
fn list(
    embedded: Embedded,
) -> List<impl FnMut(usize, &mut Vec<u8>) -> serde_json::Result<()> + Send + 'static> {
    let width = embedded.width.max(1);
    let vectors = embedded.vectors.iter();
    // The number of vectors up to each text's end.
    let ends: Vec<usize> = vectors
        .scan(0, |end, (values, _)| {
            *end += values.len() / width;
            Some(*end)
        })
        .collect();
    List {
        begin: "[".to_owned(),
        n: ends.last().copied().unwrap_or(0),
        source_bytes: vector_bytes(&embedded) + size_of_val(&ends[..]),
        item: move |at, out: &mut Vec<u8>| {
            let text = ends.partition_point(|end| *end <= at);
            let begin = text.checked_sub(1).map_or(0, |before| ends[before]);
            if at == begin {
                out.extend_from_slice(format!("{{\"index\":{text},\"embedding\":[").as_bytes());
            }
            let (values, _): &(Vec<f32>, u32) = &embedded.vectors[text];
            let from = (at - begin) * width;
            serde_json::to_writer(&mut *out, &values[from..from + width])?;
            if at + 1 == ends[text] {
                out.extend_from_slice(b"]}");
            }
            Ok(())
        },
        end: "]".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_has_the_list_of_its_vectors() {
        let embedded = Embedded {
            vectors: vec![
                (vec![1.0, 2.0, 3.0, 4.0], 2),
                (vec![5.0, 6.0], 1),
                (vec![7.0, 8.0, 9.0, 10.0, 11.0, 12.0], 3),
            ],
            width: 2,
            pooling: Pooling::None,
            tokens: 6,
        };
        let mut list = list(embedded);
        let mut out = list.begin.clone().into_bytes();
        for at in 0..list.n {
            if at > 0 {
                out.push(b',');
            }
            (list.item)(at, &mut out).unwrap();
        }
        out.extend_from_slice(list.end.as_bytes());
        let found: Value = serde_json::from_slice(&out).unwrap();
        let expected = json!([
            {"index": 0, "embedding": [[1.0, 2.0], [3.0, 4.0]]},
            {"index": 1, "embedding": [[5.0, 6.0]]},
            {"index": 2, "embedding": [[7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]},
        ]);
        assert_eq!(found, expected);
    }
}
