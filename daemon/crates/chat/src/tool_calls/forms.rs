//! Formats of tool calls and reasoning in models' outputs, recognized by texts in their chat
//! templates.
//!
//! | template has | models | what stands between the marks |
//! |---|---|---|
//! | `<tool_call>` | Qwen, Hermes, GLM, Nemotron 3, Granite 4, Laguna | JSON, `<function=` or `<arg_key>` |
//! | `<seed:tool_call>` | Seed-OSS | `<function=` |
//! | `<|tool_call>` | Gemma 4 | `call:f{a:<|"|>text<|"|>,b:1}` |
//! | `[TOOL_CALLS]` | Mistral | a JSON list, or `f[ARGS]{...}` |
//! | `<|tool_calls_section_begin|>` | Kimi K2 | `functions.f:0` and JSON, marked each |
//! | `<｜tool▁calls▁begin｜>` | DeepSeek V3, R1, V3.1 | names and JSON, marked each |
//! | `<｜DSML｜` | DeepSeek V3.2 | `invoke` and `parameter` |
//! | `<minimax:tool_call>` | MiniMax M2 | `invoke` and `parameter` |
//! | `<|START_ACTION|>` | Cohere's Command R7B, Command A | a JSON list with `tool_name` |
//! | `<|tool_call_start|>`, or `List of tools: ` | LFM2 | `[f(a=1)]` |
//! | `<TOOLCALL>` | Nemotron Nano 2 | a JSON list |
//! | `<tool_calls>` | Hunyuan, Apriel | a JSON list |
//! | `<|tool_call|>` | Granite 3, Phi 4 mini | a JSON list |
//! | `<|function_call|>` | GigaChat 3.1 | JSON |
//! | `<|python_tag|>`, or its words for JSON | Llama 3 | JSON with `parameters`, from the answer's beginning |
//!
//! Messages of gpt-oss and Muse Glimmer have headers instead: [`Headers`].

use rocmforge_tokenizer::Tokenizer;
use serde_json::Value;

use super::gemma::gemma;
use super::heads::Heads;
use super::hermes::{self, parse};
use super::json::{json_call, json_calls};
use super::marked::{deepseek, kimi, mistral};
use super::pieces::{Notation, Pieces};
use super::tagged::invokes;
use super::{ToolCall, python, texts};

/// A format of tool calls.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Mark that opens one or several calls. If empty, a call is the whole output.
    pub open: &'static str,
    /// Mark that closes the calls. If empty, they end with the output.
    pub close: &'static str,
    /// Parses the calls between the marks, given the tools; `None` if they are none.
    pub(crate) parse: fn(&str, &[Value]) -> Option<Vec<ToolCall>>,
    /// How calls are streamed as they come.
    pub(crate) pieces: Pieces,
    /// Whether calls may be in tags, whose last value ends with the text: a cut call looks
    /// complete.
    pub(crate) in_tags: bool,
    /// Texts of which a template of this format contains at least one.
    signs: &'static [&'static str],
}

/// The format of calls between `<tool_call>` and `</tool_call>`.
pub(crate) const HERMES: Form = Form {
    open: hermes::OPEN,
    close: hermes::CLOSE,
    parse,
    pieces: Pieces::Tags,
    in_tags: true,
    signs: &[hermes::OPEN],
};

/// All formats; the first one with a sign in the template is used.
const FORMS: [Form; 15] = [
    Form {
        open: "<|tool_call>",
        close: "<tool_call|>",
        parse: gemma,
        pieces: Pieces::Written(Notation::Gemma),
        in_tags: false,
        signs: &["<|tool_call>"],
    },
    Form {
        open: "<|tool_calls_section_begin|>",
        close: "<|tool_calls_section_end|>",
        parse: kimi,
        pieces: Pieces::Text(Heads::Kimi),
        in_tags: false,
        signs: &["<|tool_calls_section_begin|>"],
    },
    Form {
        open: "<｜DSML｜function_calls>",
        close: "</｜DSML｜function_calls>",
        parse: |block, tools| invokes(block, "｜DSML｜", tools),
        pieces: Pieces::Written(Notation::Invokes("｜DSML｜")),
        in_tags: true,
        signs: &["｜DSML｜"],
    },
    Form {
        open: "<｜tool▁calls▁begin｜>",
        close: "<｜tool▁calls▁end｜>",
        parse: deepseek,
        pieces: Pieces::Text(Heads::DeepSeek),
        in_tags: false,
        signs: &["<｜tool▁calls▁begin｜>"],
    },
    Form {
        open: "<minimax:tool_call>",
        close: "</minimax:tool_call>",
        parse: |block, tools| invokes(block, "", tools),
        pieces: Pieces::Written(Notation::Invokes("")),
        in_tags: true,
        signs: &["<minimax:tool_call>"],
    },
    Form {
        open: "<seed:tool_call>",
        close: "</seed:tool_call>",
        parse,
        pieces: Pieces::Tags,
        in_tags: true,
        signs: &["<seed:tool_call>"],
    },
    Form {
        open: "<|START_ACTION|>",
        close: "<|END_ACTION|>",
        parse: json_calls,
        pieces: Pieces::Text(Heads::Objects),
        in_tags: false,
        signs: &["<|START_ACTION|>"],
    },
    Form {
        open: "<|tool_call_start|>",
        close: "<|tool_call_end|>",
        parse: |block, tools| python::calls(block).or_else(|| json_calls(block, tools)),
        pieces: Pieces::Written(Notation::Python),
        in_tags: false,
        // Some of its templates list tools and leave calls to what the model has learnt.
        signs: &["<|tool_call_start|>", "List of tools: "],
    },
    Form {
        open: "<TOOLCALL>",
        close: "</TOOLCALL>",
        parse: json_calls,
        pieces: Pieces::Text(Heads::Objects),
        in_tags: false,
        signs: &["<TOOLCALL>"],
    },
    HERMES,
    Form {
        open: "<tool_calls>",
        close: "</tool_calls>",
        parse: json_calls,
        pieces: Pieces::Text(Heads::Objects),
        in_tags: false,
        signs: &["<tool_calls>"],
    },
    Form {
        open: "[TOOL_CALLS]",
        close: "",
        parse: mistral,
        pieces: Pieces::Text(Heads::Mistral),
        in_tags: false,
        signs: &["[TOOL_CALLS]"],
    },
    Form {
        open: "<|tool_call|>",
        close: "",
        parse: |block, tools| {
            json_calls(block.trim_end().trim_end_matches("<|/tool_call|>"), tools)
        },
        pieces: Pieces::Text(Heads::Objects),
        in_tags: false,
        signs: &["<|tool_call|>"],
    },
    Form {
        open: "<|function_call|>",
        close: "",
        parse: json_calls,
        pieces: Pieces::Text(Heads::Objects),
        in_tags: false,
        signs: &["<|function_call|>"],
    },
    Form {
        open: "",
        close: "",
        parse: llama,
        pieces: Pieces::None,
        in_tags: false,
        // Templates of the small ones describe the JSON alone.
        signs: &[
            "<|python_tag|>",
            "\"parameters\": dictionary of argument name and its value",
        ],
    },
];

/// The format of calls for a template's models.
pub(crate) fn of(source: &str) -> Option<Form> {
    let has = |form: &Form| form.signs.iter().any(|sign| source.contains(sign));
    FORMS.into_iter().find(has)
}

/// Formats of message headers, for outputs that are several messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Headers {
    /// gpt-oss: a header names a channel, and the tool that is called.
    Channels,
    /// Muse Glimmer: a header names the recipient, which is the model itself, the user, or a tool.
    Recipients,
}

impl Headers {
    /// The header format of a template's models, if they use headers.
    pub fn of(source: &str) -> Option<Self> {
        let has = |mark: &str| source.contains(mark);
        match has("<|message|>") {
            true if has("<|channel|>") => Some(Self::Channels),
            true if has("<atem:function_calls>") => Some(Self::Recipients),
            _ => None,
        }
    }
}

/// Whether tool calls of a template's models can be parsed.
pub fn reads(source: &str) -> bool {
    of(source).is_some() || Headers::of(source).is_some()
}

/// Whether a template's models reason in marks that can be parsed.
pub fn thinks(source: &str) -> bool {
    Thinking::of(source).is_some() || Headers::of(source).is_some()
}

/// Whether a template has a switch for reasoning.
pub fn has_thinking_switch(source: &str) -> bool {
    source.contains("enable_thinking")
}

/// Whether an output begins without reasoning if that is switched off: the model has none, the
/// template has a switch, or the prompt has closed it.
pub fn keeps_from_thinking(source: &str, tail: &str) -> bool {
    let is_closed = || Thinking::of(source).is_some_and(|t| tail.ends_with(t.close));
    !thinks(source) || has_thinking_switch(source) || is_closed()
}

/// The marks around reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Thinking {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

impl Thinking {
    const ALL: [Self; 5] = [
        Self {
            open: "<|channel>thought",
            close: "<channel|>",
        },
        Self {
            open: "[THINK]",
            close: "[/THINK]",
        },
        Self {
            open: "<seed:think>",
            close: "</seed:think>",
        },
        Self {
            open: "<|START_THINKING|>",
            close: "<|END_THINKING|>",
        },
        Self {
            open: "<think>",
            close: "</think>",
        },
    ];

    /// The reasoning marks that a prompt ending in `tail` has opened.
    pub(crate) fn opened_by(tail: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|thinking| tail.ends_with(thinking.open))
    }

    /// The reasoning marks of a template.
    pub(crate) fn of(source: &str) -> Option<Self> {
        let has = |thinking: &Self| source.contains(thinking.close);
        Self::ALL.into_iter().find(has)
    }
}

/// The marks around all text of an output, in families that have such; they are not part of the
/// text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

impl Frame {
    const ALL: [Self; 3] = [
        // Command R7B and Command A.
        Self {
            open: "<|START_RESPONSE|>",
            close: "<|END_RESPONSE|>",
        },
        // Cohere's later ones.
        Self {
            open: "<|START_TEXT|>",
            close: "<|END_TEXT|>",
        },
        // Hunyuan.
        Self {
            open: "<answer>",
            close: "</answer>",
        },
    ];

    /// The frame of a template's outputs.
    pub(crate) fn of(source: &str) -> Option<Self> {
        let has = |frame: &Self| source.contains(frame.open);
        Self::ALL.into_iter().find(has)
    }
}

/// Whether marks of a template are control tokens, which have no text unless requested.
pub fn are_control_tokens(source: &str, with_tools: bool, tokenizer: &Tokenizer) -> bool {
    let is_control = |mark: &str| {
        let ids = tokenizer.encode(mark, false, true).unwrap_or_default();
        matches!(ids.as_slice(), [first, ..] if tokenizer.is_special(*first))
    };
    if Headers::of(source).is_some() {
        return is_control("<|message|>");
    }
    let form = of(source).filter(|_| with_tools);
    form.is_some_and(|form| !form.open.is_empty() && is_control(form.open))
        || Thinking::of(source).is_some_and(|thinking| is_control(thinking.close))
        || Frame::of(source).is_some_and(|frame| is_control(frame.close))
}

/// Whether text between marks may be the beginning of a call, rather than prose about calls: a
/// bracket, a mark, or the name of a tool.
pub(crate) fn may_begin_call(text: &str, tools: &[Value]) -> bool {
    const GEMMA: &str = "call:";
    let text = text.trim_start();
    if GEMMA.starts_with(text) {
        return true;
    }
    let text = text.strip_prefix(GEMMA).unwrap_or(text);
    let end = text.find(|c: char| c.is_whitespace() || "<[({".contains(c));
    let is_whole = end.is_some();
    let word = &text[..end.unwrap_or(text.len())];
    let mut names = tools
        .iter()
        .filter_map(|tool| tool["function"]["name"].as_str());
    word.is_empty() || names.any(|name| name == word || !is_whole && name.starts_with(word))
}

/// Parses Llama 3's calls: JSON with `parameters`, with or without a mark, several separated by
/// semicolons.
fn llama(block: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let known = |call: &ToolCall| {
        tools
            .iter()
            .any(|tool| tool["function"]["name"] == *call.name)
    };
    let block = block.trim().trim_start_matches("<|python_tag|>").trim();
    if block.starts_with('[')
        && let Some(calls) = python::calls(block)
    {
        return calls.iter().all(known).then_some(calls);
    }
    let mut calls = Vec::new();
    let block = texts::escaped(block);
    let mut rest = &*block;
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = values.next()?.ok()?;
        rest = rest[values.byte_offset()..]
            .trim_start()
            .trim_start_matches(';')
            .trim_start();
        calls.push(json_call(&value)?);
    }
    (!calls.is_empty() && calls.iter().all(known)).then_some(calls)
}
