//! `POST /v1/chat/completions`.
//!
//! A stream consists, like OpenAI's, of: the role; the output in pieces; the finish reason, with an
//! empty delta; the usage, without choices, if requested (null before); `[DONE]`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::parts::Part;
use rocmforge_chat::tool_calls::ToolCall;
use rocmforge_chat::tools;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::answers::{self, Ended, Generation};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, fresh_id, json as answer, unix_seconds};
use super::super::control::{Control, Controls};
use super::super::count::{self, Counted};
use super::super::error::Dialect;
use super::super::format::WireFormat;
use super::super::prompt::{TextOr, WireMessage, messages, model_name};
use super::super::reply::{Events, SSE, SSE_HEARTBEAT, data_event, event, stream};
use super::super::sampling::{
    WireSampling, reasoning_budget, refuse_unsupported, says_something, small, whole_number,
};
use super::super::start::{self, Conversation};
use super::super::template::WireTemplate;
use super::super::timings::{self, SoFar};
use super::logprobs::OfChat;
use super::{StreamOptions, bounded, fingerprint, finish_reason, name, usage};

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    messages: Vec<WireMessage>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<i64>,
    #[serde(default, deserialize_with = "whole_number")]
    max_completion_tokens: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    #[serde(flatten)]
    format: WireFormat,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    #[serde(flatten)]
    template: WireTemplate,
    logprobs: Option<bool>,
    #[serde(default, deserialize_with = "whole_number")]
    top_logprobs: Option<i64>,
    #[serde(default, deserialize_with = "whole_number")]
    n: Option<i64>,
    // Refused where they ask for anything.
    functions: Option<Value>,
    function_call: Option<Value>,
    modalities: Option<Vec<String>>,
    audio: Option<Value>,
    web_search_options: Option<Value>,
    /// llama-server's field for the maximum number of reasoning tokens.
    reasoning_budget: Option<Value>,
    /// llama-server's second name of `reasoning_budget`.
    thinking_budget_tokens: Option<Value>,
    /// vLLM's name of `reasoning_budget`.
    thinking_token_budget: Option<Value>,
    /// Whether `/v1/chat/completions/control` may end the reasoning.
    reasoning_control: Option<bool>,
    /// Whether each chunk of a stream has the times so far.
    timings_per_token: Option<bool>,
}

impl ChatRequest {
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        const LATER: &str = "not implemented; leave it unset";
        const FUNCTIONS: &str = "replaced by tools; send tools";
        const TEXT: &str = "the models here write text only; leave it unset, or give [\"text\"]";
        let says = |value: &Option<Value>| says_something(value.as_ref());
        let modalities = self.modalities.as_ref();
        let speaks = modalities.is_some_and(|list| list.iter().any(|mode| mode != "text"));
        let calls = says(&self.function_call) && self.function_call != Some(json!("none"));
        refuse_unsupported(&[
            ("functions", says(&self.functions), FUNCTIONS),
            ("function_call", calls, FUNCTIONS),
            ("modalities", speaks, TEXT),
            ("audio", says(&self.audio) && speaks, TEXT),
            ("web_search_options", says(&self.web_search_options), LATER),
        ])
    }

    /// The request's reasoning budget, with the field name of each server.
    fn budgets(&self) -> [(&'static str, &Option<Value>); 3] {
        [
            ("reasoning_budget", &self.reasoning_budget),
            ("thinking_budget_tokens", &self.thinking_budget_tokens),
            ("thinking_token_budget", &self.thinking_token_budget),
        ]
    }

    /// The name of the field that allows no reasoning token, if one does.
    fn without_thoughts(&self) -> Option<&'static str> {
        let mut budgets = self.budgets().into_iter();
        let none = budgets.find(|(_, value)| is_zero(value.as_ref()));
        none.map(|(field, _)| field)
    }

    /// The conversation to continue.
    fn conversation(mut self) -> Result<(Conversation, Violations), Failure> {
        let without_thoughts = self.without_thoughts();
        let scores = self.scores()?;
        let choices = answers::choices(self.n)?;
        let mut violations = Violations::named(match self.max_completion_tokens {
            Some(_) => chat_name,
            None => older_chat_name,
        });
        let reasoning_budget = reasoning_budget(&self.budgets(), &mut violations);
        let tools = tools::checked(
            self.tools,
            self.tool_choice.as_ref(),
            self.parallel_tool_calls,
        )?;
        let ending = self.template.ending(&mut violations);
        let max_tokens = bounded(self.max_completion_tokens.or(self.max_tokens));
        let stop = self.stop.map(TextOr::stops);
        let mut sampling = self.sampling.fields(max_tokens, stop, &mut violations);
        sampling.decoding.reasoning_budget = reasoning_budget;
        sampling.decoding.logprobs = scores;
        sampling.decoding.format = self.format.format()?;
        let conversation = Conversation {
            model: self.model,
            messages: messages(self.messages)?,
            tools,
            documents: self.template.documents()?,
            kwargs: self.template.kwargs(without_thoughts.is_some()),
            ending,
            is_quiet: false,
            sampling,
            n_ctx: None,
            choices,
            field: "messages",
        };
        Ok((conversation, violations))
    }

    /// Number of most likely tokens to return for each generated one; `None` if no
    /// log-probabilities are wanted.
    fn scores(&self) -> Result<Option<i32>, Failure> {
        match (self.logprobs, self.top_logprobs) {
            (Some(true), top) => Ok(Some(top.map_or(0, small))),
            (_, None | Some(0)) => Ok(None),
            (_, Some(_)) => Err(failure::invalid(
                "top_logprobs",
                "it counts only with logprobs; set logprobs to true",
            )),
        }
    }
}

fn is_zero(value: Option<&Value>) -> bool {
    value.and_then(Value::as_f64) == Some(0.0)
}

/// Handler of `POST /v1/chat/completions`.
pub(in super::super) async fn chat(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /v1/chat/completions", &request);
    let result = complete(&call, &http.controls, request).await;
    call.respond(result)
}

/// Handler of `POST /v1/chat/completions/input_tokens`, which counts tokens.
pub(in super::super) async fn count_tokens(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/chat/completions/input_tokens", &request);
    let result = async {
        let counted = Counted::openai(request.uri());
        let mut asked: ChatRequest = call.read(request).await?;
        asked.model = call.meant(asked.model).await?;
        asked.refuse_unsupported()?;
        let (conversation, violations) = asked.conversation()?;
        count::input_tokens(&call, conversation, violations, counted).await
    };
    let result = result.await;
    call.respond(result)
}

async fn complete(
    call: &Call,
    controls: &Arc<Controls>,
    request: Request,
) -> Result<Response, Failure> {
    let mut asked: ChatRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    asked.refuse_unsupported()?;
    let without_thoughts = asked.without_thoughts();
    let (streams, times) = (
        asked.stream == Some(true),
        asked.timings_per_token == Some(true),
    );
    let with_usage = asked
        .stream_options
        .as_ref()
        .and_then(|options| options.include_usage);
    let id = format!("chatcmpl-{}", fresh_id());
    let control = asked.reasoning_control == Some(true);
    let control = control.then(|| controls.list(&id));
    let (mut conversation, violations) = asked.conversation()?;
    let decoding = &mut conversation.sampling.decoding;
    let scores = decoding.logprobs;
    let (control, end) = control.unzip();
    decoding.reasoning_end = end;
    let (model, choices) = (conversation.model.clone(), conversation.choices);
    let mut generation = start::chat(call, conversation, violations).await?;
    if let Some(field) = without_thoughts {
        generation.refuse_thoughts(field)?;
    }
    let choice = Choice {
        so_far: times.then(|| SoFar::new(generation.prompt_tokens())),
        ..Choice::default()
    };
    let chunks = Chunks {
        id,
        created: unix_seconds(),
        model,
        request_id: call.id.as_str().to_owned(),
        fingerprint: fingerprint::of_generation(&call.service, &generation),
        with_usage: with_usage.unwrap_or(false),
        scored: generation.model().filter(|_| scores.is_some()).cloned(),
        choices: vec![choice; choices as usize],
        at: 0,
        _control: control,
    };
    generation.score_text_only();
    if streams {
        generation.tell_pieces();
        stream(generation, chunks, call).await
    } else {
        whole(generation, &chunks).await
    }
}

async fn whole(generation: Generation, chunks: &Chunks) -> Result<Response, Failure> {
    let answers = generation.collect_all().await?;
    let (parts, ends): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
    let Some(last) = ends.last() else {
        return Err(failure::bug("there is no answer"));
    };
    // What is said stands in one text, whatever was called in between.
    let of_content = ends.iter().map(|ended| ended.text_scores.concat());
    let scores: Vec<Vec<TokenScore>> = of_content.collect();
    let choices = parts.into_iter().zip(&ends).zip(&scores).enumerate();
    let choices = choices.map(|(index, ((parts, ended), scores))| Whole {
        index,
        message: message(parts),
        logprobs: chunks.logprobs_of(scores),
        finish_reason: finish_reason(ended),
    });
    answer(&Chunk {
        object: "chat.completion",
        usage: Some(&usage(last)),
        timings: chunks.times_of(last),
        ..chunks.chunk(choices.collect::<Vec<_>>())
    })
}

fn message(parts: Vec<Part>) -> Value {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text(text) => content.push_str(&text),
            Part::Reasoning(text) => reasoning.push_str(&text),
            Part::Call(call) => calls.push(tool_call(&call)),
            // Calls of a whole answer are whole.
            Part::Arguments(_) => {}
        }
    }
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        if content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.into();
    }
    message
}

fn tool_call(call: &ToolCall) -> Value {
    json!({
        "id": format!("call_{}", fresh_id()),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
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
    choices: Vec<Choice>,
    /// Index of the choice that the next event concerns.
    at: usize,
    /// Registration by which a client can end the reasoning.
    _control: Option<Control>,
}

/// One of the choices of a streamed chat completion.
#[derive(Debug, Clone, Default)]
struct Choice {
    calls: usize,
    /// Log-probabilities for the next chunk.
    scores: Vec<TokenScore>,
    /// The times so far, if each chunk includes them.
    so_far: Option<SoFar>,
    /// The times of the choice, once it has ended.
    times: Option<Value>,
}

/// A chunk of a stream, or a whole response.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: Option<&'a str>,
    choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Value>,
}

/// A whole choice of a response.
#[derive(Serialize)]
struct Whole<'a> {
    index: usize,
    message: Value,
    logprobs: Option<OfChat<'a>>,
    finish_reason: &'static str,
}

/// A delta of a streamed choice.
#[derive(Serialize)]
struct More<'a> {
    index: usize,
    delta: &'a Value,
    finish_reason: Option<&'a str>,
    /// Log-probabilities: null, or left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Option<OfChat<'a>>>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: usize,
    delta: TextDelta<'a>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum TextDelta<'a> {
    Content(&'a str),
    ReasoningContent(&'a str),
}

impl Chunks {
    fn chunk<C: Serialize>(&self, choices: C) -> Chunk<'_, C> {
        Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            system_fingerprint: self.fingerprint.as_deref(),
            choices,
            // As OpenAI: null up to the chunk that tells it.
            usage: self.with_usage.then_some(&Value::Null),
            timings: {
                let choice = &self.choices[self.at];
                let so_far = choice.so_far.as_ref();
                let told = so_far.map(|so_far| so_far.told(Instant::now()));
                choice.times.clone().or(told)
            },
        }
    }

    /// The timings of a completion that has ended, if chunks report them.
    fn times_of(&self, ended: &Ended) -> Option<Value> {
        let are_told = self.choices[self.at].so_far.is_some();
        (are_told || ended.summary.promised_gap.is_some())
            .then(|| timings::of_ended(ended, ended.generated_tokens))
    }

    fn logprobs_of<'a>(&'a self, scores: &'a [TokenScore]) -> Option<OfChat<'a>> {
        let model = self.scored.as_ref()?;
        Some(OfChat::new(model, scores))
    }

    /// Writes a chunk with only text, which is the usual case.
    fn text(&self, delta: TextDelta<'_>, out: &mut String) {
        let choice = TextChoice {
            index: self.at,
            delta,
            finish_reason: None,
        };
        data_event(&self.chunk([choice]), out);
    }

    fn delta(&mut self, delta: &Value, finish: Option<&str>, out: &mut String) {
        let scores = std::mem::take(&mut self.choices[self.at].scores);
        let logprobs = self.scored.as_ref().map(|_| match scores.is_empty() {
            true => None,
            false => self.logprobs_of(&scores),
        });
        let more = More {
            index: self.at,
            delta,
            finish_reason: finish,
            logprobs,
        };
        data_event(&self.chunk([more]), out);
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, out: &mut String) {
        for at in 0..self.choices.len() {
            self.at = at;
            self.delta(&json!({"role": "assistant", "content": ""}), None, out);
        }
    }

    fn choice(&mut self, index: usize) {
        self.at = index;
    }

    fn tokens(&mut self, n: usize) {
        if let Some(so_far) = &mut self.choices[self.at].so_far {
            so_far.take(n, Instant::now());
        }
    }

    fn scores(&mut self, scores: Vec<TokenScore>) {
        // Those of text that was held back come with what is behind it.
        self.choices[self.at].scores.extend(scores);
    }

    fn unsaid(&mut self) {
        self.choices[self.at].scores.clear();
    }

    fn part(&mut self, part: Part, out: &mut String) {
        let is_scored = self.scored.is_some();
        if !matches!(part, Part::Text(_)) {
            // They are of thoughts, calls and marks: only what is said is scored.
            self.choices[self.at].scores.clear();
        }
        let delta = match part {
            Part::Text(text) if !is_scored => {
                return self.text(TextDelta::Content(&text), out);
            }
            Part::Reasoning(text) if !is_scored => {
                return self.text(TextDelta::ReasoningContent(&text), out);
            }
            Part::Text(text) => json!({"content": text}),
            Part::Reasoning(text) => json!({"reasoning_content": text}),
            Part::Call(call) => {
                let mut call = tool_call(&call);
                let choice = &mut self.choices[self.at];
                call["index"] = choice.calls.into();
                choice.calls += 1;
                json!({"tool_calls": [call]})
            }
            Part::Arguments(more) => {
                let index = self.choices[self.at].calls.saturating_sub(1);
                json!({"tool_calls": [{"index": index, "function": {"arguments": more}}]})
            }
        };
        self.delta(&delta, None, out);
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn choice_end(&mut self, ended: &Ended, out: &mut String) {
        // Of tokens that no text came of.
        self.choices[self.at].scores.clear();
        self.choices[self.at].times = self.times_of(ended);
        self.delta(&json!({}), Some(finish_reason(ended)), out);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        self.choice_end(ended, out);
        if self.with_usage {
            let last = Chunk {
                usage: Some(&usage(ended)),
                ..self.chunk([(); 0])
            };
            data_event(&last, out);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        event(None, &Dialect::OpenAi.body(failure, &self.request_id), out);
    }
}

/// The name of a field in requests of this route.
fn chat_name(field: &str) -> String {
    match field {
        "sampling.max_tokens" => "max_completion_tokens".to_owned(),
        _ => older_chat_name(field),
    }
}

/// The name of a field in errors, where the older name of `max_completion_tokens` is used.
fn older_chat_name(field: &str) -> String {
    match field {
        "logprobs" => "top_logprobs".to_owned(),
        _ => name(field),
    }
}

/// INVALID_ARGUMENT: the request has no prompt.
pub(super) fn no_prompt(field: &str) -> Failure {
    failure::invalid(field, "empty; give a text or token ids")
}
