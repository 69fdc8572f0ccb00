//! A server with OpenAI's routes, as one client sees it: a connection a request.

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
pub(super) struct Server {
    address: String,
    token: Option<String>,
}

/// What a streamed response brought, each piece with the moment it came.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) pieces: Vec<Instant>,
    /// Tokens of the output by the server's own count, if it gave one.
    pub(super) tokens: Option<u64>,
}

impl Server {
    pub(super) fn new(url: &str, token: Option<&str>) -> Result<Self> {
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

    async fn get(&self, path: &str) -> Result<Bytes> {
        let response = self.send(Method::GET, path, String::new()).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(status == StatusCode::OK, "GET {path}: {status}");
        Ok(body)
    }

    /// Names of all models, in the server's order.
    pub(super) async fn models(&self) -> Result<Vec<String>> {
        let body: Value = serde_json::from_slice(&self.get("/v1/models").await?)?;
        let models = body["data"].as_array().context("/v1/models has no data")?;
        let names = models.iter().filter_map(|model| model["id"].as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// What the server has counted of its link since it started, where it counts that.
    pub(super) async fn link(&self) -> Option<Link> {
        let body = self.get("/metrics").await.ok()?;
        Link::of(&String::from_utf8_lossy(&body))
    }

    /// Sends a streamed request and reads it to its end, or to `pieces_max` pieces, after which the
    /// connection is dropped as by a client that cancels.
    pub(super) async fn stream(
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
        ensure!(
            event.get("error").is_none(),
            "in the stream: {}",
            event["error"]
        );
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.tokens = Some(tokens);
        }
        let choice = &event["choices"][0];
        let texts = [
            &choice["text"],
            &choice["delta"]["content"],
            &choice["delta"]["reasoning_content"],
        ];
        if texts
            .iter()
            .any(|text| text.as_str().is_some_and(|t| !t.is_empty()))
        {
            self.pieces.push(now);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_an_event_with_text() {
        let (mut stream, now) = (Stream::default(), Instant::now());
        for line in [
            ": comment\n",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n",
            "data: {\"choices\":[{\"text\":\"b\"}]}\r\n",
            "data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n",
            "data: [DONE]\n",
        ] {
            stream
                .take_line(line.as_bytes(), now)
                .expect("a line of a stream");
        }
        assert_eq!((stream.pieces.len(), stream.tokens), (2, Some(2)));
        let error = stream.take_line(b"data: {\"error\":{\"message\":\"full\"}}\n", now);
        assert!(
            error
                .expect_err("an error ends it")
                .to_string()
                .contains("full")
        );
    }
}
