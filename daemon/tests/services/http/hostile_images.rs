//! Images that are to do harm, images in unusual places, and images elsewhere.

use std::io::Cursor;

use flate2::Crc;
use image::{DynamicImage, ImageFormat, RgbImage};
use rocmforge_hub::Hosts;
use serde_json::{Value, json};

use super::images::{Seeing, base64, png, url};
use crate::http::client::Reply;

const FORMATS: [ImageFormat; 4] = [
    ImageFormat::Png,
    ImageFormat::Jpeg,
    ImageFormat::WebP,
    ImageFormat::Gif,
];
/// Damaged files of each format.
const DAMAGED: u32 = 1000;

fn file(format: ImageFormat) -> Vec<u8> {
    let image = RgbImage::from_fn(31, 17, |x, y| {
        image::Rgb([x * 8, y * 15, x ^ y].map(|c| c as u8))
    });
    let mut bytes = Cursor::new(Vec::new());
    DynamicImage::from(image)
        .write_to(&mut bytes, format)
        .unwrap();
    bytes.into_inner()
}

/// Numbers without a pattern.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// A file with up to eight bytes changed, and with its end cut off half of the time.
fn damaged(file: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for _ in 0..1 + numbers.below(8) {
        let at = numbers.below(bytes.len());
        bytes[at] ^= 1 + numbers.below(255) as u8;
    }
    if numbers.below(2) == 0 {
        bytes.truncate(1 + numbers.below(bytes.len()));
    }
    bytes
}

async fn show(it: &Seeing, image: &str) -> Reply {
    let body = json!({
        "model": "qwen3vl", "temperature": 0, "max_tokens": 1,
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}],
    });
    it.http.post("/v1/chat/completions", &body).await
}

/// Bytes that are reserved for images.
async fn reserved(it: &Seeing) -> f64 {
    let metrics = it.http.get("/metrics").await.text;
    let mut lines = metrics.lines();
    let line = lines.find_map(|line| line.strip_prefix("rocmforge_image_memory_bytes "));
    line.expect("the metric").parse().unwrap()
}

#[tokio::test]
async fn a_thousand_damaged_images_of_each_format_disturb_nobody() {
    let it = Seeing::start("qwen3vl").await;
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for format in FORMATS {
        let whole = file(format);
        let mut refused = 0;
        for n in 0..DAMAGED {
            let reply = show(&it, &url(&damaged(&whole, &mut numbers))).await;
            match reply.status {
                200 => {}
                400 => {
                    refused += 1;
                    let place = reply.text.contains("messages[0].content[0]");
                    assert!(place, "{format:?} {n}: {reply:?}");
                }
                _ => panic!("{format:?} {n}: {reply:?}"),
            }
        }
        assert!(refused > DAMAGED / 20, "{format:?}: {refused}");
        let reply = show(&it, &url(&whole)).await;
        assert_eq!(reply.status, 200, "{format:?}: {reply:?}");
    }
    assert_eq!(reserved(&it).await, 0.0);
}

/// A PNG whose header says this size.
fn png_of(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = png(16, 16);
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let mut crc = Crc::new();
    crc.update(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.sum().to_be_bytes());
    bytes
}

#[tokio::test]
async fn an_image_that_needs_more_memory_than_a_client_has_is_refused_before_it_is_decoded() {
    let it = Seeing::start("qwen3vl").await;
    // 20 million pixels, in a shape of few tokens.
    let bomb = png_of(14_000, 1400);
    let body = |detail: &str| {
        json!({"model": "qwen3vl", "max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url(&bomb), "detail": detail}}]}]})
    };
    let reply = it.http.post("/v1/chat/completions", &body("high")).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(
        reply.text.contains("exceeds the available context"),
        "{reply:?}"
    );
    let reply = it.http.post("/v1/chat/completions", &body("low")).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(reply.text.contains("raise image_memory"), "{reply:?}");
    let reply = it.http.post("/v1/chat/completions", &body("tiny")).await;
    assert!(reply.text.contains("none of auto, low, high"), "{reply:?}");
    assert_eq!(reserved(&it).await, 0.0);
    assert_eq!(show(&it, &url(&png(64, 48))).await.status, 200);
}

#[tokio::test]
async fn what_a_data_url_calls_an_image_does_not_count() {
    let it = Seeing::start("qwen3vl").await;
    let data = base64(&png(64, 48));
    for kind in ["image/jpeg", "text/html", "", "image/svg+xml;charset=x"] {
        let reply = show(&it, &format!("data:{kind};base64,{data}")).await;
        assert_eq!(reply.status, 200, "{kind}: {reply:?}");
    }
    let svg = base64(b"<svg xmlns='http://www.w3.org/2000/svg'/>");
    let reply = show(&it, &format!("data:image/png;base64,{svg}")).await;
    assert!(
        reply.text.contains("no PNG, JPEG, WebP or GIF"),
        "{reply:?}"
    );
}

/// Tokens that a conversation has in Anthropic's words.
async fn count(it: &Seeing, body: Value) -> Value {
    let mut body = body;
    body["model"] = "qwen3vl".into();
    let reply = it.http.post("/v1/messages/count_tokens", &body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json()["input_tokens"].clone()
}

fn block(image: &[u8]) -> Value {
    let source = json!({"type": "base64", "media_type": "image/png", "data": base64(image)});
    json!({"type": "image", "source": source})
}

#[tokio::test]
async fn images_of_a_system_prompt_are_shown_with_the_first_message() {
    let it = Seeing::start("qwen3vl").await;
    let image = block(&png(64, 48));
    let text = json!({"type": "text", "text": "You see."});
    let user = json!([{"role": "user", "content": "What?"}]);
    let with =
        json!({"system": [text, image], "messages": user, "max_tokens": 4, "temperature": 0});
    let without = json!({"system": [text], "messages": user});
    let beside = json!({"system": [text], "max_tokens": 4, "temperature": 0, "messages": [
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]});
    let alone = count(&it, without).await.as_u64().unwrap();
    assert_eq!(count(&it, with.clone()).await, alone + 12);
    let answer = async |mut body: Value| {
        body["model"] = "qwen3vl".into();
        let reply = it.http.post("/v1/messages", &body).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()["content"].clone()
    };
    assert_eq!(answer(with).await, answer(beside).await);
    assert_eq!(it.images_read().await, 1);
}

#[tokio::test]
async fn low_detail_is_512_by_512_pixels_at_most() {
    let it = Seeing::start("qwen3vl").await;
    let image = png(1024, 1024);
    let tokens = async |detail: Value| {
        let mut block = block(&image);
        block["detail"] = detail;
        let user = json!({"role": "user", "content": [block]});
        count(&it, json!({"messages": [user]}))
            .await
            .as_u64()
            .unwrap()
    };
    let whole = tokens(Value::Null).await;
    assert_eq!(tokens(json!("high")).await, whole);
    assert_eq!(tokens(json!("auto")).await, whole);
    // 64 x 64 squares of 16 pixels, and 32 x 32.
    assert_eq!(tokens(json!("low")).await, whole - 4096 + 1024);
}

#[tokio::test]
async fn a_conversation_with_images_is_shortened_from_its_beginning() {
    let it = Seeing::start("qwen3vl").await;
    // 400 tokens each, where the context has 1,024.
    let turn = |width: u32| json!({"role": "user", "content": "Look.", "images": [base64(&png(width, 320))]});
    let said = json!({"role": "assistant", "content": "I do."});
    let body = json!({"model": "qwen3vl", "stream": false, "options": {"temperature": 0, "num_predict": 2},
        "messages": [turn(320), said, turn(336), said, turn(304)]});
    let reply = it.http.post("/api/chat", &body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let tokens = reply.json()["prompt_eval_count"].as_u64().unwrap();
    assert!((800..1024).contains(&tokens), "{tokens}");
    assert_eq!(it.images_read().await, 2);
    assert_eq!(reserved(&it).await, 0.0);
}

#[tokio::test]
async fn images_elsewhere_are_fetched_from_public_addresses_of_listed_hosts_alone() {
    let all = Hosts::new(&["*".to_owned()]).unwrap();
    let it = Seeing::start_fetching("qwen3vl", all).await;
    for host in [
        "127.0.0.1",
        "127.0.0.1:1",
        "169.254.169.254",
        "[::1]",
        "localhost",
        "10.1.2.3",
    ] {
        let reply = show(&it, &format!("http://{host}/a.png")).await;
        assert_eq!(reply.status, 400, "{host}: {reply:?}");
        assert!(
            // Of names it is not told whether they lead elsewhere or nowhere.
            reply.text.contains("public address"),
            "{host}: {reply:?}"
        );
        assert!(reply.text.contains("messages[0].content[0]"), "{reply:?}");
    }
    let by_url = json!({"type": "image", "source": {"type": "url", "url": "https://localhost/a"}});
    let asked = json!({"model": "qwen3vl", "max_tokens": 1, "messages": [{"role": "user", "content": [by_url]}]});
    for route in ["/v1/messages", "/v1/messages/count_tokens"] {
        let reply = it.http.post(route, &asked).await;
        assert_eq!(reply.status, 400, "{route}: {reply:?}");
        assert!(
            // Of names it is not told whether they lead elsewhere or nowhere.
            reply.text.contains("public address"),
            "{route}: {reply:?}"
        );
    }
    let listed = Hosts::new(&["images.example".to_owned()]).unwrap();
    let it = Seeing::start_fetching("qwen3vl", listed).await;
    let reply = show(&it, "https://other.example/a.png").await;
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(reply.text.contains("image_url_hosts"), "{reply:?}");
    assert_eq!(reserved(&it).await, 0.0);
}
