//! A daemon that serves HTTP, and requests to it as plain as they are on the wire.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use bytes::Bytes;
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rocmforged::limits::Rules;
use rocmforged::roles::Roles;
use rocmforged::socket::Socket;
use rocmforged::{Allowed, End, HttpListeners, PullConfig, ShownSetting, Tokens};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::body::Body;

use crate::daemon::{Daemon, fixtures};

/// The model of the fixtures, under the name that its file gives it.
pub(crate) const LLAMA: &str = "tiny-llama-Q4_K_M";

/// A daemon with an HTTP socket, and a port of this machine.
pub(crate) struct HttpDaemon {
    pub(crate) daemon: Daemon,
    pub(crate) tcp: SocketAddr,
    socket_dir: tempfile::TempDir,
    _socket: Socket,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) text: String,
}

impl Reply {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The data of server-sent events, by their names.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        let events = self.text.split("\n\n").filter(|event| !event.is_empty());
        events
            .map(|event| {
                let line = |prefix: &str| {
                    let mut lines = event.lines();
                    lines.find_map(|line| line.strip_prefix(prefix).map(str::to_owned))
                };
                (
                    line("event: ").unwrap_or_default(),
                    line("data: ").unwrap_or_default(),
                )
            })
            .collect()
    }

    /// Lines of JSON.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

impl HttpDaemon {
    pub(crate) async fn start() -> Self {
        Self::start_with(None, Roles::default()).await
    }

    pub(crate) async fn start_with(token: Option<&str>, roles: Roles) -> Self {
        Self::start_limiting(token, roles, Vec::new()).await
    }

    pub(crate) async fn start_limiting(
        token: Option<&str>,
        roles: Roles,
        peer_limits: Rules,
    ) -> Self {
        Self::start_serving(&[fixtures()], token, roles, peer_limits).await
    }

    /// One whose models are those of these directories and of its own.
    pub(crate) async fn start_serving(
        dirs: &[PathBuf],
        token: Option<&str>,
        roles: Roles,
        peer_limits: Rules,
    ) -> Self {
        let allowed = Allowed::default();
        Self::start_of(dirs, (token, allowed), roles, peer_limits).await
    }

    /// The same, which lets in others without a token.
    pub(crate) async fn start_of(
        dirs: &[PathBuf],
        (token, allowed): (Option<&str>, Allowed),
        roles: Roles,
        peer_limits: Rules,
    ) -> Self {
        let http = HttpListeners {
            tokens: token.map(|token| Tokens::parse(token).unwrap()),
            allowed,
            ..HttpListeners::default()
        };
        Self::start_as(dirs, http, roles, peer_limits).await
    }

    /// One that downloads models.
    pub(crate) async fn start_pulling(
        dirs: &[PathBuf],
        token: Option<&str>,
        pulls: PullConfig,
        settings: Vec<ShownSetting>,
    ) -> Self {
        let http = HttpListeners {
            tokens: token.map(|token| Tokens::parse(token).unwrap()),
            pulls,
            settings,
            ..HttpListeners::default()
        };
        Self::start_as(dirs, http, Roles::default(), Vec::new()).await
    }

    /// One with all of this, and sockets.
    pub(crate) async fn start_as(
        dirs: &[PathBuf],
        http: HttpListeners,
        roles: Roles,
        peer_limits: Rules,
    ) -> Self {
        let socket_dir = tempfile::tempdir().unwrap();
        let socket = Socket::bind(&socket_dir.path().join("h")).unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let http = HttpListeners {
            unix: Some(socket.listener().unwrap()),
            tcp: vec![tcp],
            ..http
        };
        Self {
            daemon: Daemon::start_serving(dirs, roles, http, Vec::new(), peer_limits).await,
            tcp: address,
            socket_dir,
            _socket: socket,
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.socket_dir.path().join("h")
    }

    pub(crate) async fn get(&self, target: &str) -> Reply {
        unix(&self.path(), "GET", target, &[], "").await
    }

    pub(crate) async fn post(&self, target: &str, body: &Value) -> Reply {
        unix(&self.path(), "POST", target, &[], &body.to_string()).await
    }

    pub(crate) async fn stop(self) -> End {
        self.daemon.stop().await
    }
}

/// A request over the Unix socket.
pub(crate) async fn unix(
    path: &Path,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Reply {
    let stream = UnixStream::connect(path).await.unwrap();
    whole(send(stream, method, target, headers, body).await).await
}

/// A request whose body is no text.
pub(crate) async fn unix_bytes(
    path: &Path,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> Reply {
    let stream = UnixStream::connect(path).await.unwrap();
    whole(send_bytes(stream, method, target, headers, body).await).await
}

/// A request over TCP.
pub(crate) async fn tcp(
    address: SocketAddr,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Reply {
    let stream = TcpStream::connect(address).await.unwrap();
    whole(send(stream, method, target, headers, body).await).await
}

/// Sends a request on a connection of its own, and gives the answer as it begins. Dropping its body
/// closes the connection.
pub(crate) async fn send<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Response<Incoming> {
    let body = body.as_bytes().to_vec();
    send_bytes(stream, method, target, headers, body).await
}

async fn send_bytes<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> Response<Incoming> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut request = Request::builder().method(method).uri(target);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", "localhost");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = Body::new(Whole(Some(Bytes::from(body))));
    sender
        .send_request(request.body(body).unwrap())
        .await
        .unwrap()
}

/// Reads an answer to its end.
pub(crate) async fn whole(response: Response<Incoming>) -> Reply {
    let (parts, mut body) = response.into_parts();
    let mut bytes = Vec::new();
    while let Some(piece) = piece(&mut body).await {
        bytes.extend_from_slice(&piece);
    }
    Reply {
        status: parts.status.as_u16(),
        headers: parts.headers,
        text: String::from_utf8(bytes).unwrap(),
    }
}

/// The next bytes of an answer.
pub(crate) async fn piece(body: &mut Incoming) -> Option<Bytes> {
    let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await?;
    Some(frame.unwrap().into_data().unwrap_or_default())
}

/// A body that is here at once.
pub(crate) struct Whole(pub(crate) Option<Bytes>);

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, tonic::Status>>> {
        std::task::Poll::Ready(self.0.take().map(|data| Ok(http_body::Frame::data(data))))
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.0.as_ref().map_or(0, |data| data.len() as u64))
    }
}
