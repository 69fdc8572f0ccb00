//! Traces in the shape of those that programs send, made of random words.
//!
//! What matters for a prefix cache is kept: which texts come first and stay, which change with
//! every request, how long they are, what runs beside what. What they say is ours. Instructions
//! and tools are as long as Claude Code 2.1.332, Codex 0.169 and OpenCode 1.18 sent them to
//! `tests/node/record.mjs`; results of tools are 60 to 2,000 words, evenly over the logarithm.

use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::trace::{CHAT, Entry, MESSAGES, RESPONSES};
use crate::zoo::load::WORDS;

/// Values of `--shape`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Shape {
    /// A coding agent over /v1/messages: a header that changes with every request, many tools, two
    /// dispatches of subagents.
    Messages,
    /// A coding agent over /v1/responses: two sessions, the second with the first one's
    /// instructions.
    Responses,
    /// A coding agent over /v1/chat/completions: a title beside the first turn, subagents with the
    /// same instructions.
    Chat,
    /// One long prompt with many questions: one of them alone, then all at once on another prompt.
    Fleet,
}

/// How large a shape is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Of the words that programs have.
    pub(super) scale: f64,
    pub(super) turns: Option<u16>,
    pub(super) together: Option<u16>,
}

/// A trace of a shape; the same for the same seed.
pub(super) fn entries(shape: Shape, sizes: Sizes, seed: u64) -> Vec<Entry> {
    let mut writer = Writer {
        rng: StdRng::seed_from_u64(seed),
        sizes,
        entries: Vec::new(),
    };
    match shape {
        Shape::Messages => writer.messages(),
        Shape::Responses => writer.responses(),
        Shape::Chat => writer.chat(),
        Shape::Fleet => writer.fleet(),
    }
    writer.entries
}

/// Writes a trace.
struct Writer {
    rng: StdRng,
    sizes: Sizes,
    entries: Vec<Entry>,
}

/// A conversation of a dialect: what all of its requests have, and what has been said.
#[derive(Clone)]
struct Talk {
    group: &'static str,
    route: &'static str,
    /// The body without what was said.
    fixed: Value,
    /// The field that has what was said.
    field: &'static str,
    said: Vec<Value>,
    /// Whether a header that changes with every request comes first.
    billed: bool,
    /// The last request.
    last: Vec<String>,
}

/// A call of a tool and its result.
struct Called {
    name: String,
    arguments: Value,
    result: String,
}

impl Writer {
    fn words(&mut self, n: u32) -> String {
        let n = (f64::from(n) * self.sizes.scale).round().max(3.0) as u32;
        let words = (0..n).map(|_| WORDS[self.rng.random_range(0..WORDS.len())]);
        let words: Vec<&str> = words.collect();
        let lines: Vec<String> = words.chunks(12).map(|line| line.join(" ")).collect();
        lines.join(".\n")
    }

    /// So many words, evenly over the logarithm of a range.
    fn about(&mut self, least: u32, most: u32) -> String {
        let (low, high) = (f64::from(least).ln(), f64::from(most).ln());
        let n = (low + (high - low) * self.rng.random::<f64>()).exp();
        self.words(n.round() as u32)
    }

    fn turns(&self, usual: u16) -> u16 {
        self.sizes.turns.unwrap_or(usual)
    }

    /// Tools: a name, a description and the schema of the arguments.
    fn tools(&mut self, n: usize, words: u32) -> Vec<(String, String, Value)> {
        (0..n)
            .map(|i| {
                let name = format!("{}_{i}", WORDS[i % WORDS.len()]);
                let properties: serde_json::Map<String, Value> = ["path", "text", "limit"]
                    .into_iter()
                    .map(|key| {
                        let about =
                            json!({"type": "string", "description": self.words(words / 10)});
                        (key.to_owned(), about)
                    })
                    .collect();
                let schema =
                    json!({"type": "object", "properties": properties, "required": ["path"]});
                (name, self.words(words), schema)
            })
            .collect()
    }

    fn call(&mut self, name: &str, least: u32, most: u32) -> Called {
        Called {
            name: name.to_owned(),
            arguments: json!({"path": self.words(4), "text": self.about(4, 60)}),
            result: self.about(least, most),
        }
    }

    /// Sends what was said as a request that comes after the conversation's last ones.
    fn ask(&mut self, talk: &mut Talk, output_max: u32) {
        let id = format!("{}-{}", talk.group, self.entries.len());
        let mut body = talk.fixed.clone();
        body[talk.field] = talk.said.clone().into();
        if talk.billed {
            mark_last(&mut body[talk.field]);
            let header = format!(
                "x-anthropic-billing-header: cc_version=2.1.0; cch={:08x};",
                self.rng.random::<u32>()
            );
            body["system"][0]["text"] = header.into();
        }
        let limit = match talk.route {
            RESPONSES => "max_output_tokens",
            _ => "max_tokens",
        };
        body[limit] = output_max.into();
        self.entries.push(Entry {
            id: id.clone(),
            after: std::mem::replace(&mut talk.last, vec![id]),
            delay_ms: 0,
            group: talk.group.to_owned(),
            route: talk.route.to_owned(),
            body,
        });
    }

    /// The model says something and calls tools; their results are what is said next.
    fn answered(&mut self, talk: &mut Talk, calls: &[Called]) {
        let text = self.about(10, 60);
        let ids: Vec<String> = calls
            .iter()
            .map(|_| format!("call_{:012x}", self.rng.random::<u64>() >> 16))
            .collect();
        let calls = || calls.iter().zip(&ids);
        match talk.route {
            MESSAGES => {
                let mut blocks = vec![json!({"type": "text", "text": text})];
                blocks.extend(calls().map(|(c, id)| {
                    json!({"type": "tool_use", "id": id, "name": c.name, "input": c.arguments})
                }));
                talk.said
                    .push(json!({"role": "assistant", "content": blocks}));
                let results = calls().map(|(c, id)| {
                    json!({"type": "tool_result", "tool_use_id": id, "content": c.result})
                });
                let results: Vec<Value> = results.collect();
                talk.said.push(json!({"role": "user", "content": results}));
            }
            RESPONSES => {
                talk.said.push(json!({
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": text}],
                }));
                talk.said.extend(calls().map(|(c, id)| {
                    let arguments = c.arguments.to_string();
                    json!({"type": "function_call", "call_id": id, "name": c.name, "arguments": arguments})
                }));
                talk.said.extend(calls().map(|(c, id)| {
                    json!({"type": "function_call_output", "call_id": id, "output": c.result})
                }));
            }
            _ => {
                let made = calls().map(|(c, id)| {
                    let function = json!({"name": c.name, "arguments": c.arguments.to_string()});
                    json!({"id": id, "type": "function", "function": function})
                });
                let made: Vec<Value> = made.collect();
                talk.said
                    .push(json!({"role": "assistant", "content": text, "tool_calls": made}));
                talk.said.extend(calls().map(
                    |(c, id)| json!({"role": "tool", "tool_call_id": id, "content": c.result}),
                ));
            }
        }
    }

    /// So many turns, each with one call of a tool.
    fn turns_of(&mut self, talk: &mut Talk, n: u16, tools: &[&str]) {
        for _ in 0..n {
            let name = tools[self.rng.random_range(0..tools.len())];
            let called = self.call(name, 60, 2000);
            self.answered(talk, &[called]);
            self.ask(talk, 400);
        }
    }

    /// A conversation over `/v1/messages`, with these words of instructions.
    fn messages_talk(&mut self, group: &'static str, words: u32, tools: &[Value]) -> Talk {
        let introduction = self.words(12);
        let system = self.words(words);
        Talk {
            group,
            route: MESSAGES,
            fixed: json!({
                "system": [
                    {"type": "text", "text": ""},
                    {"type": "text", "text": introduction},
                    {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}},
                ],
                "tools": tools,
            }),
            field: "messages",
            said: Vec::new(),
            billed: true,
            last: Vec::new(),
        }
    }

    fn messages(&mut self) {
        let tools = self.tools(12, 270).into_iter();
        let tools: Vec<Value> = tools
            .map(|(name, description, schema)| {
                json!({"name": name, "description": description, "input_schema": schema})
            })
            .collect();
        let mut title = self.messages_talk("title", 120, &[]);
        let task = self.words(60);
        title.said.push(json!({"role": "user", "content": task}));
        self.ask(&mut title, 60);

        let mut main = self.messages_talk("main", 1100, &tools);
        let notes = format!(
            "<system-reminder>\n{}\n</system-reminder>",
            self.words(1200)
        );
        main.said.push(json!({"role": "user", "content": [
            {"type": "text", "text": notes},
            {"type": "text", "text": task},
        ]}));
        let around = self.words(250);
        main.said.push(json!({"role": "system", "content": around}));
        self.ask(&mut main, 400);
        let agent = self.messages_talk("subagents", 530, &tools[1..8]);
        let turns = self.turns(20);
        for part in 0..2 {
            self.turns_of(&mut main, turns / 3, &["river_0", "stone_1", "window_2"]);
            self.dispatch(&mut main, &agent, part);
        }
        self.turns_of(&mut main, turns - turns / 3 * 2, &["river_0", "garden_3"]);
    }

    /// The main conversation calls for subagents, which begin together, and goes on with what
    /// they found.
    fn dispatch(&mut self, main: &mut Talk, agent: &Talk, part: usize) {
        let n = self.sizes.together.unwrap_or(16);
        let calls: Vec<Called> = (0..n).map(|_| self.call("letter_4", 80, 300)).collect();
        let (around, kinds) = (self.words(1200), self.words(250));
        let mut ended = Vec::new();
        for call in &calls {
            let mut agent = agent.clone();
            agent.last = main.last.clone();
            let task = format!("{part}: {} {}", call.arguments["path"], self.about(80, 300));
            agent.said.push(json!({"role": "user", "content": task}));
            agent
                .said
                .push(json!({"role": "system", "content": around}));
            self.ask(&mut agent, 400);
            // What may be dispatched is said to it behind its first results.
            let called = self.call("river_0", 60, 2000);
            self.answered(&mut agent, &[called]);
            agent.said.push(json!({"role": "system", "content": kinds}));
            self.ask(&mut agent, 400);
            let turns = self.rng.random_range(1..4);
            self.turns_of(&mut agent, turns, &["river_0", "stone_1"]);
            ended.extend(agent.last);
        }
        main.last = ended;
        self.answered(main, &calls);
        self.ask(main, 400);
    }

    fn responses(&mut self) {
        let tools = self.tools(9, 190).into_iter();
        let tools: Vec<Value> = tools
            .map(|(name, description, schema)| {
                json!({"type": "function", "name": name, "description": description,
                    "strict": false, "parameters": schema})
            })
            .collect();
        let fixed = json!({
            "instructions": self.words(100),
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": true,
            "store": false,
        });
        let input = |role: &str, text: String| {
            json!({"type": "message", "role": role,
                "content": [{"type": "input_text", "text": text}]})
        };
        let rules = self.words(3000);
        let mut last = Vec::new();
        for session in ["first", "second"] {
            let around = format!("<environment_context>\n{}\n</environment_context>", session);
            let mut talk = Talk {
                group: session,
                route: RESPONSES,
                fixed: fixed.clone(),
                field: "input",
                said: vec![
                    input("developer", rules.clone()),
                    input("user", around),
                    input("user", self.words(80)),
                ],
                billed: false,
                last,
            };
            self.ask(&mut talk, 400);
            let turns = self.turns(24);
            self.turns_of(&mut talk, turns, &["river_0", "river_0", "stone_1"]);
            last = talk.last;
        }
    }

    fn chat(&mut self) {
        let tools = self.tools(10, 205).into_iter();
        let tools: Vec<Value> = tools
            .map(|(name, description, parameters)| {
                json!({"type": "function", "function":
                    {"name": name, "description": description, "parameters": parameters}})
            })
            .collect();
        let talk = |group, system: String, tools: &[Value]| Talk {
            group,
            route: CHAT,
            fixed: match tools {
                [] => json!({}),
                _ => json!({"tools": tools, "tool_choice": "auto"}),
            },
            field: "messages",
            said: vec![json!({"role": "system", "content": system})],
            billed: false,
            last: Vec::new(),
        };
        let task = self.words(60);
        let mut title = talk("title", self.words(300), &[]);
        title.said.push(json!({"role": "user", "content": task}));
        self.ask(&mut title, 60);
        let system = self.words(1500);
        let mut main = talk("main", system.clone(), &tools);
        main.said.push(json!({"role": "user", "content": task}));
        self.ask(&mut main, 400);
        let turns = self.turns(24);
        self.turns_of(&mut main, turns / 2, &["river_0", "stone_1", "window_2"]);

        // Subagents have the same instructions, but not the tool that dispatches them.
        let n = self.sizes.together.unwrap_or(4);
        let calls: Vec<Called> = (0..n).map(|_| self.call("letter_4", 80, 300)).collect();
        let mut ended = Vec::new();
        for _ in 0..n {
            let mut agent = talk("subagents", system.clone(), &tools[..9]);
            agent.last = main.last.clone();
            let task = self.words(120);
            agent.said.push(json!({"role": "user", "content": task}));
            self.ask(&mut agent, 400);
            self.turns_of(&mut agent, turns / 6, &["river_0", "stone_1"]);
            ended.extend(agent.last);
        }
        main.last = ended;
        self.answered(&mut main, &calls);
        self.ask(&mut main, 400);
        self.turns_of(&mut main, turns - turns / 2, &["river_0", "garden_3"]);
    }

    fn fleet(&mut self) {
        let n = self.sizes.together.unwrap_or(32);
        let mut last = Vec::new();
        for (group, n) in [("alone", 1), ("together", n)] {
            let text = self.words(26_000);
            let before = std::mem::take(&mut last);
            for i in 0..n {
                let question = format!("{text}\n\n{i}: {}", self.words(12));
                let mut talk = Talk {
                    group,
                    route: CHAT,
                    fixed: json!({}),
                    field: "messages",
                    said: vec![json!({"role": "user", "content": question})],
                    billed: false,
                    last: before.clone(),
                };
                self.ask(&mut talk, 16);
                last.extend(talk.last);
            }
        }
    }
}

/// Marks the last message as the end of what is to be cached, as programs do: its content is a list
/// then, and was or will be a text in other requests.
fn mark_last(said: &mut Value) {
    let Some(last) = said.as_array_mut().and_then(|said| said.last_mut()) else {
        return;
    };
    if let Some(text) = last["content"].as_str().map(str::to_owned) {
        last["content"] = json!([{"type": "text", "text": text}]);
    }
    let blocks = last["content"].as_array_mut();
    if let Some(block) = blocks.and_then(|blocks| blocks.last_mut()) {
        block["cache_control"] = json!({"type": "ephemeral"});
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn small(shape: Shape) -> Vec<Entry> {
        let sizes = Sizes {
            scale: 0.02,
            turns: Some(6),
            together: Some(3),
        };
        entries(shape, sizes, 7)
    }

    #[test]
    fn a_shape_is_the_same_for_the_same_seed() {
        for shape in Shape::value_variants() {
            let texts = || -> Vec<String> {
                let entries = small(*shape);
                entries.iter().map(|e| e.body.to_string()).collect()
            };
            assert_eq!(texts(), texts(), "{shape:?}");
        }
    }

    /// What a message says, without the form of it.
    fn text_of(message: &Value) -> String {
        let blocks = message["content"].as_array().cloned().unwrap_or_default();
        let texts = blocks.iter().map(|block| {
            let text = [&block["text"], &block["content"]];
            text.into_iter().find_map(Value::as_str).unwrap_or_default()
        });
        let text = texts.collect::<String>();
        message["content"].as_str().map_or(text, str::to_owned)
    }

    /// A turn says what the one before it said, and more; only the header changes.
    #[test]
    fn a_turn_goes_on_from_the_one_before_it() {
        for shape in [Shape::Messages, Shape::Responses, Shape::Chat] {
            let entries = small(shape);
            let by_id: HashMap<&str, &Entry> = entries.iter().map(|e| (e.id.as_str(), e)).collect();
            let mut compared = 0;
            for entry in &entries {
                let field = match entry.route.as_str() {
                    RESPONSES => "input",
                    _ => "messages",
                };
                for before in entry.after.iter().map(|id| by_id[id.as_str()]) {
                    if before.group != entry.group {
                        continue;
                    }
                    let said = |e: &Entry| e.body[field].as_array().cloned().unwrap_or_default();
                    let (now, then) = (said(entry), said(before));
                    let last = then.len() - 1;
                    assert_eq!(now[..last], then[..last], "{}", entry.id);
                    assert_eq!(text_of(&now[last]), text_of(&then[last]), "{}", entry.id);
                    assert_eq!(entry.body["tools"], before.body["tools"]);
                    let headers = [entry, before].map(|e| e.body["system"][0]["text"].clone());
                    assert_eq!(headers[0] != headers[1], shape == Shape::Messages);
                    compared += 1;
                }
            }
            assert!(compared > 5, "{shape:?}");
        }
    }
}
