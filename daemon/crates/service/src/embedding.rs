//! Embeddings of texts: each one vector.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
pub use rocmforge_engine::api::Pooling;
use rocmforge_engine::api::{Class, EmbedRequest};
use rocmforge_engine::{AppliedAdapters, LoadedModel, Purpose};

use crate::Service;
use crate::arrival::Arrival;
use crate::check;
use crate::failure::{self, Failure};
use crate::prompt::{Prompt, Room};
use crate::request_log::RequestLog;

/// Most texts of a request, as OpenAI has it.
pub const TEXTS_MAX: usize = 2048;

/// Most values of an answer, so that it fits a message: 48 MiB.
pub const VALUES_MAX: u64 = 12 << 20;

/// Texts of a request that the engine has at a time; they share passes.
const AT_A_TIME: usize = 16;

/// Texts that an encoder computes at a time: each is one pass, and most texts are short.
const ENCODED_AT_A_TIME: usize = 32;

/// Texts that are to be embedded.
#[derive(Debug)]
pub struct Texts {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// The model's adapters that they have.
    pub adapters: Option<Arc<AppliedAdapters>>,
    /// The texts.
    pub texts: Vec<Prompt>,
    /// What a refusal calls them.
    pub field: &'static str,
    /// The context length, within the model's and the daemon's.
    pub n_ctx: u32,
    /// Whether a text that is longer is cut, not refused.
    pub truncate: bool,
    /// Which hidden states make a vector; `None` is as the model's file says, else of an encoder
    /// all of them, of another model the last token's.
    pub pooling: Option<Pooling>,
    /// Whether vectors get the length 1.
    pub normalise: bool,
    /// How many elements of each vector are wanted, from the first; `None` is all.
    pub dimensions: Option<u32>,
    /// How urgent it is.
    pub class: Class,
}

/// Embeddings of the texts of a request.
#[derive(Debug)]
pub struct Embedded {
    /// For each text its vector, and how many tokens it has. Where that was asked for, a vector is
    /// of length 1 (unless all of it is 0).
    pub vectors: Vec<(Vec<f32>, u32)>,
    /// How hidden states were pooled into the embeddings.
    pub pooling: Pooling,
    /// Tokens of all texts.
    pub tokens: u32,
}

impl Service {
    /// Embeds texts. Dropping the future cancels what is not done.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for no texts or too many, a text without tokens or too long, and dimensions
    /// that the model has not; those of the engine.
    pub async fn embed(
        &self,
        wanted: Texts,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Embedded, Failure> {
        check_texts(&wanted)?;
        let Texts {
            model,
            adapters,
            texts,
            field,
            n_ctx,
            truncate,
            pooling,
            normalise,
            dimensions,
            class,
        } = wanted;
        let encodes = model.model().purpose() == Purpose::Embedding;
        let bytes = texts.iter().map(Prompt::bytes).sum();
        let ticket = self.enter(&arrival, bytes).await?;
        let ticket = &ticket;
        let times = &log.times_in(self);
        let pooling = pooling.unwrap_or_else(|| pooling_of(&model));
        let room = Room::for_embedding(n_ctx, self, &model).cutting(truncate);
        let embed = |text: Prompt| {
            let (model, adapters) = (Arc::clone(&model), adapters.clone());
            async move {
                let encoded = self
                    .encode(Arc::clone(&model), text, field, room, arrival)
                    .await?;
                let ids = encoded.without_images(field)?;
                let tokens = ids.len() as u32;
                if tokens == 0 {
                    let why = "a text has no tokens; give at least one";
                    return Err(failure::invalid(field, why));
                }
                ticket.take_prompt(tokens)?;
                let request = EmbedRequest {
                    model,
                    ids,
                    pooling,
                    classes: false,
                    deadline: arrival.deadline,
                    asker: ticket.asker(class),
                    adapters,
                };
                let embedded = async {
                    let embedded = self.engine.embed_timed(request, Some(times.clone())).await;
                    embedded.map_err(|error| ticket.failure(&error))
                };
                let mut vector = arrival.limit(embedded).await?.values;
                if let Some(n) = dimensions {
                    vector.truncate(n as usize);
                }
                if normalise {
                    to_length_1(&mut vector);
                }
                Ok((vector, tokens))
            }
        };
        let at_a_time = match encodes {
            true => ENCODED_AT_A_TIME,
            false => AT_A_TIME,
        };
        let each = stream::iter(texts).map(embed).buffered(at_a_time);
        let vectors: Vec<(Vec<f32>, u32)> = each.try_collect().await?;
        let tokens = vectors.iter().map(|(_, tokens)| tokens).sum();
        Ok(Embedded {
            vectors,
            pooling,
            tokens,
        })
    }
}

/// Which hidden states make a vector where the request does not say.
fn pooling_of(model: &LoadedModel) -> Pooling {
    let model = model.model();
    let usual = match model.purpose() {
        Purpose::Embedding => Pooling::Mean,
        _ => Pooling::Last,
    };
    model.hparams().pooling.unwrap_or(usual)
}

/// Refuses texts that are none or too many, and what the model has not.
fn check_texts(wanted: &Texts) -> Result<(), Failure> {
    let (model, texts, field) = (&wanted.model, &wanted.texts, wanted.field);
    let invalid = |field: &str, why: String| Err(failure::invalid(field, &why));
    if texts.is_empty() || texts.len() > TEXTS_MAX {
        let why = format!("{} texts; give from 1 to {TEXTS_MAX}", texts.len());
        return invalid(field, why);
    }
    let n_embd = model.model().plan().embedding_width() as u32;
    if model.model().purpose() == Purpose::Ranking {
        let why = format!(
            "'{}' is a reranker, whose states are no embeddings; use /v1/rerank",
            model.name()
        );
        return Err(failure::unsupported_field("model", &why));
    }
    if let Some(n) = wanted.dimensions.filter(|n| !(1..=n_embd).contains(n)) {
        let why = format!("{n} is out of range: from 1 to {n_embd}");
        return invalid("dimensions", why);
    }
    let values = texts.len() as u64 * u64::from(wanted.dimensions.unwrap_or(n_embd));
    if values > VALUES_MAX {
        let why = format!(
            "{} texts make {values} values; at most {VALUES_MAX}",
            texts.len()
        );
        return invalid(field, why);
    }
    let n_vocab = model.model().info().n_vocab;
    for text in texts {
        if let Prompt::Ids(ids) = text {
            check::ids(field, ids, n_vocab)?;
        }
    }
    Ok(())
}

/// Makes a vector of length 1 of it.
fn to_length_1(vector: &mut [f32]) {
    let squares: f64 = vector.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    if squares > 0.0 {
        let length = squares.sqrt();
        vector
            .iter_mut()
            .for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::to_length_1;

    #[test]
    fn a_vector_gets_the_length_1_and_nothing_stays_nothing() {
        let mut vector = [3.0, -4.0];
        to_length_1(&mut vector);
        assert_eq!(vector, [0.6, -0.8]);
        let mut nothing = [0.0; 3];
        to_length_1(&mut nothing);
        assert_eq!(nothing, [0.0; 3]);
    }
}
