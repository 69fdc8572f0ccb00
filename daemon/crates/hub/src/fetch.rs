//! Files that requests name by a URL, from hosts that are allowed.
//!
//! ```text
//! URL -> host in the list -> addresses by the resolver, all of them public -> one of these
//!   ^                                                                           |
//!   +----- a redirect <------------------------------------------- answer ------+--> bytes,
//!   bounded
//! ```
//!
//! A client of the daemon may reach less of the network than the daemon: so that nobody looks
//! through its eyes at what is behind a firewall, an address has to be public in any case, and what
//! an answer says is told to nobody unless it is a file.
//!
//! *Invariants* (tests below): a connection goes to an address that was checked, and a name is not
//! looked up again for it; each redirect is checked as the first URL is; bytes and time have an
//! end, whatever the other side does.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderMap};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::source::without_query;
use crate::web;

/// Times that a request is led on.
const REDIRECTS_MAX: usize = 4;
/// Addresses of a host that are tried.
const ADDRESSES_MAX: usize = 4;
/// Longest pattern of a list of hosts.
const PATTERN_MAX: usize = 253;

/// Why a file was not fetched. The texts do not tell what is at an address, nor which it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// No URL of a file.
    #[error("{url} is no URL that can be fetched; give https://HOST/PATH")]
    BadUrl {
        /// What was given, its beginning.
        url: String,
    },
    /// The host is not allowed.
    #[error(
        "the host {host} is none from which this daemon fetches images (image_url_hosts); give the \
         image as a data: URL"
    )]
    NotAllowed {
        /// The host.
        host: String,
    },
    /// The host is in another network than the public one.
    #[error("the host {host} has no public address; give the image as a data: URL")]
    NotPublic {
        /// The host.
        host: String,
    },
    /// The host cannot be reached.
    #[error("the host {host} cannot be reached; check the URL, or give the image as a data: URL")]
    Unreachable {
        /// The host.
        host: String,
    },
    /// It answers with something else.
    #[error("the host {host} gives no image ({what}); check the URL")]
    NoFile {
        /// The host.
        host: String,
        /// What instead.
        what: String,
    },
    /// The file is longer than the bound.
    #[error("the file at {host} has more than {max} bytes; give a smaller image")]
    TooLarge {
        /// The host.
        host: String,
        /// The bound.
        max: u64,
    },
    /// It took too long.
    #[error(
        "the host {host} takes longer than {} seconds; give the image as a data: URL",
        max.as_secs()
    )]
    TooSlow {
        /// The host.
        host: String,
        /// The bound.
        max: Duration,
    },
}

/// Hosts by their names: each whole, `*.` and an end, or `*` for all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hosts(Vec<String>);

impl Hosts {
    /// Reads a list.
    ///
    /// # Errors
    /// A message that says what is allowed.
    pub fn new(patterns: &[String]) -> Result<Self, String> {
        let each = patterns.iter().map(|pattern| {
            let name = pattern.strip_prefix("*.").unwrap_or(pattern);
            let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
            let is_name = !name.is_empty() && name.len() <= PATTERN_MAX && name.bytes().all(fine);
            match pattern == "*" || is_name && !is_with_port(name) {
                true => Ok(pattern.to_ascii_lowercase()),
                false => Err(format!(
                    "'{pattern}' is no host: give a name such as images.example.org, *.example.org for all names \
                     that end so, or * for every host; without scheme and port"
                )),
            }
        });
        each.collect::<Result<_, _>>().map(Self)
    }

    /// The patterns, as they are written.
    pub fn patterns(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Whether a host is among them.
    fn has(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        self.0
            .iter()
            .any(|pattern| match pattern.strip_prefix('*') {
                None => *pattern == host,
                // `.example.org`, or nothing.
                Some(end) => host.len() > end.len() && host.ends_with(end),
            })
    }
}

fn is_with_port(name: &str) -> bool {
    let is_v6 = name.starts_with('[') || name.matches(':').count() > 1;
    name.contains(':') && !is_v6 || name.contains("]:")
}

/// What a file may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchBounds {
    /// Most bytes.
    pub bytes: u64,
    /// Until the last of them, with all redirects.
    pub time: Duration,
}

/// Fetches files.
pub struct Fetcher {
    hosts: Hosts,
    is_public: fn(IpAddr) -> bool,
    /// Read when it is first needed, since few do.
    tls: OnceLock<Result<TlsConnector, String>>,
}

impl fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetcher")
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

/// Where a URL leads.
#[derive(Debug, Clone)]
struct Place {
    url: Uri,
    host: String,
    port: u16,
    is_tls: bool,
}

impl Fetcher {
    /// One for these hosts.
    pub fn new(hosts: Hosts) -> Self {
        Self {
            hosts,
            is_public,
            tls: OnceLock::new(),
        }
    }

    /// Whether there is any host to fetch from.
    pub fn is_on(&self) -> bool {
        !self.hosts.0.is_empty()
    }

    /// Fetches the file at a URL into `bytes`.
    ///
    /// # Errors
    /// [`FetchError`].
    pub async fn fetch(
        &self,
        url: &str,
        bounds: FetchBounds,
        bytes: &mut Vec<u8>,
    ) -> Result<(), FetchError> {
        let place = self.place(url)?;
        let host = place.host.clone();
        let fetched =
            tokio::time::timeout(bounds.time, self.fetch_from(place, bounds.bytes, bytes));
        fetched.await.unwrap_or(Err(FetchError::TooSlow {
            host,
            max: bounds.time,
        }))
    }

    /// Checks a URL but for the addresses of its host.
    fn place(&self, url: &str) -> Result<Place, FetchError> {
        let bad = || FetchError::BadUrl {
            url: url.chars().take(100).collect(),
        };
        let parsed: Uri = url
            .split('#')
            .next()
            .unwrap_or_default()
            .parse()
            .map_err(|_| bad())?;
        let is_tls = match parsed.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad()),
        };
        let authority = parsed.authority().filter(|a| !a.as_str().contains('@'));
        let host = authority.ok_or_else(bad)?.host().to_owned();
        if !self.hosts.has(&host) {
            return Err(FetchError::NotAllowed { host });
        }
        let usual = if is_tls { 443 } else { 80 };
        Ok(Place {
            port: parsed.port_u16().unwrap_or(usual),
            url: parsed,
            host,
            is_tls,
        })
    }

    async fn fetch_from(
        &self,
        mut place: Place,
        max: u64,
        bytes: &mut Vec<u8>,
    ) -> Result<(), FetchError> {
        for _ in 0..=REDIRECTS_MAX {
            let response = self.ask(&place).await?;
            let status = response.status();
            if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return read(response, &place.host, max, bytes).await;
            }
            let no_file = |what: &str| FetchError::NoFile {
                host: place.host.clone(),
                what: what.to_owned(),
            };
            let to = web::text_of(response.headers(), &header::LOCATION).unwrap_or_default();
            let to = joined(&place.url, &to).ok_or_else(|| no_file("a redirect to nowhere"))?;
            let next = self.place(&to)?;
            if place.is_tls && !next.is_tls {
                return Err(no_file("a redirect to http"));
            }
            place = next;
        }
        Err(FetchError::NoFile {
            host: place.host,
            what: "redirects without an end".to_owned(),
        })
    }

    /// Asks once, at an address that was checked.
    async fn ask(&self, place: &Place) -> Result<Response<Incoming>, FetchError> {
        let unreachable = || FetchError::Unreachable {
            host: place.host.clone(),
        };
        let stream = self.connect(place).await?;
        if !place.is_tls {
            return send(stream, place).await;
        }
        let tls = self.tls.get_or_init(connector).as_ref();
        let tls = tls.map_err(|why| {
            tracing::warn!(%why, "no image can be fetched over https");
            unreachable()
        })?;
        let name = place.host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(name.to_owned()).map_err(|_| unreachable())?;
        let stream = tls.connect(name, stream).await.map_err(|error| {
            tracing::debug!(%error, host = place.host, "no TLS with the host of an image");
            unreachable()
        })?;
        send(stream, place).await
    }

    async fn connect(&self, place: &Place) -> Result<TcpStream, FetchError> {
        let host = || place.host.clone();
        let name = place.host.trim_start_matches('[').trim_end_matches(']');
        let found = tokio::net::lookup_host((name, place.port)).await;
        let found = found.map_err(|_| FetchError::Unreachable { host: host() })?;
        let addresses: Vec<SocketAddr> = found.collect();
        // One that is not makes the name suspect.
        if !addresses
            .iter()
            .all(|address| (self.is_public)(address.ip()))
        {
            return Err(FetchError::NotPublic { host: host() });
        }
        for address in addresses.into_iter().take(ADDRESSES_MAX) {
            if let Ok(stream) = TcpStream::connect(address).await {
                return Ok(stream);
            }
        }
        Err(FetchError::Unreachable { host: host() })
    }
}

/// TLS with the system's certificates. Blocks on the file system, for a moment.
fn connector() -> Result<TlsConnector, String> {
    web::tls_config().map(|config| TlsConnector::from(Arc::new(config)))
}

async fn send<S>(stream: S, place: &Place) -> Result<Response<Incoming>, FetchError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let unreachable = |_: hyper::Error| FetchError::Unreachable {
        host: place.host.clone(),
    };
    let io = TokioIo::new(stream);
    let (mut sender, connection) = http1::handshake(io).await.map_err(unreachable)?;
    // It ends with the body, or when that is dropped.
    tokio::spawn(connection);
    let path = place.url.path_and_query().map_or("/", |path| path.as_str());
    let authority = place
        .url
        .authority()
        .map_or("", |authority| authority.as_str());
    let request = Request::get(path)
        .header(header::HOST, authority)
        .header(
            header::USER_AGENT,
            concat!("rocmforge/", env!("CARGO_PKG_VERSION")),
        )
        .header(
            header::ACCEPT,
            "image/png, image/jpeg, image/webp, image/gif",
        )
        .header(header::ACCEPT_ENCODING, "identity")
        .body(Empty::<Bytes>::new());
    let request = request.map_err(|_| FetchError::BadUrl {
        url: without_query(&place.url),
    })?;
    sender.send_request(request).await.map_err(unreachable)
}

/// Reads the body of an answer that is an image.
async fn read(
    response: Response<Incoming>,
    host: &str,
    max: u64,
    bytes: &mut Vec<u8>,
) -> Result<(), FetchError> {
    let no_file = |what: String| FetchError::NoFile {
        host: host.to_owned(),
        what,
    };
    let too_large = || FetchError::TooLarge {
        host: host.to_owned(),
        max,
    };
    if response.status() != 200 {
        return Err(no_file(format!("status {}", response.status().as_u16())));
    }
    check_kind(response.headers()).map_err(no_file)?;
    if response.body().size_hint().lower() > max {
        return Err(too_large());
    }
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| no_file("it ends early".to_owned()))?;
        let data = frame.data_ref().map_or(&[][..], |data| data);
        if (bytes.len() + data.len()) as u64 > max {
            return Err(too_large());
        }
        bytes.extend_from_slice(data);
    }
    Ok(())
}

/// Refuses what says that it is no image, or is packed.
fn check_kind(headers: &HeaderMap) -> Result<(), String> {
    let of = |name| {
        web::text_of(headers, name)
            .unwrap_or_default()
            .to_ascii_lowercase()
    };
    let kind = of(&header::CONTENT_TYPE);
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let is_fine = kind.is_empty() || kind.starts_with("image/") || kind.ends_with("/octet-stream");
    if !is_fine {
        return Err("its content type is none of an image".to_owned());
    }
    match of(&header::CONTENT_ENCODING).as_str() {
        "" | "identity" => Ok(()),
        _ => Err("its content is encoded".to_owned()),
    }
}

/// Where a redirect leads.
fn joined(from: &Uri, to: &str) -> Option<String> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    if to.is_empty() {
        return None;
    }
    Some(if to.contains("://") {
        to.to_owned()
    } else if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        format!("{scheme}://{authority}{to}")
    } else {
        let dir = from.path().rsplit_once('/').map_or("", |(dir, _)| dir);
        format!("{scheme}://{authority}{dir}/{to}")
    })
}

/// Whether an address is one of the public network.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// All but what IANA's registry of special IPv4 addresses has, and multicast.
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || a == 0
        || a >= 224
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && (18..20).contains(&b));
    !special
}

/// Those of 2000::/3 but for special ones, and IPv4 addresses behind a translator (64:ff9b::/96).
fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(v4) = address.to_ipv4_mapped() {
        return is_public_v4(v4);
    }
    let [a, b, c, d, e, f, g, h] = address.segments();
    if [a, b, c, d, e, f] == [0x64, 0xff9b, 0, 0, 0, 0] {
        let [g, h] = [g, h].map(u16::to_be_bytes);
        return is_public_v4(Ipv4Addr::new(g[0], g[1], h[0], h[1]));
    }
    let special = match a {
        // Protocols, Teredo, documentation.
        0x2001 => b < 0x200 || b == 0xdb8,
        // 6to4.
        0x2002 => true,
        // Documentation.
        0x3fff => b < 0x1000,
        _ => false,
    };
    a & 0xe000 == 0x2000 && !special
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
