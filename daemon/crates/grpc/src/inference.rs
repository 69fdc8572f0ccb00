//! `rocmforge.v1.Inference`: generation, scores, tokenization and embeddings.

use std::sync::Arc;
use std::time::Instant;

use rocmforge_chat::conversation::{self, Conversation};
use rocmforge_chat::format::Format;
use rocmforge_chat::parts::splitter::Splitter;
use rocmforge_chat::prompt::{Prompt, Room};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api as engine;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_grammar::Grammar;
use rocmforge_proto::v1;
use rocmforge_proto::v1::inference_server::Inference;
use rocmforge_service::Service;
use rocmforge_service::adapters::{AdapterChoice, AdapterScale};
use rocmforge_service::answering::Answering;
use rocmforge_service::answers;
use rocmforge_service::arrival::{Arrival, Caller};
use rocmforge_service::chat_model::chat_model;
use rocmforge_service::check::{self, SamplingFields};
use rocmforge_service::decoding::DecodingFields;
use rocmforge_service::generation::{Running, Wanted};
use rocmforge_service::request_log::RequestLog;
use rocmforge_service::samplers::SamplerFields;
use tonic::{Request, Response, Status};

use super::events::{GenerateStream, piece, streamed, token_logprob};
use super::status_code::status;
use super::tokens::Tokens;
use super::{arrival, chat, vectors};

/// Implementation of `rocmforge.v1.Inference`.
#[derive(Debug)]
pub(super) struct InferenceService {
    context: Arc<Service>,
}

impl InferenceService {
    pub(super) fn new(context: Arc<Service>) -> Self {
        Self { context }
    }

    async fn check_generate(
        &self,
        request: v1::GenerateRequest,
        arrival: &Arrival,
    ) -> Result<Wanted, Failure> {
        use v1::generate_request::Prompt as Wire;

        self.context.admit()?;
        let mut violations = Violations::default();
        check::model_name("model", &request.model, &mut violations);
        let mut sampling = sampling(request.sampling, request.logprobs)?;
        sampling.max_gap_ms = request.max_gap_ms;
        let sampling = self
            .context
            .sampling(&request.model, sampling, &mut violations);
        let n_ctx = check::n_ctx(request.n_ctx, &mut violations);
        let class = class(request.priority, &mut violations);
        let class = self.context.class(&request.model, class);
        let prompt = match request.prompt {
            Some(Wire::Text(text)) if !text.is_empty() => Some(Prompt::Text {
                text,
                add_special: request.add_special.unwrap_or(true),
                parse_special: request.parse_special.unwrap_or(true),
            }),
            Some(Wire::Tokens(v1::TokenIds { ids })) if !ids.is_empty() => Some(Prompt::Ids(ids)),
            Some(_) | None => {
                violations.add(
                    "prompt",
                    "empty; give a text of at least one byte, or at least one token id",
                );
                None
            }
        };
        violations.result()?;
        let model = self
            .context
            .model_as_its_file_is(&request.model, arrival)
            .await?;
        let n_ctx = self.context.n_ctx(n_ctx, &model)?;
        let Some(prompt) = prompt else {
            return Err(failure::bug("a missing prompt was let through"));
        };
        if let Prompt::Ids(ids) = &prompt {
            check::ids("tokens.ids", ids, model.model().info().n_vocab)?;
        }
        Ok(Wanted {
            model,
            field: prompt.field(),
            prompt,
            sampling,
            n_ctx,
            class,
            reuse: request.reuse_prompt.unwrap_or(true),
        })
    }

    /// Checks a chat request; returns the model, the conversation and the parameters.
    async fn check_chat(
        &self,
        mut request: v1::ChatRequest,
        arrival: &Arrival,
    ) -> Result<(Arc<LoadedModel>, Conversation, Answering), Failure> {
        self.context.admit()?;
        let mut violations = Violations::default();
        check::model_name("model", &request.model, &mut violations);
        let roles: Vec<_> = request.messages.iter().map(|m| m.role.as_str()).collect();
        check::messages(&roles, &mut violations);
        let last = roles.last().map(|role| (*role).to_owned());
        let conversation = chat::conversation(&mut request, &mut violations)?;
        conversation::check_continued(conversation.ending, last.as_deref(), &mut violations);
        let mut sampling = sampling(request.sampling, request.logprobs)?;
        sampling.max_gap_ms = request.max_gap_ms;
        let sampling = self
            .context
            .sampling(&request.model, sampling, &mut violations);
        let n_ctx = check::n_ctx(request.n_ctx, &mut violations);
        let class = class(request.priority, &mut violations);
        let class = self.context.class(&request.model, class);
        violations.result()?;
        let choices = answers::choices(request.n.map(i64::from))?;
        let model = self
            .context
            .model_as_its_file_is(&request.model, arrival)
            .await?;
        let how = Answering {
            sampling,
            n_ctx: self.context.n_ctx(n_ctx, &model)?,
            class,
            reuse: request.reuse_prompt.unwrap_or(true),
            choices,
            unparsed: request.unparsed,
        };
        Ok((model, conversation, how))
    }

    async fn begin_text(
        &self,
        request: v1::GenerateRequest,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Vec<(Running, Splitter)>, Failure> {
        self.context.opened(&request.model, &arrival).await?;
        let n = answers::choices(request.n.map(i64::from))?;
        let wanted = self.check_generate(request, &arrival).await?;
        let choices = self.context.generate_choices(wanted, n, arrival, log);
        let split = |running| (running, Splitter::plain());
        Ok(choices.await?.into_iter().map(split).collect())
    }

    async fn begin_chat(
        &self,
        request: v1::ChatRequest,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Vec<(Running, Splitter)>, Failure> {
        self.context.opened(&request.model, &arrival).await?;
        let (model, conversation, how) = self.check_chat(request, &arrival).await?;
        self.context
            .answer(&model, conversation, how, arrival, log)
            .await
    }

    async fn render_chat(
        &self,
        request: v1::ChatRequest,
        arrival: Arrival,
    ) -> Result<v1::RenderResponse, Failure> {
        self.context.opened(&request.model, &arrival).await?;
        let (model, conversation, _) = self.check_chat(request, &arrival).await?;
        let rendered = self.context.render(&model, conversation, arrival);
        let (text, ids) = rendered.await?;
        Ok(v1::RenderResponse { text, ids })
    }
}

/// The priority class of a request, if it sets one.
pub(super) fn class(priority: i32, violations: &mut Violations) -> Option<engine::Class> {
    match v1::Priority::try_from(priority) {
        Ok(v1::Priority::Unspecified) => None,
        Ok(v1::Priority::Interactive) => Some(engine::Class::Interactive),
        Ok(v1::Priority::Batch) => Some(engine::Class::Batch),
        Err(_) => {
            violations.add("priority", "give 1 for interactive, or 2 for batch");
            None
        }
    }
}

/// Converts sampling fields to the service's type.
fn sampling(
    wire: Option<v1::SamplingParams>,
    logprobs: Option<i32>,
) -> Result<SamplingFields, Failure> {
    let wire = wire.unwrap_or_default();
    Ok(SamplingFields {
        samplers: SamplerFields {
            typical_p: wire.typical_p,
            top_n_sigma: wire.top_n_sigma,
            xtc_probability: wire.xtc_probability,
            xtc_threshold: wire.xtc_threshold,
            dynatemp_range: wire.dynatemp_range,
            dynatemp_exponent: wire.dynatemp_exponent,
            min_keep: wire.min_keep,
            dry_multiplier: wire.dry_multiplier,
            dry_base: wire.dry_base,
            dry_allowed_length: wire.dry_allowed_length,
            dry_penalty_last_n: wire.dry_penalty_last_n,
            dry_sequence_breakers: wire.dry_sequence_breakers.map(|breakers| breakers.texts),
            mirostat: wire.mirostat,
            mirostat_tau: wire.mirostat_tau,
            mirostat_eta: wire.mirostat_eta,
            samplers: wire.samplers.map(|order| order.names),
        },
        temperature: wire.temperature,
        top_k: wire.top_k,
        top_p: wire.top_p,
        min_p: wire.min_p,
        repeat_penalty: wire.repeat_penalty,
        presence_penalty: wire.presence_penalty,
        frequency_penalty: wire.frequency_penalty,
        penalty_last_n: wire.penalty_last_n,
        seed: wire.seed,
        max_tokens: wire.max_tokens,
        stop: wire.stop,
        decoding: DecodingFields {
            logit_bias: wire.logit_bias.into_iter().collect(),
            biased_texts: Vec::new(),
            min_tokens: wire.min_tokens,
            ignore_eos: wire.ignore_eos,
            stop_token_ids: wire.stop_token_ids,
            logprobs,
            after_sampling: false,
            format: wire.format.map(format).transpose()?,
            reasoning_budget: None,
            reasoning_end: None,
        },
        // The request has these itself.
        max_gap_ms: None,
        reuse_prompt: None,
        lora: wire.lora.map(listed),
    })
}

/// The adapters that a request lists.
fn listed(wire: v1::AdapterScales) -> Vec<AdapterScale> {
    let list = wire.adapters.into_iter();
    let scale = |wire: v1::AdapterScale| AdapterScale {
        id: wire.id.into(),
        scale: wire.scale,
    };
    list.map(scale).collect()
}

/// Converts the grammar or format that constrains the output.
fn format(wire: v1::Format) -> Result<Format, Failure> {
    use v1::format::Kind;

    match wire.kind {
        Some(Kind::JsonObject(_)) => Ok(Format::new(Grammar::JsonObject, "sampling.format")),
        Some(Kind::JsonSchema(text)) => {
            Format::of_schema_text(&text, "sampling.format.json_schema")
        }
        Some(Kind::Regex(text)) => Ok(Format::new(Grammar::Regex(text), "sampling.format.regex")),
        Some(Kind::Gbnf(text)) => Ok(Format::new(Grammar::Gbnf(text), "sampling.format.gbnf")),
        Some(Kind::Lark(text)) => Ok(Format::new(Grammar::Lark(text), "sampling.format.lark")),
        None => Err(failure::invalid(
            "sampling.format",
            "empty; give a kind of format, or leave it unset",
        )),
    }
}

impl InferenceService {
    async fn tokenize_text(
        &self,
        request: v1::TokenizeRequest,
        arrival: Arrival,
    ) -> Result<Tokens, Failure> {
        self.context.admit()?;
        self.context.opened(&request.model, &arrival).await?;
        let mut violations = Violations::default();
        check::model_name("model", &request.model, &mut violations);
        violations.result()?;
        let model = self
            .context
            .model_as_its_file_is(&request.model, &arrival)
            .await?;
        let prompt = Prompt::Text {
            text: request.text,
            add_special: request.add_special.unwrap_or(true),
            parse_special: request.parse_special.unwrap_or(true),
        };
        let bytes = prompt.bytes();
        let uid = arrival.caller.unwrap_or_else(Caller::unknown).uid;
        let work = self.context.text.run(arrival.peer(), bytes, move |_| {
            let field = prompt.field();
            let ids = prompt.encode(field, &chat_model(&model), None, None)?.ids;
            Tokens::new(model, ids, field)
        });
        let mut tokens = arrival.limit(work).await?;
        // Others may have filled the room since this request was let in.
        self.context.room_for_reply(uid)?;
        tokens.count(self.context.sending.hold(uid));
        Ok(tokens)
    }

    async fn detokenize_ids(
        &self,
        request: v1::DetokenizeRequest,
        arrival: Arrival,
    ) -> Result<v1::DetokenizeResponse, Failure> {
        self.context.admit()?;
        self.context.opened(&request.model, &arrival).await?;
        let mut violations = Violations::default();
        check::model_name("model", &request.model, &mut violations);
        violations.result()?;
        let model = self
            .context
            .model_as_its_file_is(&request.model, &arrival)
            .await?;
        check::ids("ids", &request.ids, model.model().info().n_vocab)?;
        let ids = request.ids;
        let bytes = size_of_val(ids.as_slice());
        let work = self.context.text.run(arrival.peer(), bytes, move |_| {
            let decoded = model.tokenizer().decode(&ids);
            let text = decoded.map_err(|error| failure::invalid("ids", &error.to_string()))?;
            Ok(v1::DetokenizeResponse { text })
        });
        arrival.limit(work).await
    }

    async fn score_text(
        &self,
        request: v1::ScoreRequest,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<v1::ScoreResponse, Failure> {
        use v1::score_request::Input;

        self.context.admit()?;
        self.context.opened(&request.model, &arrival).await?;
        let mut violations = Violations::default();
        check::model_name("model", &request.model, &mut violations);
        let top_n = check::top_n(request.top_n, &mut violations);
        let n_ctx = check::n_ctx(request.n_ctx, &mut violations);
        let class = class(request.priority, &mut violations);
        let class = self.context.class(&request.model, class);
        let (field, prompt) = match request.input {
            Some(Input::Text(text)) => {
                let add_special = request.add_special.unwrap_or(true);
                (
                    "text",
                    Prompt::Text {
                        text,
                        add_special,
                        parse_special: request.parse_special.unwrap_or(true),
                    },
                )
            }
            Some(Input::Tokens(v1::TokenIds { ids })) => ("tokens.ids", Prompt::Ids(ids)),
            None => {
                violations.add("input", "missing; give a text or token ids");
                ("input", Prompt::Ids(Vec::new()))
            }
        };
        violations.result()?;
        let model = self
            .context
            .model_as_its_file_is(&request.model, &arrival)
            .await?;
        let n_ctx = self.context.n_ctx(n_ctx, &model)?;
        if let Prompt::Ids(ids) = &prompt {
            check::ids(field, ids, model.model().info().n_vocab)?;
        }
        let choice = AdapterChoice::by_name(&request.model);
        let adapters = self.context.adapters_for(&choice, &model)?;
        let room = Room::for_scores(self.context.lengths(n_ctx, &model));
        let ticket = self.context.enter(&arrival, prompt.bytes()).await?;
        let encoded = self
            .context
            .encode(Arc::clone(&model), prompt, field, room, arrival)
            .await?;
        let ids = encoded.without_images(field)?;
        check::score_length(field, ids.len(), top_n)?;
        ticket.take_prompt(ids.len() as u32)?;

        let first = ids[0];
        let request = engine::ScoreRequest {
            model: Arc::clone(&model),
            ids,
            top_n,
            deadline: arrival.deadline,
            asker: ticket.asker(class),
            adapters,
        };
        let times = Some(log.times_in(&self.context));
        let scoring = async {
            self.context
                .engine
                .score_timed(request, times)
                .await
                .map_err(|error| ticket.failure(&error))
        };
        let scores = arrival.limit(scoring).await?;
        Ok(score_response(&model, first, scores, arrival.at))
    }
}

fn score_response(
    model: &LoadedModel,
    first: u32,
    scores: engine::Scores,
    arrived: Instant,
) -> v1::ScoreResponse {
    let sum_logprob: f64 = scores
        .tokens
        .iter()
        .map(|token| f64::from(token.logprob))
        .sum();
    let n_scored = scores.tokens.len() as u32;
    let start = v1::TokenLogprob {
        id: first,
        logprob: None,
        piece: piece(model, first),
        top: Vec::new(),
    };
    let rest = scores
        .tokens
        .into_iter()
        .map(|score| token_logprob(model, &score));
    v1::ScoreResponse {
        tokens: std::iter::once(start).chain(rest).collect(),
        sum_logprob,
        n_scored,
        perplexity: if n_scored == 0 {
            0.0
        } else {
            (-sum_logprob / f64::from(n_scored)).exp()
        },
        cache_hits: scores.cache.hits,
        cache_misses: scores.cache.misses,
        uploaded_bytes: scores.cache.uploaded_bytes,
        total_ms: arrived.elapsed().as_secs_f64() * 1e3,
    }
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = GenerateStream;
    type ChatStream = GenerateStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Generate", &request.model, &arrival);
        let begun = self.begin_text(request, arrival, &mut log).await;
        streamed(begun, arrival, log)
    }

    async fn chat(
        &self,
        request: Request<v1::ChatRequest>,
    ) -> Result<Response<Self::ChatStream>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Chat", &request.model, &arrival);
        let begun = self.begin_chat(request, arrival, &mut log).await;
        streamed(begun, arrival, log)
    }

    async fn render(
        &self,
        request: Request<v1::ChatRequest>,
    ) -> Result<Response<v1::RenderResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Render", &request.model, &arrival);
        let result = self.render_chat(request, arrival).await;
        log.prompt_tokens = result.as_ref().ok().map(|answer| answer.ids.len() as u32);
        log.end(result).map(Response::new).map_err(status)
    }

    async fn embed(
        &self,
        request: Request<v1::EmbedRequest>,
    ) -> Result<Response<v1::EmbedResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Embed", &request.model, &arrival);
        let result = vectors::embed(&self.context, request, arrival, &mut log).await;
        log.prompt_tokens = result.as_ref().ok().map(|answer| answer.prompt_tokens);
        log.end(result).map(Response::new).map_err(status)
    }

    async fn rerank(
        &self,
        request: Request<v1::RerankRequest>,
    ) -> Result<Response<v1::RerankResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Rerank", &request.model, &arrival);
        let result = vectors::rerank(&self.context, request, arrival, &mut log).await;
        log.prompt_tokens = result.as_ref().ok().map(|answer| answer.prompt_tokens);
        log.end(result).map(Response::new).map_err(status)
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Tokenize", &request.model, &arrival);
        let result = self.tokenize_text(request, arrival).await;
        log.prompt_tokens = result.as_ref().ok().map(|tokens| tokens.len() as u32);
        log.end(result).map(Tokens::answer).map_err(status)
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let log = RequestLog::new("Detokenize", &request.model, &arrival);
        log.end(self.detokenize_ids(request, arrival).await)
            .map(Response::new)
            .map_err(status)
    }

    async fn score(
        &self,
        request: Request<v1::ScoreRequest>,
    ) -> Result<Response<v1::ScoreResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let mut log = RequestLog::new("Score", &request.model, &arrival);
        let result = self.score_text(request, arrival, &mut log).await;
        log.prompt_tokens = result
            .as_ref()
            .ok()
            .map(|answer| answer.tokens.len() as u32);
        log.uploaded_bytes = result.as_ref().ok().map(|answer| answer.uploaded_bytes);
        log.end(result).map(Response::new).map_err(status)
    }
}
