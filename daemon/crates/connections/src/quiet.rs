//! A Unix socket that wakes its thread only for what somebody waits for.
//!
//! Each time a peer takes something off a Unix socket, the kernel reports room to write,
//! also to who never found any missing. A socket that is watched for both directions, as
//! tokio's own is, thus wakes the daemon a second time for each token, when its client has
//! read it. This one is watched for what there is to read; for room only from a write that
//! found none to one that found some.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// The socket.
#[derive(Debug)]
pub struct QuietStream {
    socket: AsyncFd<UnixStream>,
    /// The socket under a second descriptor, watched for writability while a write waits for that.
    full: Option<AsyncFd<UnixStream>>,
}

impl QuietStream {
    /// Takes over a socket; to be called where it is going to be polled.
    ///
    /// # Errors
    /// Where it cannot be watched.
    pub fn new(socket: tokio::net::UnixStream) -> io::Result<Self> {
        let socket = watch(socket.into_std()?, Interest::READABLE)?;
        Ok(Self { socket, full: None })
    }

    /// Writes, or waits until there is room to.
    fn poll_written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let written = match &self.full {
                None => write(self.socket.get_ref()),
                Some(full) => {
                    let mut room = ready!(full.poll_write_ready(cx))?;
                    match room.try_io(|socket| write(socket.get_ref())) {
                        Ok(written) => written,
                        // No room after all.
                        Err(_) => continue,
                    }
                }
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let again = self.socket.get_ref().try_clone()?;
                    self.full = Some(watch(again, Interest::WRITABLE)?);
                }
                written => {
                    self.full = None;
                    return Poll::Ready(written);
                }
            }
        }
    }
}

#[expect(
    deprecated,
    reason = "unsound for types that give another descriptor each time, which a socket does not; \
              what replaces it is unsafe, and this crate has nothing that is"
)]
fn watch(socket: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    AsyncFd::with_interest(socket, interest)
}

impl AsyncRead for QuietStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut readable = ready!(self.socket.poll_read_ready(cx))?;
            let read = readable.try_io(|socket| socket.get_ref().read(buf.initialize_unfilled()));
            match read {
                Ok(Ok(n)) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                // Nothing there after all.
                Err(_) => {}
            }
        }
    }
}

impl AsyncWrite for QuietStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |mut socket| socket.write(buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |mut socket| socket.write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// The kernel's bit for room to write.
    const EPOLLOUT: u32 = 4;
    /// More than a socket holds.
    const MANY_BYTES: usize = 8 << 20;

    fn pair() -> (QuietStream, tokio::net::UnixStream) {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        (QuietStream::new(ours).unwrap(), theirs)
    }

    #[tokio::test]
    async fn what_finds_no_room_waits_for_it_and_comes_whole() {
        let (mut ours, mut theirs) = pair();
        let sent: Vec<u8> = (0..MANY_BYTES).map(|i| (i % 251) as u8).collect();
        let expected = sent.clone();
        let writing = tokio::spawn(async move {
            ours.write_all(&sent).await.unwrap();
            ours.shutdown().await.unwrap();
            ours
        });
        let mut got = Vec::new();
        // A reader that lets the socket run full again and again.
        let mut part = vec![0; 300 << 10];
        loop {
            tokio::task::yield_now().await;
            match theirs.read(&mut part).await.unwrap() {
                0 => break,
                n => got.extend_from_slice(&part[..n]),
            }
        }
        assert!(got == expected);
        let ours = writing.await.unwrap();
        assert!(ours.full.is_none(), "nothing waits for room any more");
    }

    #[tokio::test]
    async fn both_ends_are_seen_to_close() {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(b"last words").await.unwrap();
        theirs.shutdown().await.unwrap();
        let mut heard = String::new();
        ours.read_to_string(&mut heard).await.unwrap();
        assert_eq!(heard, "last words");
        drop(theirs);
        let gone = ours.write(b"anyone?").await.unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }

    /// What the kernel reports of a descriptor, as it says itself; none where nobody asked it.
    fn watched(descriptor: &impl AsRawFd) -> Option<u32> {
        let row = format!("tfd: {:>8} events:", descriptor.as_raw_fd());
        let all = fs::read_dir("/proc/self/fdinfo").unwrap();
        // Other tests close theirs meanwhile.
        let mut all = all.filter_map(|one| fs::read_to_string(one.ok()?.path()).ok());
        all.find_map(|info| {
            let (_, events) = info.split_once(&row)?;
            u32::from_str_radix(events.split_whitespace().next()?, 16).ok()
        })
    }

    #[tokio::test]
    async fn room_is_watched_for_only_while_a_write_waits_for_it() {
        let (mut ours, mut theirs) = pair();
        assert_ne!(watched(&theirs).unwrap() & EPOLLOUT, 0, "tokio's own");
        assert_eq!(watched(&ours.socket).unwrap() & EPOLLOUT, 0);
        ours.write_all(b"a token").await.unwrap();
        assert!(ours.full.is_none());

        let much = vec![7; MANY_BYTES];
        let writing = ours.write_all(&much);
        let blocked = tokio::time::timeout(Duration::from_millis(50), writing);
        blocked.await.unwrap_err();
        assert_eq!(watched(&ours.socket).unwrap() & EPOLLOUT, 0);
        assert_ne!(watched(ours.full.as_ref().unwrap()).unwrap() & EPOLLOUT, 0);

        let mut part = vec![0; MANY_BYTES];
        let (taken, written) = tokio::join!(theirs.read(&mut part), ours.write(b"room"));
        assert!(taken.unwrap() > 0 && written.unwrap() == 4);
        assert!(ours.full.is_none());
    }
}
