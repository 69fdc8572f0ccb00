//! Conversations over gRPC: parts, tools and their results, thinking, what templates are told,
//! answers that are gone on with, and several at once.

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::daemon::{Daemon, assert_status, fixtures, greedy};
use crate::http::client::HttpDaemon;

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
/// Shows all that a template can be told.
const ALL: &str = "{% for t in tools or [] %}[{{ t.function.name }}:{{ t.function.parameters|tojson }}]{% endfor %}\
    {% for m in messages %}<{{ m.role }}>{{ m.content }}|{{ m.reasoning_content }}|{{ m.name }}|{{ m.tool_call_id }}|\
    {% for c in m.tool_calls or [] %}({{ c.id }},{{ c.function.name }},{{ c.function.arguments.city }}){% endfor %}\
    {% endfor %}{{ mood }}{% if add_generation_prompt %}<answer>{% endif %}{# <tool_call> #}";
/// A template whose models think, and write calls as JSON.
const THINKER: &str = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}\
    {% if add_generation_prompt %}<think>{% endif %}{# </think> <tool_call> #}";

/// A model of the fixtures in the daemon's folder that has another template, of any length: what
/// its place has beside is a comment, and grows by what data is aligned to.
fn taught(daemon: &Daemon, name: &str, template: &str) -> String {
    const KEY: &[u8] = b"tokenizer.chat_template";
    let mut bytes = std::fs::read(fixtures().join("tiny-qwen3-Q8_0.gguf")).unwrap();
    let at = bytes.windows(KEY.len()).position(|w| w == KEY).unwrap() + KEY.len() + 4;
    let length: [u8; 8] = bytes[at..at + 8].try_into().unwrap();
    let before = u64::from_le_bytes(length) as usize;
    let mut room = before;
    while room < template.len() + 4 {
        room += 32;
    }
    let text = format!("{template}{{#{}#}}", " ".repeat(room - template.len() - 4));
    let value = (room as u64).to_le_bytes().into_iter().chain(text.bytes());
    drop(bytes.splice(at..at + 8 + before, value));
    let file = format!("{name}.gguf");
    std::fs::write(daemon.dir.path().join(&file), bytes).unwrap();
    file
}

fn said(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    }
}

fn weather() -> v1::Tool {
    let schema = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Graz"]}},
        "required": ["city"],
        "additionalProperties": false,
    });
    v1::Tool {
        name: "weather".into(),
        description: "Tells it.".into(),
        parameters: schema.to_string(),
    }
}

fn asked(model: &str, messages: &[v1::ChatMessage]) -> v1::ChatRequest {
    v1::ChatRequest {
        model: model.into(),
        messages: messages.to_vec(),
        sampling: greedy(model, "", 60).sampling,
        ..Default::default()
    }
}

/// What an answer came to.
#[derive(Debug, Default, Clone, PartialEq)]
struct Answer {
    text: String,
    reasoning: String,
    calls: Vec<v1::ToolCall>,
    ids: Vec<u32>,
    done: Option<v1::GenerateDone>,
}

async fn read(
    mut events: tonic::Streaming<v1::GenerateEvent>,
    n: usize,
) -> Result<Vec<Answer>, Status> {
    let mut answers = vec![Answer::default(); n];
    let mut open = n;
    while let Some(event) = events.message().await? {
        match event.event.unwrap() {
            v1::generate_event::Event::Piece(piece) => {
                let answer = &mut answers[piece.choice as usize];
                answer.text.push_str(&piece.text);
                answer.reasoning.push_str(&piece.reasoning);
                answer.calls.extend(piece.tool_calls);
                answer.ids.extend(piece.token_ids);
            }
            v1::generate_event::Event::Done(done) => {
                open -= 1;
                assert_eq!(done.others_go_on, open > 0);
                let answer = &mut answers[done.choice as usize];
                assert!(answer.done.replace(done).is_none());
            }
        }
    }
    assert_eq!(open, 0);
    Ok(answers)
}

async fn chat(daemon: &Daemon, request: v1::ChatRequest) -> Result<Answer, Status> {
    let events = daemon.inference().chat(request).await?.into_inner();
    Ok(read(events, 1).await?.swap_remove(0))
}

async fn render(daemon: &Daemon, request: v1::ChatRequest) -> Result<v1::RenderResponse, Status> {
    daemon
        .inference()
        .render(request)
        .await
        .map(|r| r.into_inner())
}

#[tokio::test]
async fn a_template_is_told_all_that_a_conversation_says() {
    let http = HttpDaemon::start().await;
    let daemon = &http.daemon;
    daemon
        .load(taught(daemon, "all", ALL), "all")
        .await
        .unwrap();
    let part = |text: &str| v1::ContentPart {
        part: Some(v1::content_part::Part::Text(text.into())),
    };
    let messages = [
        v1::ChatMessage {
            parts: vec![part("How is"), part("Bern?")],
            name: "Ann".into(),
            ..said("user", "")
        },
        v1::ChatMessage {
            reasoning: "I look.".into(),
            tool_calls: vec![v1::ToolCall {
                id: "c1".into(),
                name: "weather".into(),
                arguments: r#"{"city":"Bern"}"#.into(),
            }],
            ..said("assistant", "")
        },
        v1::ChatMessage {
            tool_call_id: "c1".into(),
            ..said("tool", "Rain")
        },
    ];
    let mut request = asked("all", &messages);
    request.tools = vec![weather()];
    request.template_args = r#"{"mood": "gay", "messages": []}"#.into();
    let rendered = render(daemon, request.clone()).await.unwrap();
    let got = &rendered.text;
    assert!(got.starts_with("[weather:{"), "{got}");
    assert!(got.contains("Bern?||Ann||<assistant>"), "{got}");
    assert!(
        got.contains("|I look.|||(c1,weather,Bern)<tool>Rain"),
        "{got}"
    );
    assert!(got.ends_with("|c1|gay<answer>"), "{got}");
    let text = v1::TokenizeRequest {
        model: "all".into(),
        text: rendered.text.clone(),
        ..Default::default()
    };
    let ids = daemon
        .inference()
        .tokenize(text)
        .await
        .unwrap()
        .into_inner()
        .ids;
    assert_eq!(rendered.ids, ids);

    // Left out where tools are not to be called, and the last message left open.
    request.tool_mode = v1::ToolMode::None.into();
    let without = render(daemon, request.clone()).await.unwrap().text;
    assert!(without.starts_with("<user>"), "{without}");
    let mut open = asked("all", &[said("user", "Hi"), said("assistant", "I am")]);
    open.continue_last = true;
    let open = render(daemon, open).await.unwrap().text;
    assert!(open.ends_with("<assistant>I am"), "{open}");
    let over_http = json!({
        "model": "all", "continue_final_message": true, "chat_template_kwargs": {"mood": "x"},
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}],
    });
    let reply = http.post("/apply-template", &over_http).await;
    assert_eq!(reply.json()["prompt"], open, "{reply:?}");
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_message_is_gone_on_with_as_a_prompt_would_be() {
    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let mut request = asked(
        "m",
        &[
            said("user", "Tell me a story."),
            said("assistant", "Once upon"),
        ],
    );
    request.continue_last = true;
    let rendered = render(&daemon, request.clone()).await.unwrap();
    assert!(rendered.text.ends_with("Once upon"), "{}", rendered.text);
    let answer = chat(&daemon, request).await.unwrap();
    let plain = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::Tokens(v1::TokenIds {
            ids: rendered.ids,
        })),
        ..greedy("m", "", 60)
    };
    let (text, _) = daemon.generate(plain).await.unwrap();
    assert_eq!(answer.text, text);
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn calls_and_thoughts_are_told_from_the_text() {
    let daemon = Daemon::start().await;
    let file = taught(&daemon, "thinks", THINKER);
    daemon.load(file, "thinks").await.unwrap();
    let question = || {
        let mut request = asked("thinks", &[said("user", "Tell me a story.")]);
        request.sampling.get_or_insert_default().min_tokens = Some(8);
        request
    };
    // The template has opened the thinking, which does not end by itself here.
    let thought = chat(&daemon, question()).await.unwrap();
    assert!(
        thought.text.is_empty() && !thought.reasoning.is_empty(),
        "{thought:?}"
    );
    let mut plain = question();
    plain.unparsed = true;
    let plain = chat(&daemon, plain).await.unwrap();
    assert!(plain.text.starts_with(&thought.reasoning) || plain.text.contains(&thought.reasoning));
    assert_eq!(plain.ids, thought.ids);

    let caller = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}{# <tool_call> #}";
    daemon
        .load(taught(&daemon, "calls", caller), "calls")
        .await
        .unwrap();
    let mut forced = asked("calls", &[said("user", "Tell me a story.")]);
    forced.tools = vec![weather()];
    forced.tool_mode = v1::ToolMode::Required.into();
    forced.single_tool_call = true;
    for name in ["", "weather"] {
        forced.tool_name = name.into();
        let answer = chat(&daemon, forced.clone()).await.unwrap();
        assert!(answer.text.is_empty(), "{answer:?}");
        let [call] = answer.calls.as_slice() else {
            panic!("{answer:?}")
        };
        assert_eq!(call.name, "weather");
        assert!(call.id.starts_with("call_"), "{call:?}");
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        let city = arguments["city"].as_str().unwrap();
        assert!(["Bern", "Graz"].contains(&city), "{arguments}");
        assert_eq!(answer.done.unwrap().tool_calls, 1);
    }
    forced.unparsed = true;
    let plain = chat(&daemon, forced).await.unwrap();
    assert!(
        plain.text.contains("<tool_call>") && plain.calls.is_empty(),
        "{plain:?}"
    );
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn several_answers_share_a_prompt_and_are_those_of_their_seeds() {
    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let mut request = greedy("m", "Once upon a time", 20);
    let sampling = request.sampling.get_or_insert_default();
    (sampling.temperature, sampling.seed) = (Some(1.5), Some(7));
    let alone = |i: u64| {
        let mut request = request.clone();
        request.sampling.get_or_insert_default().seed = Some(7 + i);
        daemon.generate(request)
    };
    let mut together = request.clone();
    together.n = Some(3);
    let events = daemon.inference().generate(together).await.unwrap();
    let answers = read(events.into_inner(), 3).await.unwrap();
    for (i, answer) in (0..).zip(&answers) {
        let (text, done) = alone(i).await.unwrap();
        assert_eq!(answer.text, text);
        let told = answer.done.as_ref().unwrap();
        assert_eq!(
            (told.seed, told.generated_tokens),
            (7 + i, done.generated_tokens)
        );
    }
    assert_ne!(answers[0].text, answers[1].text);

    let mut chat = asked("m", &[said("user", "Hello")]);
    chat.n = Some(2);
    let events = daemon.inference().chat(chat).await.unwrap().into_inner();
    let answers = read(events, 2).await.unwrap();
    assert_eq!(answers[0].text, answers[1].text, "they are greedy");
    for n in [0, 9, -1] {
        let mut request = greedy("m", "x", 1);
        request.n = Some(n);
        assert_status(
            daemon.generate(request).await,
            Code::InvalidArgument,
            &["n", "from 1 to 8"],
        );
    }
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn what_a_conversation_cannot_say_is_refused_by_its_field() {
    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let fine = asked("m", &[said("user", "Hi")]);
    let with = |change: &dyn Fn(&mut v1::ChatRequest)| {
        let mut request = fine.clone();
        change(&mut request);
        request
    };
    let tool = |name: &str, parameters: &str| v1::Tool {
        name: name.into(),
        parameters: parameters.into(),
        ..Default::default()
    };
    for (request, field) in [
        (with(&|r| r.template_args = "[1]".into()), "template_args"),
        (with(&|r| r.template_args = "{".into()), "template_args"),
        (with(&|r| r.continue_last = true), "messages"),
        (
            with(&|r| r.messages[0].parts = vec![v1::ContentPart::default()]),
            "messages[0].parts",
        ),
        (
            with(&|r| r.tools = vec![tool("", "")]),
            "tools[0].function.name",
        ),
        (
            with(&|r| r.tools = vec![tool("f", "5")]),
            "tools[0].parameters",
        ),
        (
            with(&|r| r.tools = vec![tool("f", "{")]),
            "tools[0].parameters",
        ),
        (with(&|r| r.tool_mode = 9), "tool_mode"),
        (with(&|r| r.tool_name = "f".into()), "tool_name"),
        (
            with(&|r| r.tool_mode = v1::ToolMode::Required.into()),
            "tool_mode",
        ),
    ] {
        assert_status(
            chat(&daemon, request).await,
            Code::InvalidArgument,
            &[field],
        );
    }
    // Its template writes no calls.
    let tools = with(&|r| r.tools = vec![tool("f", "")]);
    assert_status(chat(&daemon, tools).await, Code::Unimplemented, &["tools"]);
    assert!(chat(&daemon, fine).await.is_ok());
    assert_eq!(daemon.stop().await, End::Drained);
}
