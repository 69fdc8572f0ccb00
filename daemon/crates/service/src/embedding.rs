//! Embeddings of texts: one vector for each text, or for each token.

pub mod input_type;
mod norm;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::{StreamExt, TryStreamExt, stream};
use rocmforge_chat::prompt::{Prompt, Room};
pub use rocmforge_engine::api::Pooling;
use rocmforge_engine::api::{Class, EmbedRequest};
use rocmforge_engine::{AppliedAdapters, LoadedModel, Purpose};
use rocmforge_failure::{self as failure, Failure};

use crate::Service;
use crate::arrival::Arrival;
use crate::check;
pub use crate::embedding::norm::Norm;
use crate::request_log::RequestLog;

/// Maximum number of texts of a request, the same as OpenAI's.
pub const TEXTS_MAX: usize = 2048;

/// Maximum number of values in a response, so that it fits a message: 48 MiB.
pub const VALUES_MAX: u64 = 12 << 20;

/// Maximum number of values that are cut and scaled on the async thread: about a millisecond of
/// work.
const SCALED_HERE_MAX: usize = 1 << 17;

/// Number of a request's texts that are given to the engine at a time; they share passes.
const AT_A_TIME: usize = 16;

/// Number of texts that are given to an encoder at a time: each is one pass, and most are short.
const ENCODED_AT_A_TIME: usize = 32;

/// A request to embed texts.
#[derive(Debug)]
pub struct Texts {
    /// The model that computes the embeddings.
    pub model: Arc<LoadedModel>,
    /// LoRA adapters of the request, with their scales.
    pub adapters: Option<Arc<AppliedAdapters>>,
    /// The texts to embed.
    pub texts: Vec<Prompt>,
    /// The field of the texts in error messages.
    pub field: &'static str,
    /// Context length in tokens, within the model's and the daemon's limits.
    pub n_ctx: u32,
    /// Whether a text that is too long is truncated instead of rejected.
    pub truncate: bool,
    /// How hidden states are pooled; `None` takes the model's default ([`Service::pooling`]).
    pub pooling: Option<Pooling>,
    /// Whether the response's format can have a vector for each token.
    pub each_token: bool,
    /// How vectors are scaled; `None` scales to length 1, but not vectors of single tokens.
    pub norm: Option<Norm>,
    /// Number of leading elements to return of each vector; `None` returns all.
    pub dimensions: Option<u32>,
    /// Name of the model's prompt to put before each text; `None` puts none.
    pub input_type: Option<String>,
    /// Priority of the request.
    pub class: Class,
}

/// Embeddings of the texts of a request.
#[derive(Debug)]
pub struct Embedded {
    /// For each text its vector, or the vectors of its tokens one after the other, and its number
    /// of tokens. Vectors have length 1 (unless all elements are 0) if that was requested.
    pub vectors: Vec<(Vec<f32>, u32)>,
    /// Number of elements of each vector.
    pub width: usize,
    /// How hidden states were pooled into the embeddings.
    pub pooling: Pooling,
    /// Number of tokens of all texts together.
    pub tokens: u32,
}

impl Service {
    /// Embeds texts. Dropping the future cancels the remaining work.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for no texts or too many, a text without tokens or too long,
    /// dimensions or a prompt that the model does not have, and vectors of tokens if the response
    /// cannot have them; errors of the engine.
    pub async fn embed(
        &self,
        mut wanted: Texts,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Embedded, Failure> {
        check_texts(&wanted)?;
        let pooling = wanted
            .pooling
            .unwrap_or_else(|| self.pooling(&wanted.model));
        check_pooling(pooling, &wanted)?;
        self.put_prompts(&mut wanted)?;
        let shape = VectorShape::of(pooling, &wanted);
        let Texts {
            model,
            adapters,
            texts,
            field,
            n_ctx,
            truncate,
            class,
            ..
        } = wanted;
        let encodes = model.model().purpose() == Purpose::Embedding;
        let bytes = texts.iter().map(Prompt::bytes).sum();
        let ticket = self.enter(&arrival, bytes).await?;
        let ticket = &ticket;
        let times = &log.times_in(self);
        let counted = &AtomicU64::new(0);
        let room = Room::for_embedding(self.lengths(n_ctx, &model)).cutting(truncate);
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
                shape.check_tokens(tokens, field, counted)?;
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
                let values = arrival.limit(embedded).await?.values;
                Ok((self.vectors(shape, values, arrival).await?, tokens))
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
            width: shape.width,
            pooling,
            tokens,
        })
    }

    /// Makes vectors of the engine's values, on a blocking thread if there are many.
    async fn vectors(
        &self,
        shape: VectorShape,
        values: Vec<f32>,
        arrival: Arrival,
    ) -> Result<Vec<f32>, Failure> {
        if values.len() <= SCALED_HERE_MAX {
            return Ok(shape.vectors(values));
        }
        let bytes = size_of_val(&values[..]);
        let work = move |_: &_| Ok(shape.vectors(values));
        let work = self.text.run(arrival.peer(), bytes, work);
        arrival.limit(work).await
    }

    /// Default pooling of a model: as configured, else as in the model's file; else all hidden
    /// states of an encoder, and the last token's of another model.
    pub fn pooling(&self, model: &LoadedModel) -> Pooling {
        let declared = self.defaults(model.name()).pooling;
        let model = model.model();
        let usual = match model.purpose() {
            Purpose::Embedding => Pooling::Mean,
            _ => Pooling::Last,
        };
        declared.or(model.hparams().pooling).unwrap_or(usual)
    }

    /// Puts the requested prompt of the model before each text.
    fn put_prompts(&self, wanted: &mut Texts) -> Result<(), Failure> {
        let Some(input_type) = &wanted.input_type else {
            return Ok(());
        };
        let model = wanted.model.name();
        let prompts = self.defaults(model).prompts;
        let what = (input_type.as_str(), model, wanted.field);
        input_type::put_before(&mut wanted.texts, &prompts, what)
    }
}

/// How the engine's values are cut and scaled to vectors.
#[derive(Debug, Clone, Copy)]
struct VectorShape {
    /// Number of elements of a hidden state.
    n_embd: usize,
    /// Number of leading elements of each vector to return.
    width: usize,
    norm: Norm,
    /// Whether each token has a vector.
    each_token: bool,
}

impl VectorShape {
    fn of(pooling: Pooling, wanted: &Texts) -> Self {
        let n_embd = wanted.model.model().plan().embedding_width() as usize;
        let each_token = pooling == Pooling::None;
        let usual = match each_token {
            true => Norm::None,
            false => Norm::LENGTH,
        };
        Self {
            n_embd,
            width: wanted.dimensions.map_or(n_embd, |n| n as usize),
            norm: wanted.norm.unwrap_or(usual),
            each_token,
        }
    }

    /// Adds the values of a text of `tokens` tokens, each with a vector, to the request's count
    /// before the engine computes them, and checks the maximum.
    fn check_tokens(&self, tokens: u32, field: &str, values: &AtomicU64) -> Result<(), Failure> {
        if !self.each_token {
            return Ok(());
        }
        let own = u64::from(tokens) * self.n_embd as u64;
        let all = own + values.fetch_add(own, Ordering::Relaxed);
        if all <= VALUES_MAX {
            return Ok(());
        }
        let why = format!(
            "the vectors of all tokens have at least {all} values (pooling none, {} for each token); at most \
             {VALUES_MAX}: send fewer or shorter texts",
            self.n_embd
        );
        Err(failure::invalid(field, &why))
    }

    /// Cuts and scales the engine's values to vectors.
    fn vectors(&self, mut values: Vec<f32>) -> Vec<f32> {
        if self.width < self.n_embd {
            let n = values.len() / self.n_embd;
            for i in 0..n {
                let from = i * self.n_embd;
                values.copy_within(from..from + self.width, i * self.width);
            }
            values.truncate(n * self.width);
        }
        let vectors = values.chunks_exact_mut(self.width.max(1));
        vectors.for_each(|vector| self.norm.scale(vector));
        values
    }
}

/// Rejects a vector for each token if the response cannot have them.
fn check_pooling(pooling: Pooling, wanted: &Texts) -> Result<(), Failure> {
    if pooling != Pooling::None || wanted.each_token {
        return Ok(());
    }
    let why = format!(
        "'{}' gives each token a vector (pooling none), and this route has one for each text; use /embedding, or set \
         pooling = \"mean\", \"cls\" or \"last\" in the model's [[model]] section",
        wanted.model.name()
    );
    Err(failure::invalid("model", &why))
}

/// Checks the number of texts, and options that the model does not support.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(width: usize, each_token: bool) -> VectorShape {
        VectorShape {
            n_embd: 4,
            width,
            norm: Norm::LENGTH,
            each_token,
        }
    }

    #[test]
    fn each_vector_is_cut_and_scaled_by_itself() {
        let values = vec![3.0, -4.0, 7.0, 8.0, 0.0, 2.0, 9.0, 9.0];
        let shape = shape(2, true);
        assert_eq!(shape.vectors(values.clone()), [0.6, -0.8, 0.0, 1.0]);
        let whole = VectorShape {
            width: 4,
            norm: Norm::None,
            ..shape
        };
        assert_eq!(whole.vectors(values.clone()), values);
        assert_eq!(shape.vectors(values[..4].to_vec()), [0.6, -0.8]);
    }

    #[test]
    fn vectors_of_tokens_have_a_bound_for_the_request() {
        let (values, most) = (AtomicU64::new(0), (VALUES_MAX / 4) as u32);
        let each = shape(1, true);
        assert!(each.check_tokens(most - 2, "input", &values).is_ok());
        assert!(each.check_tokens(2, "input", &values).is_ok());
        let failure = each.check_tokens(1, "input", &values).unwrap_err();
        assert_eq!(failure.fields()[0].0, "input");
        // One vector for each text is counted by the number of texts.
        let pooled = shape(1, false);
        let none = AtomicU64::new(0);
        assert!(pooled.check_tokens(u32::MAX, "input", &none).is_ok());
    }
}
