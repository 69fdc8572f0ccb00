//! Images in requests of each dialect, to a small random model with its projector, held against
//! what the engine makes of the same images by itself.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Crc;
use flate2::write::ZlibEncoder;
use rocmforge_engine::api::{Budget, GenerateEvent, ImageSpan, SamplingParams};
use rocmforge_engine::{DeviceChoice, EngineConfig, LoadedModel, prepare_reading_images};
use rocmforge_gguf::MappedFile;
use rocmforge_hub::Hosts;
use rocmforge_proto::v1;
use rocmforge_vision::Bounds;
use rocmforged::HttpListeners;
use rocmforged::roles::Roles;
use serde_json::{Value, json};

use crate::daemon::{fixtures, greedy};
use crate::http::client::{HttpDaemon, Reply};

/// What a model without a projector is told.
const LEFT_OUT: &str = "[image left out: this model reads text only]";
const QUESTION: &str = "What is it?";
const TOKENS: usize = 12;

/// How the models of a fixture are shown an image: what their template writes, and the names of
/// control tokens that the vocabulary lacks, from number [`PAD`] on.
fn controls(name: &str) -> &'static [&'static str] {
    match name {
        "gemma3" => &["<start_of_image>", "<end_of_image>"],
        "lfm2" => &["<image>", "<|image_start|>", "<|image_end|>"],
        "gemma4" | "gemma4uv" => &["<|image|>", "<|image>", "<image|>"],
        "glm4v" => &["<|image|>"],
        "internvl" => &["<IMG_CONTEXT>", "<img>", "</img>"],
        "kimik25" => &["<|media_pad|>"],
        "muse-glimmer" => &["<|patch|>", "<|image_start|>", "<|image_end|>"],
        "mistral3" => &["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        _ => &["<|image_pad|>"],
    }
}

/// The text model that reads what a projector gives.
fn text_model(projector: &str) -> &str {
    match projector {
        "gemma4uv" => "gemma4",
        "internvl" => "qwen3moe",
        "kimik25" => "deepseek2",
        name => name,
    }
}

/// The number of a vocabulary's first token that becomes a control token.
const PAD: usize = 1195;

/// The model of a fixture with a template and with control tokens for images, which it lacks.
fn seeing(name: &str) -> Vec<u8> {
    let mut bytes =
        std::fs::read(fixtures().join(format!("arch/{}.gguf", text_model(name)))).unwrap();
    let find = |bytes: &[u8], key: &[u8]| bytes.windows(key.len()).position(|w| w == key).unwrap();
    let mut grown = 0;
    for (number, control) in (PAD..).zip(controls(name)) {
        // A control token: behind the key, the type of the value, that of the elements, their
        // number.
        let types = b"tokenizer.ggml.token_type";
        let at = find(&bytes, types) + types.len() + 16 + 4 * number;
        bytes[at..at + 4].copy_from_slice(&3_u32.to_le_bytes());
        let before = format!("[PAD{number}]");
        let at = find(&bytes, before.as_bytes());
        bytes.splice(at..at + before.len(), control.bytes());
        bytes[at - 8..at].copy_from_slice(&(control.len() as u64).to_le_bytes());
        grown += control.len() as isize - before.len() as isize;
    }
    // One more key, in front of the others, as long as leaves the tensors where they have to be.
    let text = |text: &[u8]| [&(text.len() as u64).to_le_bytes()[..], text].concat();
    let mark = controls(name)[0];
    let mut template = format!(
        "{{% for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}\
         {{% for p in m.content %}}{{% if p.type == 'image' %}}{mark}{{% else %}}{{{{ p.text }}}}{{% endif %}}\
         {{% endfor %}}{{% endif %}}<|im_end|>{{% endfor %}}{{#"
    );
    let key = text(b"tokenizer.chat_template");
    let longer = |n: usize| (key.len() + 4 + 8 + n) as isize + grown;
    while longer(template.len() + 2) % 32 != 0 {
        template.push(' ');
    }
    template.push_str("#}");
    let pair = [key, 8_u32.to_le_bytes().to_vec(), text(template.as_bytes())].concat();
    bytes.splice(24..24, pair);
    let keys = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) + 1;
    bytes[16..24].copy_from_slice(&keys.to_le_bytes());
    bytes
}

/// The ids of a prompt that begins with an image of so many rows and columns of tokens, where `n`
/// of it follow each other, and where the image's own begin.
fn prompt_of(model: &LoadedModel, [rows, columns]: [usize; 2], n: usize) -> (Vec<u32>, usize) {
    let pad = PAD as u32;
    let encode = |text: String| model.tokenizer().encode_chat(usize::MAX, &text).unwrap();
    let text = format!("{QUESTION}<|im_end|>");
    match model.tower().unwrap().model().tower().unwrap().projector {
        "gemma3" => {
            let mut ids = encode(format!("\n\n<start_of_image><end_of_image>\n\n{text}"));
            let first = ids.iter().position(|&id| id == pad).unwrap() + 1;
            ids.splice(first..first, vec![pad; rows * columns]);
            (ids, first)
        }
        "gemma4uv" | "gemma4v" => {
            let mut ids = encode(format!("<|image><|image|><image|>{text}"));
            assert_eq!(ids[..3], [pad + 1, pad, pad + 2]);
            ids.splice(1..2, vec![pad; rows * columns]);
            (ids, 1)
        }
        "internvl" => {
            let mut ids = encode(format!("<img><IMG_CONTEXT></img>{text}"));
            assert_eq!(ids[..3], [pad + 1, pad, pad + 2]);
            ids.splice(1..2, vec![pad; n * rows * columns]);
            (ids, 1)
        }
        "lfm2" => {
            let mut ids = encode(format!("<|image_start|><image><|image_end|>{text}"));
            assert_eq!(ids[..3], [pad + 1, pad, pad + 2]);
            ids.splice(1..2, vec![pad; rows * columns]);
            (ids, 1)
        }
        "muse-glimmer" => {
            let mut ids = encode(format!("<|image_start|><|patch|><|image_end|>{text}"));
            assert_eq!(ids[..3], [pad + 1, pad, pad + 2]);
            ids.splice(1..2, vec![pad; rows * columns]);
            (ids, 1)
        }
        "pixtral" => {
            let mut ids = Vec::new();
            for row in 1..=rows {
                ids.extend(vec![pad; columns]);
                ids.push(pad + if row < rows { 1 } else { 2 });
            }
            ids.extend(encode(text));
            (ids, 0)
        }
        _ => {
            let mut ids = vec![pad; rows * columns];
            ids.extend(encode(text));
            (ids, 0)
        }
    }
}

/// A PNG of a pattern.
pub(super) fn png(width: u32, height: u32) -> Vec<u8> {
    let chunk = |kind: &[u8; 4], data: &[u8]| {
        let mut crc = Crc::new();
        crc.update(kind);
        crc.update(data);
        let length = (data.len() as u32).to_be_bytes();
        [&length[..], kind, data, &crc.sum().to_be_bytes()].concat()
    };
    let mut rows = ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    for y in 0..height {
        let row = (0..width).flat_map(|x| [x * 3, y * 5, x ^ y].map(|c| c as u8));
        rows.write_all(&[0]).unwrap();
        rows.write_all(&row.collect::<Vec<_>>()).unwrap();
    }
    let size = [width.to_be_bytes(), height.to_be_bytes()].concat();
    [
        b"\x89PNG\r\n\x1a\n".to_vec(),
        chunk(b"IHDR", &[&size[..], &[8, 2, 0, 0, 0]].concat()),
        chunk(b"IDAT", &rows.finish().unwrap()),
        chunk(b"IEND", b""),
    ]
    .concat()
}

pub(super) fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

pub(super) fn url(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", base64(bytes))
}

/// A daemon with `NAME`, which reads images, and `blind`, the same file without its projector.
pub(super) struct Seeing {
    pub(super) http: HttpDaemon,
    pub(super) dir: tempfile::TempDir,
    name: &'static str,
}

impl Seeing {
    pub(super) async fn start(name: &'static str) -> Self {
        Self::start_fetching(name, Hosts::default()).await
    }

    /// One that fetches images from these hosts.
    pub(super) async fn start_fetching(name: &'static str, hosts: Hosts) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (with, without) = (dir.path().join("with"), dir.path().join("without"));
        let model = seeing(name);
        for (dir, file) in [(&with, name), (&without, "blind")] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join(format!("{file}.gguf")), &model).unwrap();
        }
        let projector = fixtures().join(format!("images/{name}-mmproj.gguf"));
        std::fs::copy(projector, with.join("mmproj-F16.gguf")).unwrap();
        let dirs = [dir.path().to_owned()];
        let listeners = HttpListeners {
            image_hosts: hosts,
            ..HttpListeners::default()
        };
        let http = HttpDaemon::start_as(&dirs, listeners, Roles::default(), Vec::new()).await;
        Self { http, dir, name }
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join(format!("with/{}.gguf", self.name))
    }

    /// A question about the parts of a message, which is to be answered greedily.
    pub(super) async fn ask(&self, model: &str, content: Value) -> Reply {
        let body = json!({
            "model": model, "temperature": 0, "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": content}],
        });
        self.http.post("/v1/chat/completions", &body).await
    }

    /// Images that towers have computed.
    pub(super) async fn images_read(&self) -> u64 {
        let metrics = self.http.get("/metrics").await.text;
        let mut lines = metrics.lines();
        let line = lines.find_map(|line| line.strip_prefix("rocmforge_images_read_total "));
        line.expect("the metric").parse::<f64>().unwrap() as u64
    }
}

/// The tokens of a prompt that begins with an image of these bytes, in how many parts the tower
/// reads it, and the engine's greedy answer.
async fn of_engine(file: &Path, image: &[u8]) -> (usize, usize, String) {
    let (engine, _thread) = rocmforge_engine::start(EngineConfig {
        device: DeviceChoice::Host,
        budget: Budget::Bytes(64 << 20),
        ..EngineConfig::default()
    })
    .unwrap();
    let open = |path: &Path| MappedFile::open(path).unwrap();
    let projector = open(&file.with_file_name("mmproj-F16.gguf"));
    let prepared = prepare_reading_images("m", open(file), projector, &mut |_| {}).unwrap();
    let model = engine.load(prepared).await.unwrap();
    let rules = model.image_rules().unwrap();
    let parts = rocmforge_vision::prepare_all(image, Bounds::default(), &rules).unwrap();
    let n = parts.len();
    let grid = parts[n - 1].grid.map(|side| side / parts[n - 1].merge);
    let (ids, first) = prompt_of(&model, grid, n);
    let tokens = ids.len();
    let request = rocmforge_engine::api::GenerateRequest {
        model: Arc::clone(&model),
        prompt: ids,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_tokens: Some(TOKENS as u32),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Default::default(),
        deadline: None,
        max_gap: None,
        asker: Default::default(),
        reuse: false,
        adapters: None,
    };
    let spans = parts.into_iter().enumerate().map(|(i, image)| ImageSpan {
        first: first + i * image.tokens(),
        image: Arc::new(image),
    });
    let mut events = engine
        .generate_with_images(request, spans.collect())
        .unwrap();
    let mut answer = String::new();
    loop {
        match events.next().await.expect("an end") {
            GenerateEvent::Piece { text, .. } => answer += &text,
            GenerateEvent::Done(_) => return (tokens, n, answer),
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
}

/// The answer to an image and a question over gRPC, and the tokens of the prompt.
async fn by_grpc(it: &Seeing, image: &[u8]) -> (String, u32) {
    use v1::content_part::Part;
    let part = |part: Part| v1::ContentPart { part: Some(part) };
    let request = v1::ChatRequest {
        model: it.name.into(),
        messages: vec![v1::ChatMessage {
            role: "user".into(),
            parts: vec![
                part(Part::Image(image.to_vec())),
                part(Part::Text(QUESTION.into())),
            ],
            ..Default::default()
        }],
        sampling: greedy(it.name, "", TOKENS as i32).sampling,
        ..Default::default()
    };
    let events = it.http.daemon.inference().chat(request).await;
    let (mut events, mut said) = (events.unwrap().into_inner(), String::new());
    while let Some(event) = events.message().await.unwrap() {
        match event.event {
            Some(v1::generate_event::Event::Piece(piece)) => said += &piece.text,
            Some(v1::generate_event::Event::Done(done)) => return (said, done.prompt_tokens),
            None => {}
        }
    }
    panic!("the stream ended without its outcome");
}

#[tokio::test]
async fn an_image_is_read_in_each_dialect_and_once() {
    for name in [
        "qwen3vl",
        "qwen35",
        "qwen2vl",
        "gemma3",
        "gemma4",
        "gemma4uv",
        "glm4v",
        "internvl",
        "kimik25",
        "lfm2",
        "mistral3",
        "muse-glimmer",
    ] {
        let it = Seeing::start(name).await;
        let image = png(64, 48);
        let (tokens, parts, expected) = of_engine(&it.file(), &image).await;
        // 64 x 48 pixels are 4 x 3 squares of two patches of 8 pixels, 8 x 6 of two patches of 4,
        // or become a larger square, or seven smaller ones.
        assert_eq!(parts, if name == "internvl" { 7 } else { 1 }, "{name}");
        assert!(tokens > 12 && !expected.is_empty(), "{tokens} {expected:?}");
        let text = json!({"type": "text", "text": QUESTION});
        let seen =
            json!({"type": "image_url", "image_url": {"url": url(&image), "detail": "high"}});
        let reply = it.ask(name, json!([seen, text])).await.json();
        let said = |reply: &Value, at: &str| reply.pointer(at).cloned().unwrap_or_default();
        assert_eq!(
            said(&reply, "/choices/0/message/content"),
            json!(expected),
            "{reply}"
        );
        assert_eq!(
            said(&reply, "/usage/prompt_tokens"),
            json!(tokens),
            "{reply}"
        );
        let options = json!({"temperature": 0, "num_predict": TOKENS});
        let source = json!({"type": "base64", "media_type": "image/png", "data": base64(&image)});
        for (route, body, text_at, tokens_at) in [
            (
                "/v1/messages",
                json!({"messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}],
                    "temperature": 0, "max_tokens": TOKENS}),
                "/content/0/text",
                "",
            ),
            (
                "/v1/responses",
                json!({"input": [{"role": "user", "content": [
                    {"type": "input_image", "image_url": url(&image)}, {"type": "input_text", "text": QUESTION}]}],
                    "temperature": 0, "max_output_tokens": TOKENS}),
                "/output/0/content/0/text",
                "/usage/input_tokens",
            ),
            (
                "/api/chat",
                json!({"messages": [{"role": "user", "content": QUESTION, "images": [base64(&image)]}],
                    "options": options, "stream": false}),
                "/message/content",
                "/prompt_eval_count",
            ),
            (
                "/api/generate",
                json!({"prompt": QUESTION, "images": [base64(&image)], "options": options, "stream": false}),
                "/response",
                "/prompt_eval_count",
            ),
        ] {
            let mut body = body;
            body["model"] = name.into();
            let reply = it.http.post(route, &body).await.json();
            assert_eq!(said(&reply, text_at), json!(expected), "{route}: {reply}");
            if !tokens_at.is_empty() {
                assert_eq!(said(&reply, tokens_at), json!(tokens), "{route}: {reply}");
            }
        }
        let (said, prompt_tokens) = by_grpc(&it, &image).await;
        assert_eq!((said, prompt_tokens as usize), (expected, tokens));
        let asked = json!({"model": name,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}]});
        let counted = it
            .http
            .post("/v1/messages/count_tokens", &asked)
            .await
            .json();
        assert_eq!(counted["input_tokens"], tokens);
        // Six answers to one image.
        assert_eq!(it.images_read().await, parts as u64, "{name}");
    }
}

#[tokio::test]
async fn images_in_results_of_tools_are_read_and_count() {
    let it = Seeing::start("qwen3vl").await;
    let image = |width, height| json!({"type": "image_url", "image_url": url(&png(width, height))});
    let count = async |content: Value| {
        let body = json!({"model": "qwen3vl", "temperature": 0, "max_tokens": 1, "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "I do."},
            {"role": "tool", "tool_call_id": "1", "content": content}]});
        let reply = it.http.post("/v1/chat/completions", &body).await.json();
        reply["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap_or_else(|| panic!("{reply}"))
    };
    let text = json!({"type": "text", "text": "shot:"});
    let alone = count(json!([text])).await;
    // 4 x 3 squares, and 10 x 2.
    assert_eq!(count(json!([text, image(64, 48)])).await, alone + 12);
    assert_eq!(
        count(json!([text, image(64, 48), image(160, 32)])).await,
        alone + 32
    );
    let source = json!({"type": "base64", "data": base64(&png(64, 48))});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [text, {"type": "image", "source": source}]});
    let asked = json!({"model": "qwen3vl", "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "text", "text": "I do."}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [result]}]});
    let counted = it
        .http
        .post("/v1/messages/count_tokens", &asked)
        .await
        .json();
    assert_eq!(counted["input_tokens"], alone + 12, "{counted}");
}

#[tokio::test]
async fn a_model_without_a_projector_is_told_in_words_as_before() {
    let it = Seeing::start("qwen3vl").await;
    let image = json!({"type": "image_url", "image_url": {"url": url(&png(64, 48))}});
    let away = json!({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}});
    let text = json!({"type": "text", "text": QUESTION});
    let rendered = async |model: &str, message: Value| {
        let body = json!({"model": model, "messages": [message]});
        it.http.post("/apply-template", &body).await.json()
    };
    let prompt = async |message: Value| rendered("blind", message).await["prompt"].clone();
    let user = |content: Value| json!({"role": "user", "content": content});
    for (message, expected) in [
        (
            user(json!([image, text])),
            format!("{LEFT_OUT}{QUESTION}<|im_end|>"),
        ),
        (
            user(json!([away, text])),
            format!("{LEFT_OUT}{QUESTION}<|im_end|>"),
        ),
        (user(json!([image])), format!("{LEFT_OUT}<|im_end|>")),
        (
            json!({"role": "user", "content": QUESTION, "images": ["AAAA", "AAAA"]}),
            format!("{QUESTION}\n{LEFT_OUT}\n{LEFT_OUT}<|im_end|>"),
        ),
    ] {
        assert_eq!(prompt(message).await, expected);
    }
    assert_eq!(it.ask("blind", json!([image, text])).await.status, 200);
    // The other one sees it.
    let seen = rendered("qwen3vl", user(json!([image, text]))).await;
    assert_eq!(
        seen["prompt"],
        format!("<|image_pad|>{QUESTION}<|im_end|>"),
        "{seen}"
    );
    // Nobody writes a placeholder into a message.
    let forged = it.ask("qwen3vl", json!("<|image_pad|>")).await;
    assert_eq!(forged.status, 200, "{forged:?}");
}

#[tokio::test]
async fn what_is_wrong_with_an_image_is_told_with_its_place() {
    let it = Seeing::start("qwen3vl").await;
    let good = png(64, 48);
    let mut huge = good.clone();
    // Of 50,000 x 50,000 pixels by its header, whose checksum is right.
    let header = [
        b"IHDR",
        &50_000_u32.to_be_bytes()[..],
        &50_000_u32.to_be_bytes(),
        &huge[24..29],
    ]
    .concat();
    let mut crc = Crc::new();
    crc.update(&header);
    huge[12..29].copy_from_slice(&header);
    huge[29..33].copy_from_slice(&crc.sum().to_be_bytes());
    let mut damaged = good.clone();
    damaged.truncate(good.len() / 2);
    for (image, words) in [
        (url(&damaged), "damaged"),
        (url(&huge), "50000 x 50000 pixels"),
        (url(b"%PDF-1.7"), "no PNG, JPEG, WebP or GIF"),
        (url(b""), "is empty"),
        ("data:image/png;base64,!!".to_owned(), "no Base64"),
        ("data:image/png,abc".to_owned(), "no Base64"),
        (
            "https://a.example/b.png".to_owned(),
            "give the image as a data: URL",
        ),
        (
            "http://169.254.169.254/".to_owned(),
            "give the image as a data: URL",
        ),
    ] {
        let part = json!({"type": "image_url", "image_url": {"url": image}});
        let content = json!([{"type": "text", "text": "a"}, part]);
        let reply = it.ask("qwen3vl", content).await;
        assert_eq!(reply.status, 400, "{words}: {reply:?}");
        let message = reply.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        let place = "messages[0].content[1]";
        assert!(message.contains(words), "{words}: {message}");
        assert!(reply.text.contains(place), "{words}: {reply:?}");
    }
    let part = json!({"type": "image_url", "image_url": {"url": url(&png(16, 16))}});
    let reply = it.ask("qwen3vl", vec![part; 65].into()).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text.contains("at most 64"), "{reply:?}");
    let body = json!({"model": "qwen3vl", "raw": true, "prompt": "a", "images": [base64(&good)]});
    let raw = it.http.post("/api/generate", &body).await;
    assert_eq!(raw.status, 400, "{raw:?}");
    assert_eq!(it.images_read().await, 0);
    let reply = it
        .ask(
            "qwen3vl",
            json!([{"type": "image_url", "image_url": url(&good)}]),
        )
        .await;
    assert_eq!(reply.status, 200, "others are served: {reply:?}");
}

#[tokio::test]
async fn images_end_where_the_room_does() {
    let it = Seeing::start("qwen3vl").await;
    // 4,096 tokens, where the context has 1,024.
    let part = json!({"type": "image_url", "image_url": {"url": url(&png(1024, 1024))}});
    let reply = it.ask("qwen3vl", json!([part])).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(
        reply.text.contains("exceeds the available context size"),
        "{reply:?}"
    );
    assert_eq!(it.images_read().await, 0);
}

#[tokio::test]
async fn it_is_told_which_models_read_images() {
    let it = Seeing::start("qwen3vl").await;
    for (model, sees) in [("qwen3vl", true), ("blind", false)] {
        let has = |list: &Value| list.as_array().unwrap().contains(&json!("vision"));
        let shown = it
            .http
            .post("/api/show", &json!({"model": model}))
            .await
            .json();
        assert_eq!(has(&shown["capabilities"]), sees, "{shown}");
        let props = it.http.get(&format!("/props?model={model}")).await.json();
        assert_eq!(props["modalities"]["vision"], sees, "{props}");
        let listed = it.http.get(&format!("/v1/models/{model}")).await.json();
        assert_eq!(has(&listed["capabilities"]), sees, "{listed}");
    }
}
