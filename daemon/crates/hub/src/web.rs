//! Requests to hubs: over TLS with the system's certificates, led on within bounds, and tried again
//! where that helps.
//!
//! *Invariants* (tests in `faults_tests.rs`): the token goes to the hub's own scheme, host and port
//! alone; nobody is led from https to http, nor over http to another host; each wait has an end.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;

use crate::Token;
use crate::error::Error;
use crate::redirect::led;
use crate::source::without_query;

/// Times that a request is led on.
const REDIRECTS_MAX: usize = 6;
/// Longest JSON answer.
const JSON_MAX: usize = 16 << 20;
/// Header in which a hub gives the checksum of a file that it redirects to.
pub(crate) const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");

/// Time limits of requests and pauses between tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Time limit to connect.
    pub connect: Duration,
    /// For the head of an answer, and for [`Patience::least_bytes`] of its body.
    pub stall: Duration,
    /// Bytes that have to come within [`Patience::stall`].
    pub least_bytes: u64,
    /// Before the second try; each further one waits twice as long.
    pub first_wait: Duration,
    /// Between two tries.
    pub longest_wait: Duration,
    /// Tries in a row that bring nothing.
    pub tries: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            connect: Duration::from_secs(15),
            stall: Duration::from_secs(30),
            least_bytes: 16 << 10,
            first_wait: Duration::from_secs(1),
            longest_wait: Duration::from_secs(60),
            tries: 6,
        }
    }
}

/// What went wrong with one try.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A fault for which another try may help, after at least this time if the server gives one.
    Passing(Error, Option<Duration>),
    /// A fault for which another try will not help.
    Lasting(Error),
}

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Ask<'a> {
    pub(crate) url: &'a Uri,
    pub(crate) accept: &'static str,
    /// Bytes, first and one behind the last.
    pub(crate) range: Option<(u64, u64)>,
    /// ETag for `If-Range`: the range is sent only if the file still has it, else the whole file.
    pub(crate) if_range: Option<&'a str>,
    /// Name of the requested thing, for errors.
    pub(crate) what: &'a str,
}

/// An answer, where requests are led to.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) response: Response<Incoming>,
    /// The host that answered after all redirects.
    pub(crate) host: String,
    /// The file's checksum in the hub's own response, before it redirected.
    pub(crate) linked_etag: Option<String>,
}

/// The way to the hubs.
#[derive(Debug, Clone)]
pub(crate) struct Web {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    /// Why there are no root certificates.
    no_roots: Option<String>,
    /// The token, and whom it is for.
    token: Option<(Uri, Token)>,
    pub(crate) patience: Patience,
}

impl Web {
    /// Reads the system's certificates. Blocks on the file system.
    pub(crate) fn new(token: Option<(Uri, Token)>, patience: Patience) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(patience.connect));
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(Duration::from_secs(60)));
        let (config, no_roots) = match tls_config() {
            Ok(config) => (config, None),
            Err(why) => {
                // http alone works then.
                let empty = rustls::ClientConfig::builder_with_provider(provider());
                let empty = empty.with_protocol_versions(&[&rustls::version::TLS13]);
                let empty = empty.map(|builder| {
                    let roots = rustls::RootCertStore::empty();
                    builder.with_root_certificates(roots).with_no_client_auth()
                });
                match empty {
                    Ok(config) => (config, Some(why)),
                    // The provider has TLS 1.3.
                    Err(error) => unreachable!("{error}"),
                }
            }
        };
        let connector = HttpsConnectorBuilder::new().with_tls_config(config);
        let connector = connector.https_or_http().enable_http1().wrap_connector(tcp);
        let mut client = Client::builder(TokioExecutor::new());
        client
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_timer(hyper_util::rt::TokioTimer::new());
        Web {
            client: client.build(connector),
            no_roots,
            token,
            patience,
        }
    }

    /// Asks once; follows where it is led.
    pub(crate) async fn ask(&self, ask: &Ask<'_>) -> Result<Answer, Fault> {
        let mut url = ask.url.clone();
        let mut linked_etag = None;
        for _ in 0..=REDIRECTS_MAX {
            let response = self.ask_at(&url, ask).await?;
            if linked_etag.is_none() {
                linked_etag = text_of(response.headers(), &LINKED_ETAG).map(bare_etag);
            }
            let status = response.status();
            let host = host_of(&url);
            if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return check(response, host, linked_etag, ask.what);
            }
            let to = text_of(response.headers(), &header::LOCATION).unwrap_or_default();
            url = led(&url, &to).map_err(Fault::Lasting)?;
        }
        Err(Fault::Lasting(Error::Redirect {
            host: host_of(ask.url),
            to: without_query(&url),
            why: "and so on without an end; check the hub's address",
        }))
    }

    async fn ask_at(&self, url: &Uri, ask: &Ask<'_>) -> Result<Response<Incoming>, Fault> {
        let host = host_of(url);
        if let (Some("https"), Some(why)) = (url.scheme_str(), &self.no_roots) {
            let why = format!(
                "no certificates of authorities ({why}); install ca-certificates, or set SSL_CERT_FILE"
            );
            return Err(Fault::Lasting(Error::Unreachable { host, why }));
        }
        let mut request = Request::builder().method(Method::GET).uri(url);
        request = request
            .header(
                header::USER_AGENT,
                concat!("rocmforge/", env!("CARGO_PKG_VERSION")),
            )
            .header(header::ACCEPT, ask.accept)
            // A file in another coding has other offsets.
            .header(header::ACCEPT_ENCODING, "identity");
        if let Some((first, end)) = ask.range {
            request = request.header(
                header::RANGE,
                format!("bytes={first}-{}", end.saturating_sub(1)),
            );
            if let Some(etag) = ask.if_range {
                request = request.header(header::IF_RANGE, etag);
            }
        }
        if let Some((home, token)) = &self.token
            && is_same_origin(home, url)
        {
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.0));
        }
        let unreachable = |why: String| Error::Unreachable {
            host: host.clone(),
            why,
        };
        let request = request
            .body(Empty::new())
            .map_err(|error| Fault::Lasting(unreachable(error.to_string())))?;
        let sent = tokio::time::timeout(self.patience.stall, self.client.request(request));
        match sent.await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(Fault::Passing(unreachable(chain(&error)), None)),
            Err(_) => Err(Fault::Passing(
                unreachable("it does not answer".to_owned()),
                None,
            )),
        }
    }

    /// A JSON answer, tried again where that may help, and the address of the next page.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        url: &Uri,
        accept: &'static str,
        what: &str,
    ) -> Result<(T, Option<Uri>), Error> {
        let mut tries = Tries::new(self.patience);
        loop {
            let ask = Ask {
                url,
                accept,
                range: None,
                if_range: None,
                what,
            };
            match self.json_once(&ask).await {
                Ok(found) => return Ok(found),
                Err(fault) => tries.again(fault, |_, _| {}).await?,
            }
        }
    }

    async fn json_once<T: DeserializeOwned>(
        &self,
        ask: &Ask<'_>,
    ) -> Result<(T, Option<Uri>), Fault> {
        let answer = self.ask(ask).await?;
        let host = answer.host.clone();
        let next = text_of(answer.response.headers(), &header::LINK);
        let next = next
            .and_then(|link| next_page(&link))
            .and_then(|link| led(ask.url, &link).ok());
        let broken = |why: String| {
            Fault::Passing(
                Error::Broken {
                    host: host.clone(),
                    why,
                },
                None,
            )
        };
        let odd = |what: &str| {
            Fault::Lasting(Error::BadAnswer {
                host: host.clone(),
                what: what.to_owned(),
            })
        };
        let mut body = answer.response.into_body();
        let mut bytes = Vec::new();
        let read = async {
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| broken(chain(&error)))?;
                if let Some(data) = frame.data_ref() {
                    bytes.extend_from_slice(data);
                }
                if bytes.len() > JSON_MAX {
                    return Err(odd("a list that is longer than 16 MiB"));
                }
            }
            Ok(())
        };
        let read = tokio::time::timeout(self.patience.stall, read).await;
        read.unwrap_or_else(|_| Err(broken("it is too slow".to_owned())))?;
        // Whoever leads to a page of HTML has taken the place of the hub.
        let value =
            serde_json::from_slice(&bytes).map_err(|_| odd("what is not the JSON of a hub"))?;
        // A page that leads elsewhere, or to itself, is the last.
        let next = next.filter(|next| is_same_origin(ask.url, next) && next != ask.url);
        Ok((value, next))
    }
}

fn provider() -> std::sync::Arc<rustls::crypto::CryptoProvider> {
    std::sync::Arc::new(rustls::crypto::ring::default_provider())
}

/// TLS with the system's certificates. Blocks on the file system.
pub(crate) fn tls_config() -> Result<rustls::ClientConfig, String> {
    let builder = rustls::ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    let roots = builder.with_native_roots();
    let roots = roots.map_err(|error| error.to_string())?;
    Ok(roots.with_no_client_auth())
}

/// Tries in a row without any gain.
#[derive(Debug)]
pub(crate) struct Tries {
    patience: Patience,
    failed: u32,
}

impl Tries {
    pub(crate) fn new(patience: Patience) -> Self {
        Tries {
            patience,
            failed: 0,
        }
    }

    /// Something came: the next failure is the first again.
    pub(crate) fn gained(&mut self) {
        self.failed = 0;
    }

    /// Waits until the next try; `told` is called with the reason and the time.
    ///
    /// # Errors
    /// The fault's own, where no try is left or none helps.
    pub(crate) async fn again(
        &mut self,
        fault: Fault,
        told: impl FnOnce(&Error, Duration),
    ) -> Result<(), Error> {
        let (error, asked) = match fault {
            Fault::Lasting(error) => return Err(error),
            Fault::Passing(error, asked) => (error, asked),
        };
        self.failed += 1;
        if self.failed >= self.patience.tries {
            return Err(error);
        }
        let usual = self.patience.first_wait * (1 << (self.failed - 1).min(10));
        let wait = asked.unwrap_or(usual);
        if wait > self.patience.longest_wait && asked.is_some() {
            return Err(error);
        }
        let wait = wait.min(self.patience.longest_wait);
        told(&error, wait);
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

/// Makes an error of a status that is none of success.
fn check(
    response: Response<Incoming>,
    host: String,
    linked_etag: Option<String>,
    what: &str,
) -> Result<Answer, Fault> {
    let status = response.status();
    let number = status.as_u16();
    let what = || what.to_owned();
    match status {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            Ok(Answer {
                response,
                host,
                linked_etag,
            })
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => {
            Err(Fault::Lasting(Error::NotFound { what: what(), host }))
        }
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::UNAVAILABLE_FOR_LEGAL_REASONS => Err(Fault::Lasting(Error::Denied {
            what: what(),
            host,
            status: number,
        })),
        StatusCode::TOO_MANY_REQUESTS => {
            let asked = retry_after(response.headers());
            let wait = asked.unwrap_or(Duration::from_secs(60));
            Err(Fault::Passing(Error::RateLimited { host, wait }, asked))
        }
        _ if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT => {
            let asked = retry_after(response.headers());
            Err(Fault::Passing(
                Error::Unavailable {
                    host,
                    status: number,
                },
                asked,
            ))
        }
        _ => Err(Fault::Lasting(Error::BadAnswer {
            host,
            what: format!("with status {number}"),
        })),
    }
}

/// How long a server asks to wait: seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = text_of(headers, &header::RETRY_AFTER)?;
    if let Ok(seconds) = text.trim().parse::<u32>() {
        return Some(Duration::from_secs(seconds.into()));
    }
    let date = httpdate::parse_http_date(&text).ok()?;
    Some(
        date.duration_since(std::time::SystemTime::now())
            .unwrap_or_default(),
    )
}

/// The address behind `rel="next"`.
fn next_page(link: &str) -> Option<String> {
    let mut links = link.split(',');
    let next = links.find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    rest.split_once('>').map(|(url, _)| url.to_owned())
}

pub(crate) fn is_same_origin(a: &Uri, b: &Uri) -> bool {
    let port = |url: &Uri| {
        let usual = if url.scheme_str() == Some("http") {
            80
        } else {
            443
        };
        url.port_u16().unwrap_or(usual)
    };
    a.scheme() == b.scheme() && a.host() == b.host() && port(a) == port(b)
}

/// Host and port, for people.
pub(crate) fn host_of(url: &Uri) -> String {
    url.authority()
        .map_or_else(String::new, |authority| authority.to_string())
}

pub(crate) fn text_of(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// An ETag without quotes and mark of weakness.
fn bare_etag(etag: String) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}

/// An error with its causes, each once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text += ": ";
            text += &next_text;
        }
        cause = next.source();
    }
    text
}

/// A path as a URL has it: what is not a letter, digit, or one of `-._~/` becomes an escape.
pub(crate) fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                out.push(byte as char)
            }
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_belongs_to_one_origin() {
        let home: Uri = "https://hub.example".parse().unwrap();
        let same = |url: &str| is_same_origin(&home, &url.parse().unwrap());
        assert!(same("https://hub.example:443/x"));
        for other in [
            "http://hub.example/x",
            "https://cdn.hub.example/x",
            "https://hub.example:8443/x",
        ] {
            assert!(!same(other), "{other}");
        }
    }

    #[test]
    fn waits_and_pages_are_read_off_headers() {
        let mut headers = HeaderMap::new();
        assert_eq!(retry_after(&headers), None);
        headers.insert(header::RETRY_AFTER, "7".parse().unwrap());
        assert_eq!(retry_after(&headers), Some(Duration::from_secs(7)));
        headers.insert(
            header::RETRY_AFTER,
            "Sun, 06 Nov 1994 08:49:37 GMT".parse().unwrap(),
        );
        assert_eq!(retry_after(&headers), Some(Duration::ZERO), "long ago");
        let link = "<https://h/a?cursor=1>; rel=\"first\", </b?cursor=2>; rel=\"next\"";
        assert_eq!(next_page(link).as_deref(), Some("/b?cursor=2"));
        assert_eq!(escaped("a b/ü%.gguf"), "a%20b/%C3%BC%25.gguf");
    }
}
