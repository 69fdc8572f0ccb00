//! `POST /v1/completions`: continues texts or token ids.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use futures_util::future::BoxFuture;
use futures_util::{StreamExt as _, TryStreamExt as _};
use rocmforge_chat::infill::Gap;
use rocmforge_chat::parts::Part;
use rocmforge_chat::prompt::Prompt;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::adapters::AdapterChoice;
use rocmforge_service::answers::{self, Ended};
use rocmforge_service::decoding::LOGPROBS_MAX;
use rocmforge_service::echo::Echo;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::error::Dialect;
use super::super::format::WireFormat;
use super::super::llama::native;
use super::super::prompt::{TextOr, model_name};
use super::super::reply::{Events, SSE, SSE_HEARTBEAT, data_event, event, stream};
use super::super::sampling::{WireSampling, refuse_unsupported, small, whole_number};
use super::super::start::{self, Continuation};
use super::chat::no_prompt;
use super::logprobs::{OfCompletion, Place};
use super::{StreamOptions, bounded, fingerprint, finish_reason, logprobs, name, usage};

/// The completions of one prompt.
type Answers = Result<Vec<(Vec<Part>, Ended)>, Failure>;

/// Maximum number of prompts of a request.
const PROMPTS_MAX: usize = 128;
/// Number of a request's prompts that are given to the engine at a time; they share passes.
const AT_A_TIME: usize = 8;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    #[serde(flatten)]
    format: WireFormat,
    logprobs: Option<Value>,
    #[serde(default, deserialize_with = "whole_number")]
    n: Option<i64>,
    echo: Option<bool>,
    // Refused where they ask for anything.
    #[serde(default, deserialize_with = "whole_number")]
    best_of: Option<i64>,
    /// Text after the gap to fill.
    suffix: Option<String>,
}

impl CompletionRequest {
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        const ALL: &str =
            "a number other than n is not implemented: all n answers are given; leave it unset";
        let best_of = self.best_of.is_some_and(|of| of != self.n.unwrap_or(1));
        refuse_unsupported(&[("best_of", best_of, ALL)])
    }
}

/// Number of most likely tokens to return for each generated one: a number, or, as newer clients
/// write it, a boolean.
fn scores(value: Option<&Value>) -> Result<Option<i32>, Failure> {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => Ok(None),
        Some(Value::Bool(true)) => Ok(Some(0)),
        Some(value) => match value.as_i64() {
            Some(n) => Ok(Some(small(n))),
            None => Err(failure::invalid(
                "logprobs",
                "give a whole number from 0 to 20",
            )),
        },
    }
}

/// Parses prompts: a text, ids, or a list of texts or of lists of ids.
fn prompts(value: Value) -> Result<Vec<Prompt>, Failure> {
    let is_list = |value: &Value| {
        value
            .as_array()
            .is_some_and(|list| !list[..].iter().all(Value::is_number))
    };
    match value {
        Value::Array(list) if list.len() > PROMPTS_MAX && !list[0].is_number() => {
            let why = format!("{} prompts; at most {PROMPTS_MAX}", list.len());
            Err(failure::invalid("prompt", &why))
        }
        value if is_list(&value) => match value {
            Value::Array(list) => list.into_iter().map(prompt).collect(),
            _ => Err(no_prompt("prompt")),
        },
        value => Ok(vec![prompt(value)?]),
    }
}

/// Parses one prompt: a text, or ids.
pub(in super::super) fn prompt(value: Value) -> Result<Prompt, Failure> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(Prompt::Text {
            text,
            add_special: true,
            parse_special: true,
        }),
        Value::Array(list) if !list.is_empty() => {
            let ids = list
                .iter()
                .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
            let ids: Option<Vec<u32>> = ids.collect();
            ids.map(Prompt::Ids).ok_or_else(|| {
                failure::invalid("prompt", "a list of ids has whole numbers from 0 only")
            })
        }
        _ => Err(no_prompt("prompt")),
    }
}

/// Handler of `POST /v1/completions`.
pub(in super::super) async fn completions(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/completions", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    let mut asked: CompletionRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    asked.refuse_unsupported()?;
    let mut violations = Violations::named(name);
    // A prompt that is only repeated generates nothing.
    let echoes = asked.echo == Some(true);
    let only_echoes = echoes && asked.max_tokens == Some(0);
    let max_tokens = bounded(asked.max_tokens).filter(|_| !only_echoes);
    let stop = asked.stop.map(TextOr::stops);
    let mut sampling = asked.sampling.fields(max_tokens, stop, &mut violations);
    let scores = scores(asked.logprobs.as_ref())?;
    let choices = answers::choices(asked.n)?;
    sampling.decoding.logprobs = scores;
    sampling.decoding.format = asked.format.format()?;
    let mut prompts = prompts(asked.prompt)?;
    let streams = asked.stream == Some(true);
    if prompts.len() > 1 {
        const ONE: &str =
            "several prompts are continued as a whole answer without echo; send a request for each";
        refuse_unsupported(&[("stream", streams, ONE), ("echo", echoes, ONE)])?;
    }
    let mut prompt = prompts.remove(0);
    if let Some(suffix) = asked.suffix.filter(|text| !text.is_empty()) {
        const ONE: &str = "a gap is filled between one text and a suffix; leave it unset";
        refuse_unsupported(&[("echo", echoes, ONE), ("prompt", !prompts.is_empty(), ONE)])?;
        prompt = between(call, &asked.model, prompt, suffix).await?;
    }
    let options = asked.stream_options;
    let with_usage = options.and_then(|options| options.include_usage) == Some(true);
    let mut chunks = Chunks::new(call, &asked.model, with_usage, choices);
    if echoes {
        let choice = AdapterChoice::new(&asked.model, sampling.lora.clone());
        let echoed = echoed(call, &asked.model, &choice, prompt, scores).await?;
        chunks.fingerprint = Some(echoed.fingerprint.clone());
        chunks.choices.fill(Choice {
            place: Place::behind(&echoed.text),
            ..Choice::default()
        });
        if only_echoes {
            return only_echo(&mut chunks, echoed, streams);
        }
        prompt = Prompt::Ids(echoed.ids.clone());
        chunks.echo = Some(echoed);
    }
    let begin = |prompt: Prompt| {
        let continuation = Continuation {
            model: asked.model.clone(),
            prompt,
            sampling: sampling.clone(),
            n_ctx: None,
            choices,
            field: "prompt",
        };
        start::text(call, continuation, violations.clone())
    };
    let generation = begin(prompt).await?;
    chunks.scored = generation.model().filter(|_| scores.is_some()).cloned();
    chunks.fingerprint = fingerprint::of_generation(&call.service, &generation);
    if streams {
        return stream(generation, chunks, call).await;
    }
    let mut waiting: Vec<BoxFuture<'_, Answers>> = vec![Box::pin(generation.collect_all())];
    for prompt in prompts {
        let begun = begin(prompt);
        waiting.push(Box::pin(async move { begun.await?.collect_all().await }));
    }
    let all = futures_util::stream::iter(waiting).buffered(AT_A_TIME);
    let all: Vec<_> = all.try_collect().await?;
    whole(&chunks, &all)
}

/// The response with the completions of all prompts.
fn whole(chunks: &Chunks, all: &[Vec<(Vec<Part>, Ended)>]) -> Result<Response, Failure> {
    let ends = all.iter().filter_map(|answers| answers.last());
    let usage = usage_of_all(ends.map(|(_, ended)| usage(ended)));
    let answers = all.iter().flatten().enumerate();
    let told = answers.map(|(index, (parts, ended))| {
        let echoed = chunks.echo.as_ref().map(|echo| &*echo.text);
        let generated = parts.iter().filter_map(text_of);
        Told {
            index,
            text: echoed.into_iter().chain(generated).collect(),
            logprobs: chunks.of_whole(&ended.scores),
            finish_reason: Some(finish_reason(ended)),
        }
    });
    let told: Vec<_> = told.collect();
    answer(&Chunk {
        usage: Some(&usage),
        ..chunks.chunk(&told)
    })
}

/// The prompt for a gap between two texts.
async fn between(
    call: &Call,
    model: &str,
    prompt: Prompt,
    suffix: String,
) -> Result<Prompt, Failure> {
    let Prompt::Text { text: prefix, .. } = prompt else {
        return Err(failure::invalid(
            "prompt",
            "give a text where there is a suffix",
        ));
    };
    let gap = Gap {
        prefix,
        suffix,
        others: Vec::new(),
    };
    native::around(call, model, gap, "suffix").await
}

/// The sums of the token counts of all prompts.
fn usage_of_all(each: impl Iterator<Item = Value>) -> Value {
    fn add(sum: &mut Value, more: Value) {
        match (sum, more) {
            (Value::Object(sum), Value::Object(more)) => {
                for (key, value) in more {
                    add(&mut sum[&key], value);
                }
            }
            (sum, more) => {
                *sum = (sum.as_u64().unwrap_or(0) + more.as_u64().unwrap_or(0)).into();
            }
        }
    }
    let sum = each.reduce(|mut sum, more| {
        add(&mut sum, more);
        sum
    });
    sum.unwrap_or_default()
}

/// The prompt to echo, scored if wanted.
async fn echoed(
    call: &Call,
    model: &str,
    choice: &AdapterChoice,
    prompt: Prompt,
    scores: Option<i32>,
) -> Result<Echoed, Failure> {
    let mut log = call.log(model);
    let is_text = matches!(prompt, Prompt::Text { .. });
    let result = async {
        let top_n = scores.map(|n| {
            let fits = u32::try_from(n).ok().filter(|n| *n <= LOGPROBS_MAX);
            let why = format!("{n} is out of range: from 0 to {LOGPROBS_MAX}");
            fits.ok_or_else(|| failure::invalid("logprobs", &why))
        });
        let top_n = top_n.transpose()?;
        let service = &call.service;
        let how = (top_n, service.class(model, None), choice);
        let model = call.model(model).await?;
        let n_ctx = service.n_ctx_at_most(None, &model);
        let adapters = service.adapters_for(choice, &model)?;
        let echo = service.echo(&model, prompt, "prompt", n_ctx, how, call.arrival);
        let Echo { text, ids, scores } = echo.await?;
        Ok(Echoed {
            fingerprint: fingerprint::of(service, &model, adapters.as_deref()),
            text,
            offsets: match top_n {
                Some(_) => logprobs::offsets_of_prompt(&model, &ids, is_text),
                None => Vec::new(),
            },
            ids,
            scores: top_n.map(|_| scores),
            model,
        })
    };
    let result = result.await;
    log.prompt_tokens = result.as_ref().ok().map(|echoed| echoed.ids.len() as u32);
    log.end(result)
}

/// The response with the echoed prompt only.
fn only_echo(chunks: &mut Chunks, echoed: Echoed, streams: bool) -> Result<Response, Failure> {
    if streams {
        let why =
            "a prompt that is only repeated is not streamed; leave it unset, or raise max_tokens";
        return Err(failure::invalid("stream", why));
    }
    let n = echoed.ids.len();
    chunks.echo = Some(echoed);
    let choices = (0..chunks.choices.len()).filter_map(|at| {
        let mut choice = chunks.repeated(at)?;
        choice.finish_reason = Some("length");
        Some(choice)
    });
    let choices: Vec<_> = choices.collect();
    let usage = json!({"prompt_tokens": n, "completion_tokens": 0, "total_tokens": n});
    answer(&Chunk {
        usage: Some(&usage),
        ..chunks.chunk(&choices)
    })
}

fn text_of(part: &Part) -> Option<&str> {
    match part {
        Part::Text(text) => Some(text),
        Part::Reasoning(_) | Part::Call(_) | Part::Arguments(_) => None,
    }
}

/// A prompt that is echoed before its completion.
#[derive(Debug)]
struct Echoed {
    model: Arc<LoadedModel>,
    /// Fingerprint of the model, for prompts that are echoed.
    fingerprint: String,
    text: String,
    ids: Vec<u32>,
    /// Character offset of each token in the text.
    offsets: Vec<u64>,
    /// Log-probabilities of the prompt's tokens but the first, if requested.
    scores: Option<Vec<TokenScore>>,
}

impl Echoed {
    /// `logprobs` of a choice, for the echoed prompt and the generated tokens.
    fn logprobs<'a>(&'a self, scores: &'a [TokenScore]) -> Option<OfCompletion<'a>> {
        let prompt = self.scores.as_ref().filter(|_| !self.ids.is_empty())?;
        let mut place = Place::behind(&self.text);
        let behind = place.of_all(&self.model, scores);
        Some(OfCompletion {
            model: &self.model,
            first: self.ids.first().copied(),
            prompt,
            scores,
            offsets: self.offsets.iter().copied().chain(behind).collect(),
        })
    }
}

/// A chunk of a stream, or a whole response.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: Option<&'a str>,
    choices: &'a [Told<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<&'a Value>,
}

/// A choice in a chunk.
#[derive(Serialize)]
struct Told<'a> {
    index: usize,
    text: Cow<'a, str>,
    logprobs: Option<OfCompletion<'a>>,
    finish_reason: Option<&'static str>,
}

/// Writer of the chunks of a stream.
#[derive(Debug)]
struct Chunks {
    id: String,
    created: u64,
    model: String,
    request_id: String,
    fingerprint: Option<String>,
    with_usage: bool,
    /// The model, if log-probabilities are wanted.
    scored: Option<Arc<LoadedModel>>,
    /// The prompt, if it is echoed.
    echo: Option<Echoed>,
    choices: Vec<Choice>,
    /// Index of the choice that the next event concerns.
    at: usize,
}

/// One of the choices of a streamed completion.
#[derive(Debug, Clone, Default)]
struct Choice {
    /// Log-probabilities for the next chunk.
    scores: Vec<TokenScore>,
    /// Offset of the next token in the text.
    place: Place,
}

impl Chunks {
    /// The events of a stream with `choices` choices, before its first token.
    fn new(call: &Call, model: &str, with_usage: bool, choices: u32) -> Self {
        Self {
            id: format!("cmpl-{}", fresh_id()),
            created: unix_seconds(),
            model: model.to_owned(),
            request_id: call.id.as_str().to_owned(),
            fingerprint: None,
            with_usage,
            scored: None,
            echo: None,
            choices: vec![Choice::default(); choices as usize],
            at: 0,
        }
    }

    /// The echoed prompt as the first chunk of a choice.
    fn repeated(&self, at: usize) -> Option<Told<'_>> {
        let echo = self.echo.as_ref()?;
        Some(Told {
            index: at,
            text: echo.text.as_str().into(),
            logprobs: echo.logprobs(&[]),
            finish_reason: None,
        })
    }

    /// `logprobs` of a whole choice.
    fn of_whole<'a>(&'a self, scores: &'a [TokenScore]) -> Option<OfCompletion<'a>> {
        match &self.echo {
            Some(echo) => echo.logprobs(scores),
            None => self.of(scores, &mut Place::default()),
        }
    }

    /// `logprobs` of these tokens only.
    fn of<'a>(&'a self, scores: &'a [TokenScore], place: &mut Place) -> Option<OfCompletion<'a>> {
        let model = self.scored.as_ref().filter(|_| !scores.is_empty())?;
        Some(OfCompletion {
            model,
            first: None,
            prompt: &[],
            scores,
            offsets: place.of_all(model, scores).collect(),
        })
    }

    fn tell(&mut self, text: &str, finish_reason: Option<&'static str>, out: &mut String) {
        let choice = &mut self.choices[self.at];
        let scores = std::mem::take(&mut choice.scores);
        let mut place = std::mem::take(&mut choice.place);
        let told = Told {
            index: self.at,
            text: text.into(),
            logprobs: self.of(&scores, &mut place),
            finish_reason,
        };
        data_event(&self.chunk(&[told]), out);
        self.choices[self.at].place = place;
    }

    fn chunk<'a>(&'a self, choices: &'a [Told<'a>]) -> Chunk<'a> {
        Chunk {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            system_fingerprint: self.fingerprint.as_deref(),
            choices,
            // As OpenAI: null up to the chunk that tells it.
            usage: self.with_usage.then_some(&Value::Null),
        }
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, out: &mut String) {
        for at in 0..self.choices.len() {
            if let Some(told) = self.repeated(at) {
                data_event(&self.chunk(&[told]), out);
            }
        }
    }

    fn scores(&mut self, scores: Vec<TokenScore>) {
        self.choices[self.at].scores.extend(scores);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        if let Some(text) = text_of(&part) {
            self.tell(text, None, out);
        }
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn choice(&mut self, index: usize) {
        self.at = index;
    }

    fn choice_end(&mut self, ended: &Ended, out: &mut String) {
        self.tell("", Some(finish_reason(ended)), out);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        self.choice_end(ended, out);
        if self.with_usage {
            let last = Chunk {
                usage: Some(&usage(ended)),
                ..self.chunk(&[])
            };
            data_event(&last, out);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        event(None, &Dialect::OpenAi.body(failure, &self.request_id), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_texts_or_ids() {
        let one = |value: Value| match prompts(value).map(|mut all| (all.pop(), all.len())) {
            Ok((Some(prompt), 0)) => Some(prompt),
            _ => None,
        };
        assert!(matches!(one(json!("a")), Some(Prompt::Text { text, .. }) if text == "a"));
        assert!(matches!(one(json!(["a"])), Some(Prompt::Text { text, .. }) if text == "a"));
        assert!(matches!(one(json!([1, 2])), Some(Prompt::Ids(ids)) if ids == [1, 2]));
        assert!(matches!(one(json!([[1, 2]])), Some(Prompt::Ids(ids)) if ids == [1, 2]));
        assert_eq!(prompts(json!(["a", "b", [1]])).unwrap().len(), 3);
        for refused in [
            json!(""),
            json!([]),
            json!(null),
            json!([1, -2]),
            json!([1, "a"]),
            json!(["a", ""]),
            json!(vec!["a"; PROMPTS_MAX + 1]),
        ] {
            assert!(prompts(refused.clone()).is_err(), "{refused}");
        }
    }

    #[test]
    fn the_usage_of_several_prompts_is_their_sum() {
        let one = json!({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}});
        let two = json!({"prompt_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}});
        assert_eq!(usage_of_all([one.clone(), one].into_iter()), two);
    }
}
