//! Finding the daemon's socket and putting a gRPC channel on it.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use hyper_util::rt::TokioIo;
use rocmforge_proto::socket_candidates;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::{Attempt, Error};

/// Interval of keep-alive pings to the daemon, while a request is open.
const PING_EVERY: Duration = Duration::from_secs(10);
/// Time limit for the response to such a keep-alive ping.
const PING_WAIT_MAX: Duration = Duration::from_secs(20);
/// How long a socket is tried that has no room for another connection, and how often.
const FULL_WAIT_MAX: Duration = Duration::from_secs(1);
const FULL_PAUSE: Duration = Duration::from_millis(10);

/// Opens a channel to the daemon at `path`, or at the first of
/// [`socket_candidates`] where one answers; returns where that was.
// Behind a pointer, so that the channel is compiled here, once: a future that is known by its type
// is compiled in each binary that awaits it.
#[inline(never)]
pub(crate) fn connect(path: Option<&Path>) -> BoxFuture<'_, Result<(Channel, PathBuf), Error>> {
    Box::pin(connect_to_one(path))
}

async fn connect_to_one(path: Option<&Path>) -> Result<(Channel, PathBuf), Error> {
    let candidates = match path {
        Some(path) => vec![path.to_owned()],
        None => socket_candidates(),
    };
    let mut tried = Vec::new();
    for path in candidates {
        match dial(&path).await {
            Ok(stream) => return Ok((channel(path.clone(), stream).await?, path)),
            Err(error) => tried.push(Attempt { path, error }),
        }
    }
    Err(Error::NoDaemon { tried })
}

/// Connects to a socket. Where more connections wait to be accepted than it has room for, tries
/// again for a moment: others' bursts are over soon.
async fn dial(path: &Path) -> io::Result<UnixStream> {
    let give_up = Instant::now() + FULL_WAIT_MAX;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < give_up => {
                tokio::time::sleep(FULL_PAUSE).await;
            }
            connected => return connected,
        }
    }
}

/// A channel that begins on `stream` and connects to `path` again if it breaks.
async fn channel(path: PathBuf, stream: UnixStream) -> Result<Channel, Error> {
    let mut stream = Some(stream);
    let target = path.clone();
    let connector = service_fn(move |_: Uri| {
        let first = stream.take();
        let target = target.clone();
        async move {
            match first {
                Some(stream) => Ok(TokioIo::new(stream)),
                None => dial(&target).await.map(TokioIo::new),
            }
        }
    });
    // The authority is for HTTP/2's sake; the connector looks at the path only.
    Endpoint::from_static("http://rocmforged")
        // A daemon that is stopped or hangs answers no ping; one that computes does.
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_WAIT_MAX)
        .connect_with_connector(connector)
        .await
        .map_err(|source| Error::Handshake { path, source })
}
