//! TLS handshakes, bounded in time and number.
//!
//! *Invariants:* a client that does not end its handshake within [`HANDSHAKE_WAIT_MAX`] is closed;
//! above [`HANDSHAKES_MAX`] the oldest one is closed, so that slow clients keep nobody out (tests
//! `the_oldest_makes_room`, `a_handshake_that_does_not_end_is_closed_and_keeps_nobody_out`).

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Maximum time from a connection to the end of its handshake.
const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(5);
/// Maximum number of handshakes under way.
const HANDSHAKES_MAX: usize = 128;
/// Maximum bytes of unsent data that rustls may buffer for a slow client.
const UNSENT_MAX_BYTES: usize = 64 << 10;
/// Response to a client that speaks plain HTTP to a TLS address.
const IN_THE_CLEAR: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 51\r\nconnection: close\r\n\r\n\
      this address is served with TLS; use https:// here\n";

/// All handshakes under way.
#[derive(Debug, Default)]
pub(super) struct Handshakes(Mutex<UnderWay>);

#[derive(Debug, Default)]
struct UnderWay {
    next: u64,
    /// Handshakes under way, oldest first. Dropping the sender ends a handshake.
    open: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// A place for a handshake, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    all: Arc<Handshakes>,
    id: u64,
    /// Ready when the handshake has to end because newer ones need the place.
    given_up: oneshot::Receiver<()>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.lock().open.retain(|(id, _)| *id != self.id);
    }
}

impl Handshakes {
    /// Locks the list of handshakes, also if poisoned: it is always consistent.
    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection, closing the oldest handshake if all are taken. Call it where
    /// connections are accepted: places are given up in the order of these calls.
    pub(super) fn enter(self: &Arc<Self>) -> Place {
        let (sender, given_up) = oneshot::channel();
        let mut under_way = self.lock();
        if under_way.open.len() >= HANDSHAKES_MAX {
            under_way.open.pop_front();
        }
        let id = under_way.next;
        under_way.next += 1;
        under_way.open.push_back((id, sender));
        Place {
            all: Arc::clone(self),
            id,
            given_up,
        }
    }
}

impl Place {
    /// Performs a TLS handshake.
    ///
    /// # Errors
    /// The handshake failed, took too long, or was closed for newer ones.
    pub(super) async fn make(
        mut self,
        stream: TcpStream,
        config: Arc<ServerConfig>,
    ) -> io::Result<TlsStream<TcpStream>> {
        tokio::select! {
            made = tokio::time::timeout(HANDSHAKE_WAIT_MAX, shake(stream, config)) => {
                made.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }
            _ = &mut self.given_up => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

async fn shake(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
) -> io::Result<TlsStream<TcpStream>> {
    let mut first = [0];
    // A record of TLS begins with 22, a request of HTTP with the letters of its method.
    if stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
        // What lies unread when a socket closes would take the answer along.
        let mut unread = [0; 4096];
        while stream.try_read(&mut unread).is_ok_and(|n| n > 0) {}
        stream.write_all(IN_THE_CLEAR).await?;
        stream.shutdown().await?;
        return Err(io::Error::other("it speaks HTTP without TLS"));
    }
    let accepted = TlsAcceptor::from(config).accept_with(stream, |connection| {
        connection.set_buffer_limit(Some(UNSENT_MAX_BYTES));
    });
    accepted.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_makes_room() {
        let all = Arc::new(Handshakes::default());
        let mut places: Vec<_> = (0..HANDSHAKES_MAX).map(|_| all.enter()).collect();
        assert!(places.iter_mut().all(is_open));
        let mut one_more = all.enter();
        assert!(is_open(&mut one_more));
        assert!(!is_open(&mut places[0]), "the first one came first");
        assert!(is_open(&mut places[1]));
        drop(one_more);
        drop(places);
        assert!(all.lock().open.is_empty());
    }

    fn is_open(place: &mut Place) -> bool {
        place.given_up.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    #[test]
    fn the_answer_in_the_clear_is_as_long_as_it_says() {
        let text = String::from_utf8_lossy(IN_THE_CLEAR);
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())));
    }
}
