//! `POST /api/generate`: continues a prompt, with the model's template unless it is `raw` or the
//! model has none.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::infill::Gap;
use rocmforge_chat::parts::Part;
use rocmforge_chat::prompt::Prompt;
use rocmforge_chat::tool_calls::Tools;
use rocmforge_engine::api::TokenScore;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::answers::{Ended, Generation};
use rocmforge_tokenizer::{ChatTemplate, Content, Ending, Message, TemplateOrigin};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer};
use super::super::error::Dialect;
use super::super::format;
use super::super::llama::native;
use super::super::picture::Said;
use super::super::prompt::{beside_images, model_name, with_images};
use super::super::reply::{Events, stream};
use super::super::sampling::{refuse_unsupported, says_something, whole_number};
use super::super::start::{self, Continuation, Conversation};
use super::chat::only_the_model;
use super::keep_alive::{self, KeepAlives, Using};
use super::logprobs::{self, Logprobs};
use super::{NDJSON, Options, counts, line, merge, name, thinking, time};

#[derive(Debug, Deserialize)]
struct GenerateRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    prompt: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
    stream: Option<bool>,
    #[serde(default)]
    options: Option<Options>,
    think: Option<Value>,
    keep_alive: Option<Value>,
    format: Option<Value>,
    images: Option<Vec<Value>>,
    /// Text after the gap to fill.
    suffix: Option<String>,
    logprobs: Option<bool>,
    #[serde(default, deserialize_with = "whole_number")]
    top_logprobs: Option<i64>,
    // Refused where they ask for anything.
    template: Option<Value>,
    context: Option<Value>,
}

impl GenerateRequest {
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        const LATER: &str = "not implemented; leave it unset";
        const CONTEXT: &str = "earlier turns are not kept here; use /api/chat with all messages";
        refuse_unsupported(&[
            ("template", says_something(self.template.as_ref()), LATER),
            ("context", says_something(self.context.as_ref()), CONTEXT),
        ])
    }
}

/// Handler of `POST /api/generate`.
pub(in super::super) async fn generate(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /api/generate", &request);
    let result = complete(&call, &http.keep_alives, request).await;
    call.respond(result)
}

async fn complete(
    call: &Call,
    keep_alives: &Arc<KeepAlives>,
    request: Request,
) -> Result<Response, Failure> {
    let mut asked: GenerateRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    let keep = keep_alive::read(asked.keep_alive.as_ref())?;
    let mut lines = Lines {
        model: asked.model.clone(),
        request_id: call.id.as_str().to_owned(),
        logprobs: Logprobs::default(),
        using: None,
    };
    let text = asked.prompt.as_deref().unwrap_or_default();
    if text.is_empty() {
        let done = only_the_model(call, keep_alives, &asked.model, keep).await?;
        let mut last = lines.line("");
        merge(&mut last, done);
        return answer(&last);
    }
    asked.refuse_unsupported()?;
    let images = asked.images.unwrap_or_default();
    let said = Said::from(Content::Text(text.to_owned()));
    let said = with_images(said, &images, |at| format!("images[{at}]"));
    let text = beside_images(text, images.len());
    let options = asked.options.unwrap_or_default();
    options.refuse_unsupported()?;
    let mut violations = Violations::named(name);
    let (mut sampling, n_ctx) = options.fields(&mut violations);
    sampling.decoding.logprobs = logprobs::wanted(asked.logprobs, asked.top_logprobs);
    sampling.decoding.format = format::of_ollama(asked.format)?;
    let system = asked.system.filter(|text| !text.is_empty());
    // What the system says needs a template, be it a default; a prompt goes on without one.
    let is_raw = asked.raw == Some(true)
        || system.is_none() && !has_own_template(call, &asked.model).await?;
    let suffix = asked.suffix.filter(|text| !text.is_empty());
    let generation = if is_raw || suffix.is_some() {
        if !images.is_empty() {
            refuse_images(call, &asked.model).await?;
        }
        let continuation = Continuation {
            prompt: before(call, &asked.model, text, suffix).await?,
            model: asked.model,
            sampling,
            n_ctx,
            choices: 1,
            field: "prompt",
        };
        start::text(call, continuation, violations).await?
    } else {
        let conversation = Conversation {
            model: asked.model,
            messages: messages(system, said),
            tools: Tools::default(),
            kwargs: thinking(asked.think.as_ref()),
            documents: Vec::new(),
            ending: Ending::Answer,
            is_quiet: false,
            sampling,
            n_ctx,
            choices: 1,
            field: "prompt",
        };
        start::chat(call, conversation, violations).await?
    };
    let model = generation.model();
    lines.using = model.map(|model| keep_alives.begin(model.name(), keep));
    lines.logprobs = Logprobs::by(model);
    match asked.stream {
        Some(false) => answered(generation, lines).await,
        _ => stream(generation, lines, call).await,
    }
}

/// Whether a model's file carries a chat template.
async fn has_own_template(call: &Call, model: &str) -> Result<bool, Failure> {
    let has_own = |template: &ChatTemplate| template.origin() != TemplateOrigin::Default;
    Ok(call.model(model).await?.template().is_some_and(has_own))
}

/// Rejects images with a prompt that uses no template, for a model that reads images.
async fn refuse_images(call: &Call, model: &str) -> Result<(), Failure> {
    if call.model(model).await?.tower().is_none() {
        return Ok(());
    }
    let message = "a prompt that goes through no chat template has no place for images; \
                   leave raw and suffix unset, or use /api/chat";
    Err(failure::invalid("images", message))
}

/// The prompt for a text without template, or for the gap before a suffix.
async fn before(
    call: &Call,
    model: &str,
    text: String,
    suffix: Option<String>,
) -> Result<Prompt, Failure> {
    let Some(suffix) = suffix else {
        return Ok(Prompt::Text {
            text,
            add_special: true,
            parse_special: true,
        });
    };
    let gap = Gap {
        prefix: text,
        suffix,
        others: Vec::new(),
    };
    native::around(call, model, gap, "suffix").await
}

/// The system and user messages of a request.
fn messages(system: Option<String>, said: Said) -> Vec<Message> {
    let system = system.map(|text| Message::new("system", text));
    let user = Message {
        role: "user".to_owned(),
        content: said.content,
        seen: said.seen,
        ..Message::default()
    };
    system.into_iter().chain([user]).collect()
}

/// Responds with the whole output of a generation.
async fn answered(generation: Generation, mut lines: Lines) -> Result<Response, Failure> {
    let (parts, mut ended) = generation.collect().await?;
    lines.logprobs.take(std::mem::take(&mut ended.scores));
    let mut whole = whole(&lines, parts);
    merge(&mut whole, counts(&ended));
    answer(&lines.logprobs.beside(whole))
}

/// The fields of a response with these parts.
fn whole(lines: &Lines, parts: Vec<Part>) -> Value {
    let (mut response, mut thought) = (String::new(), String::new());
    for part in parts {
        match part {
            Part::Text(text) => response.push_str(&text),
            Part::Reasoning(text) => thought.push_str(&text),
            Part::Call(_) | Part::Arguments(_) => {}
        }
    }
    let mut whole = lines.line(&response);
    if !thought.is_empty() {
        whole["thinking"] = thought.into();
    }
    whole["done"] = true.into();
    whole
}

/// Writer of the lines of a stream.
#[derive(Debug)]
struct Lines {
    model: String,
    request_id: String,
    logprobs: Logprobs,
    /// Marks the model as in use until the stream ends.
    using: Option<Using>,
}

impl Lines {
    fn line(&self, response: &str) -> Value {
        json!({
            "model": self.model,
            "created_at": time::now(),
            "response": response,
            "done": false,
        })
    }

    fn tell_nothing(&mut self, out: &mut String) {
        let line = self.line("");
        self.logprobs.line(line, out);
    }
}

impl Events for Lines {
    const CONTENT_TYPE: &'static str = NDJSON;

    fn begin(&mut self, _: &mut String) {}

    fn scores(&mut self, scores: Vec<TokenScore>) {
        // Those of marks, and of text that was held back, come with what is behind them.
        self.logprobs.take(scores);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        let value = match part {
            Part::Text(text) => self.line(&text),
            Part::Reasoning(text) => {
                let mut value = self.line("");
                value["thinking"] = text.into();
                value
            }
            Part::Call(_) | Part::Arguments(_) => return,
        };
        self.logprobs.line(value, out);
    }

    fn heartbeat(&mut self, out: &mut String) {
        self.tell_nothing(out);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        let mut last = self.line("");
        last["done"] = true.into();
        merge(&mut last, counts(ended));
        self.logprobs.line(last, out);
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        line(&Dialect::Ollama.body(failure, &self.request_id), out);
    }
}
