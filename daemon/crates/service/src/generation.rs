//! From a checked request for text to the engine's events.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rocmforge_chat::format::{self, Format};
use rocmforge_chat::prompt::{Prompt, Room};
use rocmforge_chat::tail::Tail;
use rocmforge_engine::api::{Class, FinishReason, GenerateEvent, GenerateRequest, SamplingParams};
use rocmforge_engine::{AppliedAdapters, Events, LoadedModel};
use rocmforge_failure::{self as failure, Failure};

use rocmforge_grammar::Matcher;

use crate::Service;
use crate::arrival::Arrival;
use crate::chat_model::chat_model;
use crate::check::Sampling;
use crate::decoding;
use crate::limits::Ticket;
use crate::measured::Course;
use crate::refusals;
use crate::request_log::RequestLog;

/// A checked request for generated text.
#[derive(Debug)]
pub struct Wanted {
    /// The model that generates.
    pub model: Arc<LoadedModel>,
    /// The prompt to continue.
    pub prompt: Prompt,
    /// The field of the prompt in error messages.
    pub field: &'static str,
    /// Sampling parameters, stop strings and limits.
    pub sampling: Sampling,
    /// Context length in tokens, within the model's and the daemon's limits.
    pub n_ctx: u32,
    /// Priority of the request.
    pub class: Class,
    /// Whether the request may read from the prefix cache and store into it.
    pub reuse: bool,
}

/// A generation that the engine has accepted. Dropping it cancels the generation.
#[derive(Debug)]
pub struct Running {
    events: Events<GenerateEvent>,
    course: Course,
    ticket: Arc<Ticket>,
    /// The model that generates.
    pub model: Arc<LoadedModel>,
    /// LoRA adapters of the request, with their scales.
    pub adapters: Option<Arc<AppliedAdapters>>,
    /// The seed of the generation.
    pub seed: u64,
    /// The request's stop strings.
    pub stop: Vec<String>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// The end of the rendered chat, after which the output begins.
    pub tail: Tail,
}

impl Running {
    /// The next event of the generation; `None` if the engine ended.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<GenerateEvent>> {
        let event = ready!(self.events.poll_next(cx));
        match &event {
            Some(GenerateEvent::Piece { ids, .. }) => {
                self.course.tokens(ids.len());
                self.ticket.note_generated(ids.len());
            }
            Some(GenerateEvent::Done(summary)) => self.course.done(summary),
            Some(GenerateEvent::Failed(error)) => self.ticket.note_failed(error),
            None => {}
        }
        Poll::Ready(event)
    }

    /// The stop string that ended the generation, if one did.
    pub fn stop_string(&self, finish: FinishReason) -> Option<&str> {
        match finish {
            FinishReason::StopString { index } => self.stop.get(index as usize).map(String::as_str),
            FinishReason::EndOfText
            | FinishReason::StopToken { .. }
            | FinishReason::MaxTokens
            | FinishReason::ContextFull => None,
        }
    }
}

/// Applies a grammar to the output from the end of the prompt on; `room` is the number of tokens
/// that may be generated.
fn hold_to(
    sampling: &mut Sampling,
    matcher: Option<Matcher>,
    model: &LoadedModel,
    (tail, room): (&Tail, u32),
) {
    let room = sampling.max_tokens.map_or(room, |most| most.min(room));
    let (trigger, model) = (sampling.trigger.take(), chat_model(model));
    sampling.decoding.grammar =
        format::begun(matcher, trigger, &sampling.reasoning, &model, (tail, room));
}

impl Service {
    /// Tokenizes the prompt, and starts the generation.
    ///
    /// # Errors
    /// Those of the prompt, INVALID_ARGUMENT for one without tokens, RESOURCE_EXHAUSTED
    /// above a limit of the client, and those of an engine that accepts no work.
    pub async fn generate(
        &self,
        wanted: Wanted,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Running, Failure> {
        let mut choices = self.generate_choices(wanted, 1, arrival, log).await?;
        choices
            .pop()
            .ok_or_else(|| failure::bug("no choice was made"))
    }

    /// As [`Service::generate`], but starts `n` completions of one prompt; completion `i` uses the
    /// seed plus `i`.
    ///
    /// # Errors
    /// As [`Service::generate`]; then no completion is started.
    pub async fn generate_choices(
        &self,
        wanted: Wanted,
        n: u32,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Vec<Running>, Failure> {
        let (model, mut sampling) = (wanted.model, wanted.sampling);
        let (field, n_ctx) = (wanted.field, wanted.n_ctx);
        decoding::check_vocabulary(&sampling, &model)?;
        let adapters = self.adapters_for(&sampling.adapters, &model)?;
        let ticket = self.enter(&arrival, wanted.prompt.bytes()).await?;
        self.add_biased_texts(&mut sampling, &model, arrival)
            .await?;
        let matcher = match sampling.format.take() {
            Some(format) => Some(self.matcher(&model, format, arrival).await?),
            None => None,
        };
        let room = Room::for_prompt(self.lengths(n_ctx, &model));
        let encoded = self.encode(Arc::clone(&model), wanted.prompt, field, room, arrival);
        let encoded = encoded.await?;
        let prompt_tokens = encoded.ids.len() as u32;
        log.prompt_tokens = Some(prompt_tokens);
        if prompt_tokens == 0 {
            let why = "it has no tokens; give at least one";
            return Err(failure::invalid(field, why));
        }
        ticket.take_prompt(prompt_tokens)?;
        let images = self.read_images(encoded.images, arrival).await?;
        let room = n_ctx.saturating_sub(prompt_tokens);
        hold_to(&mut sampling, matcher, &model, (&encoded.tail, room));
        let seed = *sampling.params.seed.get_or_insert_with(rand::random);
        let snapshot = self.engine.snapshot();
        log.keep_in(&self.recent);
        log.handed_over();
        let mut choice = |i: u32| {
            let seed = seed.wrapping_add(u64::from(i));
            let params = SamplingParams {
                seed: Some(seed),
                ..sampling.params.clone()
            };
            let request = GenerateRequest {
                model: Arc::clone(&model),
                prompt: encoded.ids.clone(),
                sampling: params,
                max_tokens: sampling.max_tokens,
                n_ctx: Some(n_ctx),
                stop: sampling.stop.clone(),
                decoding: sampling.decoding.clone(),
                deadline: arrival.deadline,
                max_gap: sampling.max_gap,
                asker: ticket.asker(wanted.class),
                reuse: wanted.reuse,
                adapters: adapters.clone(),
            };
            let course = self
                .measured
                .begin(model.name(), prompt_tokens, arrival.at, &snapshot);
            let events = self
                .engine
                .generate_timed(request, images.clone(), Some(log.slot()));
            Ok(Running {
                events: events.map_err(|error| refusals::from_engine(&error))?,
                course,
                ticket: Arc::clone(&ticket),
                model: Arc::clone(&model),
                adapters: adapters.clone(),
                seed,
                stop: sampling.stop.clone(),
                prompt_tokens,
                tail: encoded.tail.clone(),
            })
        };
        // Those that run end where one is refused, since nobody takes their events.
        (0..n).map(&mut choice).collect()
    }

    /// Compiles a format to a grammar for a model's vocabulary.
    ///
    /// # Errors
    /// INVALID_ARGUMENT with the reason, RESOURCE_EXHAUSTED if too many compilations wait.
    async fn matcher(
        &self,
        model: &Arc<LoadedModel>,
        format: Format,
        arrival: Arrival,
    ) -> Result<Matcher, Failure> {
        let Format { grammar, field } = format;
        let model = Arc::clone(model);
        let work = move || {
            let vocabulary = model.grammars();
            let matcher = vocabulary.and_then(|vocabulary| vocabulary.matcher(&grammar));
            matcher.map_err(|error| format::refused(field, &error))
        };
        let work = self.text.compile(arrival.peer(), work);
        arrival.limit(work).await
    }

    /// Converts biases of texts to biases of their tokens.
    async fn add_biased_texts(
        &self,
        sampling: &mut Sampling,
        model: &Arc<LoadedModel>,
        arrival: Arrival,
    ) -> Result<(), Failure> {
        if sampling.biased_texts.is_empty() {
            return Ok(());
        }
        let texts = std::mem::take(&mut sampling.biased_texts);
        let mut bias = std::mem::take(&mut sampling.params.logit_bias);
        let of = Arc::clone(model);
        let bytes = texts.iter().map(|(text, _)| text.len()).sum();
        let work = self.text.run(arrival.peer(), bytes, move |_| {
            decoding::add_biased_texts(&mut bias, &texts, &of)?;
            Ok(bias)
        });
        sampling.params.logit_bias = arrival.limit(work).await?;
        Ok(())
    }
}
