//! A daemon without models in the target's own process, and a client of its two sockets. No model
//! is loaded and none may be.

use std::cell::RefCell;
use std::io;
use std::num::NonZeroUsize;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rocmforge_engine::api::Budget;
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_tokenizer::Renderer;
use rocmforged::model_files::ModelDirs;
use rocmforged::roles::Roles;
use rocmforged::{HttpListeners, Limits, ServeOptions};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tonic::Status;

/// Most bytes of an answer; refusals are short.
const ANSWER_MAX_BYTES: usize = 1 << 20;
/// Far longer than a target runs.
const GRACE: Duration = Duration::from_secs(3600);

/// The daemon, and connections to it.
pub struct Desk {
    runtime: Runtime,
    http: Kept<http1::SendRequest<Full<Bytes>>>,
    grpc: Kept<http2::SendRequest<Full<Bytes>>>,
    /// The daemon drains once it is dropped.
    _stops: mpsc::Sender<()>,
}

/// A socket without a file, and the connection to it that is open, if one is.
struct Kept<S> {
    address: SocketAddr,
    open: RefCell<Option<S>>,
}

impl<S> Kept<S> {
    fn new(name: &str) -> io::Result<(Self, UnixListener)> {
        let name = format!("rocmforge-fuzz-{}-{name}", std::process::id());
        let address = SocketAddr::from_abstract_name(name)?;
        let listener = UnixListener::bind_addr(&address)?;
        let open = RefCell::default();
        Ok((Self { address, open }, listener))
    }

    fn connect(&self) -> io::Result<TokioIo<tokio::net::UnixStream>> {
        let stream = UnixStream::connect_addr(&self.address)?;
        stream.set_nonblocking(true)?;
        Ok(TokioIo::new(tokio::net::UnixStream::from_std(stream)?))
    }
}

impl Kept<http1::SendRequest<Full<Bytes>>> {
    /// The answer to a request, on the open connection where it still takes one: the daemon closes
    /// it behind some refusals, and where it was silent for long.
    async fn send(&self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        if let Some(mut open) = self.open.take()
            && open.ready().await.is_ok()
            && let Ok(answer) = open.send_request(request.clone()).await
        {
            self.open.replace(Some(open));
            return Ok(answer);
        }
        let stream = self.connect().expect("the daemon's socket");
        let (mut open, connection) = http1::handshake(stream).await?;
        tokio::spawn(connection);
        let answer = open.send_request(request).await?;
        self.open.replace(Some(open));
        Ok(answer)
    }
}

impl Kept<http2::SendRequest<Full<Bytes>>> {
    /// Likewise.
    async fn send(&self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        if let Some(mut open) = self.open.take()
            && open.ready().await.is_ok()
            && let Ok(answer) = open.send_request(request.clone()).await
        {
            self.open.replace(Some(open));
            return Ok(answer);
        }
        let stream = self.connect().expect("the daemon's socket");
        let (mut open, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
        tokio::spawn(connection);
        let answer = open.send_request(request).await?;
        self.open.replace(Some(open));
        Ok(answer)
    }
}

impl Desk {
    /// Starts the daemon, on the host and on this thread.
    ///
    /// # Panics
    /// Where it does not start.
    #[expect(clippy::new_without_default, reason = "it starts threads")]
    pub fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let (engine, _thread) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: NonZeroUsize::new(1),
            budget: Budget::Bytes(1 << 20),
            ..EngineConfig::default()
        })
        .expect("the host device");
        let (http, http_listener) = Kept::new("http").expect("a socket");
        let (grpc, listener) = Kept::new("grpc").expect("a socket");
        let options = ServeOptions {
            model_dirs: ModelDirs::new(&[]).expect("no directories"),
            limits: Limits {
                n_ctx_max: 1024,
                max_sequences: 4,
                threads: 1,
            },
            roles: Roles::default(),
            peer_limits: Vec::new(),
            image_memory: 256 << 20,
            drain_grace: GRACE,
            http: HttpListeners {
                unix: Some(http_listener),
                ..HttpListeners::default()
            },
            declared: Vec::new(),
            remember: None,
            warm: None,
            reloads: None,
            templates: Renderer::in_process(),
            sockets: runtime.handle().clone(),
            is_kept: false,
        };
        let (stops, stopped) = mpsc::channel(1);
        runtime.spawn(async move {
            let ended = rocmforged::serve(listener, engine, options, stopped).await;
            // A panic is what the fuzzer takes for a finding.
            panic!("the daemon ended: {ended:?}");
        });
        Self {
            runtime,
            http,
            grpc,
            _stops: stops,
        }
    }

    /// Posts `body`; the status and the body of the answer.
    ///
    /// # Panics
    /// Where there is no answer, or the answer has no end.
    pub fn http(&self, route: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let request = Request::post(route)
            .header("host", "localhost")
            .body(Full::new(Bytes::copy_from_slice(body)))
            .expect("a request");
        self.runtime.block_on(async {
            let answer = self.http.send(request).await.expect("an answer");
            let status = answer.status().as_u16();
            let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES);
            let body = body.collect().await.expect("a body with an end");
            (status, body.to_bytes().to_vec())
        })
    }

    /// Calls `SERVICE/METHOD` with `message`; the code and the words of the refusal, 0 where there
    /// is none.
    ///
    /// # Panics
    /// Where there is no answer, or one without a status.
    pub fn grpc(&self, call: &str, message: &[u8]) -> (i32, String) {
        let mut framed = BytesMut::with_capacity(message.len() + 5);
        framed.put_u8(0);
        framed.put_u32(message.len() as u32);
        framed.put_slice(message);
        let request = Request::post(format!("http://localhost/rocmforge.v1.{call}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(framed.freeze()))
            .expect("a request");
        let status = self.runtime.block_on(async {
            let answer = self.grpc.send(request).await.expect("an answer");
            if let Some(status) = Status::from_header_map(answer.headers()) {
                return status;
            }
            let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES);
            let body = body.collect().await.expect("a body with an end");
            let status = body.trailers().and_then(Status::from_header_map);
            status.expect("an answer has a status")
        });
        (status.code() as i32, status.message().to_owned())
    }
}
