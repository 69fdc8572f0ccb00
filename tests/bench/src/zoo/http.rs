//! A server with OpenAI's or Anthropic's routes, as one client sees it: a connection a request.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;

use super::link::Link;

/// Longest wait for a response's head, and for the next piece of its body.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// Where requests go.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    address: String,
    token: Option<String>,
}

/// What a streamed response brought, each piece with the moment it came.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) pieces: Vec<Instant>,
    /// The server's own counts, if it gave them.
    pub(crate) usage: Option<Usage>,
}

/// Tokens of a request by the server's own count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Of the prompt, cached ones included.
    pub(crate) prompt: u64,
    /// Those of the prompt that were not computed.
    pub(crate) cached: u64,
    pub(crate) output: u64,
}

impl Server {
    pub(crate) fn new(url: &str, token: Option<&str>) -> Result<Self> {
        let address = url.strip_prefix("http://").context(
            "--url begins with http:// (measure without TLS, on the machine of the server)",
        )?;
        let address = address.trim_end_matches('/');
        ensure!(
            address.contains(':') && !address.contains('/'),
            "--url is http://HOST:PORT"
        );
        Ok(Self {
            address: address.to_owned(),
            token: token.map(|token| format!("Bearer {token}")),
        })
    }

    async fn send(&self, method: Method, path: &str, body: String) -> Result<Response<Incoming>> {
        let stream = tokio::net::TcpStream::connect(&self.address)
            .await
            .with_context(|| format!("connecting to {}", self.address))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.address)
            .header(CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.body(Full::new(Bytes::from(body)))?;
        tokio::time::timeout(SILENCE_MAX, sender.send_request(request))
            .await
            .context("no response")?
            .context("the request failed")
    }

    /// Sends a request and reads its JSON.
    pub(crate) async fn post(&self, path: &str, body: String) -> Result<Value> {
        let response = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(
            status == StatusCode::OK,
            "POST {path}: {status}: {}",
            String::from_utf8_lossy(&body).trim()
        );
        serde_json::from_slice(&body).with_context(|| format!("POST {path}"))
    }

    async fn get(&self, path: &str) -> Result<Bytes> {
        let response = self.send(Method::GET, path, String::new()).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(status == StatusCode::OK, "GET {path}: {status}");
        Ok(body)
    }

    /// Names of all models, in the server's order.
    pub(crate) async fn models(&self) -> Result<Vec<String>> {
        let body: Value = serde_json::from_slice(&self.get("/v1/models").await?)?;
        let models = body["data"].as_array().context("/v1/models has no data")?;
        let names = models.iter().filter_map(|model| model["id"].as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// The value of a metric without labels, where the server has it.
    pub(crate) async fn metric(&self, name: &str) -> Option<u64> {
        let body = self.get("/metrics").await.ok()?;
        let text = String::from_utf8_lossy(&body);
        let values = text.lines().filter_map(|line| line.split_once(' '));
        let mut values = values.filter(|(metric, _)| *metric == name);
        values.next()?.1.trim().parse().ok()
    }

    /// What the server has counted of its link since it started, where it counts that.
    pub(super) async fn link(&self) -> Option<Link> {
        let body = self.get("/metrics").await.ok()?;
        Link::of(&String::from_utf8_lossy(&body))
    }

    /// Sends a streamed request and reads it to its end, or to `pieces_max` pieces, after which the
    /// connection is dropped as by a client that cancels.
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: String,
        pieces_max: Option<usize>,
    ) -> Result<Stream> {
        let response = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let mut body = response.into_body();
        if status != StatusCode::OK {
            let text = body.collect().await?.to_bytes();
            bail!("{status}: {}", String::from_utf8_lossy(&text).trim());
        }
        let (mut stream, mut lines) = (Stream::default(), Vec::new());
        while let Some(frame) = tokio::time::timeout(SILENCE_MAX, body.frame())
            .await
            .context("the stream is silent")?
        {
            let now = Instant::now();
            let Ok(data) = frame?.into_data() else {
                continue;
            };
            lines.extend_from_slice(&data);
            while let Some(end) = lines.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = lines.drain(..=end).collect();
                stream.take_line(&line, now)?;
            }
            if pieces_max.is_some_and(|most| stream.pieces.len() >= most) {
                break;
            }
        }
        Ok(stream)
    }
}

impl Stream {
    /// Takes in one line of server-sent events.
    fn take_line(&mut self, line: &[u8], now: Instant) -> Result<()> {
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_slice(data).context("an event that is not JSON")?;
        let failed = [&event["error"], &event["response"]["error"]];
        if let Some(error) = failed.into_iter().find(|error| !error.is_null()) {
            bail!("in the stream: {error}");
        }
        self.usage = Usage::of(&event).or(self.usage);
        if is_piece(&event) {
            self.pieces.push(now);
        }
        Ok(())
    }
}

/// Whether an event brings some of the output: text, reasoning or a call.
fn is_piece(event: &Value) -> bool {
    if let Some(kind) = event["type"].as_str() {
        // Anthropic's events, and those of OpenAI's responses.
        return kind == "content_block_delta" || kind.ends_with(".delta");
    }
    let choice = &event["choices"][0];
    let texts = [
        &choice["text"],
        &choice["delta"]["content"],
        &choice["delta"]["reasoning_content"],
    ];
    let is_text = |text: &Value| text.as_str().is_some_and(|t| !t.is_empty());
    texts.into_iter().any(is_text) || choice["delta"]["tool_calls"].is_array()
}

impl Usage {
    /// What the last event of a stream says, in any of the dialects.
    fn of(event: &Value) -> Option<Self> {
        let usage = [&event["usage"], &event["response"]["usage"]];
        let usage = usage.into_iter().find(|usage| usage.is_object())?;
        let count = |names: &[&str]| names.iter().find_map(|name| usage.pointer(name)?.as_u64());
        // Anthropic's input is without what was cached.
        let beside = count(&["/cache_read_input_tokens"]);
        let within = count(&[
            "/prompt_tokens_details/cached_tokens",
            "/input_tokens_details/cached_tokens",
        ]);
        Some(Self {
            prompt: count(&["/prompt_tokens", "/input_tokens"])? + beside.unwrap_or(0),
            cached: beside.or(within).unwrap_or(0),
            output: count(&["/completion_tokens", "/output_tokens"])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&str]) -> Result<Stream> {
        let (mut stream, now) = (Stream::default(), Instant::now());
        for line in lines {
            stream.take_line(line.as_bytes(), now)?;
        }
        Ok(stream)
    }

    #[test]
    fn a_piece_is_an_event_with_output_in_any_dialect() {
        let usage = |prompt, cached, output| {
            Some(Usage {
                prompt,
                cached,
                output,
            })
        };
        let chat = read(&[
            ": comment\n",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n",
            "data: {\"choices\":[{\"text\":\"b\"}]}\r\n",
            "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n",
            "data: [DONE]\n",
        ]);
        let chat = chat.expect("a stream of chat completions");
        assert_eq!((chat.pieces.len(), chat.usage), (3, usage(9, 0, 2)));
        let messages = read(&[
            "event: message_start\n",
            "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":50}}}\n",
            "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n",
            "data: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":18,\
             \"cache_read_input_tokens\":32,\"output_tokens\":1}}\n",
        ]);
        let messages = messages.expect("a stream of messages");
        assert_eq!(
            (messages.pieces.len(), messages.usage),
            (1, usage(50, 32, 1))
        );
        let responses = read(&[
            "data: {\"type\":\"response.created\",\"response\":{\"error\":null,\"usage\":null}}\n",
            "data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n",
            "data: {\"type\":\"response.completed\",\"response\":{\"error\":null,\"usage\":{\
             \"input_tokens\":40,\"input_tokens_details\":{\"cached_tokens\":32},\
             \"output_tokens\":1}}}\n",
        ]);
        let responses = responses.expect("a stream of responses");
        assert_eq!(
            (responses.pieces.len(), responses.usage),
            (1, usage(40, 32, 1))
        );
    }

    #[test]
    fn an_error_ends_a_stream() {
        for line in [
            "data: {\"error\":{\"message\":\"full\"}}\n",
            "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"message\":\"full\"}}}\n",
        ] {
            let error = read(&[line]).expect_err("an error ends it");
            assert!(error.to_string().contains("full"), "{error}");
        }
    }
}
