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
//! end, whatever the other side does; look-ups occupy [`FETCH_THREADS`] threads at most.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

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
use tokio::sync::{OnceCell, Semaphore};
use tokio_rustls::TlsConnector;

use crate::source::without_query;
use crate::{redirect, web};

/// Times that a request is led on.
const REDIRECTS_MAX: usize = 4;
/// Addresses of a host that are tried.
const ADDRESSES_MAX: usize = 4;
/// How long a connection to each of them may take to come about.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Blocking threads of a [`Fetcher`]: look-ups of names, which nothing can stop, and one of
/// certificates.
pub const FETCH_THREADS: usize = 2;
/// Longest pattern of a list of hosts.
const PATTERN_MAX: usize = 253;

/// Why a file was not fetched. Messages contain no address, and nothing of what answers at one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// No URL of a file.
    #[error("{url} is no URL that can be fetched; give https://HOST/PATH")]
    BadUrl {
        /// The beginning of the given URL.
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
    /// The address is in another network than the public one.
    #[error("{host} is no public address; give the image as a data: URL")]
    NotPublic {
        /// The address.
        host: String,
    },
    /// The host cannot be reached, or its name leads to another network than the public one: which
    /// of them, nobody is told, for that would tell which names an internal network has.
    #[error(
        "the host {host} cannot be reached at a public address; check the URL, or give the image as a data: URL"
    )]
    Unreachable {
        /// The host.
        host: String,
    },
    /// The host responds with something else than an image.
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
    /// The host took too long.
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
    /// Maximum number of bytes.
    pub bytes: u64,
    /// Time limit until the last byte, redirects included.
    pub time: Duration,
}

/// Fetches files.
pub struct Fetcher {
    hosts: Hosts,
    is_public: fn(IpAddr) -> bool,
    resolve: Resolve,
    /// Permits for blocking threads.
    threads: Arc<Semaphore>,
    /// Read when it is first needed, since few do; again where that failed.
    tls: OnceCell<TlsConnector>,
}

/// Looks up the addresses of a name.
type Resolve = Arc<dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync>;

/// Resolves a host name by the system's resolver. Blocks.
fn by_system(name: &str) -> io::Result<Vec<IpAddr>> {
    let addresses = (name, 0).to_socket_addrs()?;
    Ok(addresses.map(|address| address.ip()).collect())
}

impl fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetcher")
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

/// A URL of `http` or `https` whose host is allowed.
#[derive(Debug, Clone)]
struct Place(Uri);

impl Place {
    fn is_tls(&self) -> bool {
        self.0.scheme_str() == Some("https")
    }

    fn host(&self) -> String {
        self.0.host().unwrap_or_default().to_owned()
    }

    /// The host as a resolver takes it: without the brackets of an IPv6 address.
    fn name(&self) -> String {
        let host = self.0.host().unwrap_or_default();
        host.trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned()
    }

    fn port(&self) -> u16 {
        let usual = if self.is_tls() { 443 } else { 80 };
        self.0.port_u16().unwrap_or(usual)
    }
}

impl Fetcher {
    /// A fetcher of files from these hosts.
    pub fn new(hosts: Hosts) -> Self {
        Self {
            hosts,
            is_public,
            resolve: Arc::new(by_system),
            threads: Arc::new(Semaphore::new(FETCH_THREADS)),
            tls: OnceCell::new(),
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
        let host = place.host();
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
        if !matches!(parsed.scheme_str(), Some("https" | "http")) {
            return Err(bad());
        }
        let authority = parsed.authority().filter(|a| !a.as_str().contains('@'));
        let host = authority.ok_or_else(bad)?.host().to_owned();
        if !self.hosts.has(&host) {
            return Err(FetchError::NotAllowed { host });
        }
        Ok(Place(parsed))
    }

    /// Where an answer leads.
    fn led(&self, from: &Place, to: &str) -> Result<Place, FetchError> {
        let no_file = |what: &str| FetchError::NoFile {
            host: from.host(),
            what: what.to_owned(),
        };
        let to = redirect::joined(&from.0, to).ok_or_else(|| no_file("a redirect to nowhere"))?;
        let next = self.place(&to)?;
        if from.is_tls() && !next.is_tls() {
            return Err(no_file("a redirect to http"));
        }
        Ok(next)
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
                return read(response, &place.host(), max, bytes).await;
            }
            let to = web::text_of(response.headers(), &header::LOCATION).unwrap_or_default();
            place = self.led(&place, &to)?;
        }
        Err(FetchError::NoFile {
            host: place.host(),
            what: "redirects without an end".to_owned(),
        })
    }

    /// Runs what blocks on a thread of its own once there is a permit, which goes with it.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let permit = Arc::clone(&self.threads).acquire_owned().await.ok()?;
        let work = move || {
            let _permit = permit;
            work()
        };
        tokio::task::spawn_blocking(work).await.ok()
    }

    /// Asks once, at an address that was checked.
    async fn ask(&self, place: &Place) -> Result<Response<Incoming>, FetchError> {
        let unreachable = || FetchError::Unreachable { host: place.host() };
        let stream = self.connect(place).await?;
        if !place.is_tls() {
            return send(stream, place).await;
        }
        let tls = self.tls().await.ok_or_else(unreachable)?;
        let name = ServerName::try_from(place.name()).map_err(|_| unreachable())?;
        let stream = tls.connect(name, stream).await.map_err(|error| {
            tracing::debug!(%error, host = place.host(), "no TLS with the host of an image");
            unreachable()
        })?;
        send(stream, place).await
    }

    /// TLS with the system's certificates.
    async fn tls(&self) -> Option<&TlsConnector> {
        let read = async || {
            let config = self.blocking(web::tls_config).await;
            let config = config.unwrap_or_else(|| Err("the daemon ends".to_owned()))?;
            Ok::<_, String>(TlsConnector::from(Arc::new(config)))
        };
        let tls = self.tls.get_or_try_init(read).await;
        tls.inspect_err(|why| tracing::warn!(%why, "no image can be fetched over https"))
            .ok()
    }

    /// The addresses of a host, each of which is public: one that is not makes a name suspect.
    async fn addresses(&self, place: &Place) -> Result<Vec<IpAddr>, FetchError> {
        let name = place.name();
        if let Ok(literal) = name.parse::<IpAddr>() {
            return match (self.is_public)(literal) {
                true => Ok(vec![literal]),
                false => Err(FetchError::NotPublic { host: place.host() }),
            };
        }
        let resolve = Arc::clone(&self.resolve);
        let found = self.blocking(move || resolve(&name)).await;
        let mut found = found.and_then(Result::ok).unwrap_or_default();
        if !found.iter().all(|address| (self.is_public)(*address)) {
            tracing::debug!(
                host = place.host(),
                "the name of an image's host leads to no public address"
            );
            found.clear();
        }
        found.truncate(ADDRESSES_MAX);
        Ok(found)
    }

    async fn connect(&self, place: &Place) -> Result<TcpStream, FetchError> {
        for address in self.addresses(place).await? {
            let connecting = TcpStream::connect((address, place.port()));
            if let Ok(Ok(stream)) = tokio::time::timeout(CONNECT_MAX, connecting).await {
                return Ok(stream);
            }
        }
        Err(FetchError::Unreachable { host: place.host() })
    }
}

async fn send<S>(stream: S, place: &Place) -> Result<Response<Incoming>, FetchError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let unreachable = |_: hyper::Error| FetchError::Unreachable { host: place.host() };
    let io = TokioIo::new(stream);
    let (mut sender, connection) = http1::handshake(io).await.map_err(unreachable)?;
    // It ends with the body, or when that is dropped.
    tokio::spawn(connection);
    let path = place.0.path_and_query().map_or("/", |path| path.as_str());
    let authority = place
        .0
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
        url: without_query(&place.0),
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
    let hint = response.body().size_hint();
    if hint.lower() > max {
        return Err(too_large());
    }
    // Growing by itself it would have up to twice as much.
    let most = hint.upper().unwrap_or(max).min(max);
    bytes.reserve_exact(usize::try_from(most).unwrap_or_default());
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

/// Whether an IPv6 address is public: 2000::/3 but for special ranges, and IPv4 addresses behind a
/// translator (64:ff9b::/96).
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
