//! A checked request for text, from its prompt to the engine's events.

use std::sync::Arc;

use rocmforge_engine::api::{Class, FinishReason, GenerateEvent, GenerateRequest};
use rocmforge_engine::{Events, LoadedModel};

use crate::Service;
use crate::arrival::Arrival;
use crate::check::Sampling;
use crate::failure::{self, Failure};
use crate::measured::Course;
use crate::prompt::{Prompt, Room};
use crate::request_log::RequestLog;

/// A checked request for text.
#[derive(Debug)]
pub struct Wanted {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// What to continue.
    pub prompt: Prompt,
    /// What a refusal calls the prompt.
    pub field: &'static str,
    /// How to choose tokens, and when to end.
    pub sampling: Sampling,
    /// The context length, within the model's and the daemon's.
    pub n_ctx: u32,
    /// How urgent it is.
    pub class: Class,
    /// Whether its prompt may begin with what was computed for earlier ones, and be kept for later ones.
    pub reuse: bool,
}

/// A generation that the engine has taken. Dropping it cancels it.
#[derive(Debug)]
pub struct Running {
    events: Events<GenerateEvent>,
    course: Course,
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Where its draws began.
    pub seed: u64,
    /// The request's stop strings.
    pub stop: Vec<String>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// The end of its rendered chat; see [`crate::prompt::Encoded::tail`].
    pub tail: String,
}

impl Running {
    /// What it gives next; `None` where the engine ended. Cancelling it loses nothing.
    pub async fn next(&mut self) -> Option<GenerateEvent> {
        let event = self.events.next().await;
        match &event {
            Some(GenerateEvent::Piece { ids, .. }) => self.course.tokens(ids.len()),
            Some(GenerateEvent::Done(summary)) => self.course.done(summary),
            Some(GenerateEvent::Failed(_)) | None => {}
        }
        event
    }

    /// The stop string that ended it, if one did.
    pub fn stop_string(&self, finish: FinishReason) -> Option<&str> {
        match finish {
            FinishReason::StopString { index } => self.stop.get(index as usize).map(String::as_str),
            FinishReason::EndOfText | FinishReason::MaxTokens | FinishReason::ContextFull => None,
        }
    }
}

impl Service {
    /// Tokenizes, and hands over to the engine.
    ///
    /// # Errors
    /// Those of the prompt, INVALID_ARGUMENT for one without tokens, and those of an engine that
    /// takes no work.
    pub async fn generate(
        &self,
        wanted: Wanted,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Running, Failure> {
        let Wanted {
            model,
            prompt,
            field,
            mut sampling,
            n_ctx,
            class,
            reuse,
        } = wanted;
        let room = Room::for_prompt(n_ctx, self, &model);
        let encoded = self
            .encode(Arc::clone(&model), prompt, field, room, arrival)
            .await?;
        let prompt_tokens = encoded.ids.len() as u32;
        log.prompt_tokens = Some(prompt_tokens);
        if encoded.ids.is_empty() {
            return Err(failure::invalid(
                field,
                "it has no tokens; give at least one",
            ));
        }
        let seed = *sampling.params.seed.get_or_insert_with(rand::random);
        let stop = sampling.stop.clone();
        let request = GenerateRequest {
            model: Arc::clone(&model),
            prompt: encoded.ids,
            sampling: sampling.params,
            max_tokens: sampling.max_tokens,
            n_ctx: Some(n_ctx),
            stop: sampling.stop,
            deadline: arrival.deadline,
            asker: arrival.asker(class),
            reuse,
        };
        let snapshot = self.engine.snapshot();
        let course = self.measured.begin(model.name(), arrival.at, &snapshot);
        let events = self
            .engine
            .generate(request)
            .map_err(|error| failure::from_engine(&error))?;
        Ok(Running {
            events,
            course,
            model,
            seed,
            stop,
            prompt_tokens,
            tail: encoded.tail,
        })
    }
}
