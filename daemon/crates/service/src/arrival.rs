//! A request's client, arrival time and deadline.

use std::time::{Duration, Instant};

use rocmforge_failure::{self as failure, Failure};

use crate::peer::{Peer, TokenName};
use crate::trace::Parent;

/// A client's process, as the kernel identifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User id of the client.
    pub uid: u32,
    /// Primary group id of the client.
    pub gid: u32,
    /// Process id of the client; 0 if it is outside of the daemon's pid namespace.
    pub pid: i32,
}

impl Caller {
    /// The user id that stands for an unknown user.
    pub const NOBODY: u32 = 65_534;

    /// A client whose user and process the kernel does not report, as over TCP.
    pub fn unknown() -> Self {
        Self {
            uid: Self::NOBODY,
            gid: Self::NOBODY,
            pid: 0,
        }
    }
}

/// Client of a request, arrival time, and deadline if it has one.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// The process that sent the request.
    pub caller: Option<Caller>,
    /// The bearer token of the request, over TCP.
    pub token: Option<TokenName>,
    /// Arrival time of the request.
    pub at: Instant,
    /// Deadline of the request.
    pub deadline: Option<Instant>,
    /// The client's trace span that the request is part of.
    pub parent: Option<Parent>,
}

impl Arrival {
    /// A request that arrives now, without a deadline.
    pub fn now(caller: Option<Caller>) -> Self {
        Self {
            caller,
            token: None,
            at: Instant::now(),
            deadline: None,
            parent: None,
        }
    }

    /// The client, as limits and the scheduler identify it.
    pub fn peer(&self) -> Peer {
        match (self.caller, self.token) {
            (Some(caller), _) => Peer::User(caller.uid),
            (None, Some(token)) => Peer::Token(token),
            (None, None) => Peer::Local,
        }
    }

    /// Makes the request a part of the trace that a `traceparent` header names, if that is valid.
    #[must_use]
    pub fn part_of(mut self, traceparent: Option<&str>) -> Self {
        self.parent = traceparent.and_then(Parent::read);
        self
    }

    /// Limits the request's time from its arrival to `timeout`. A deadline beyond the clock's range
    /// counts as none.
    #[must_use]
    pub fn within(mut self, timeout: Duration) -> Self {
        self.deadline = self.at.checked_add(timeout);
        self
    }

    /// The arrival without a deadline, for work that other requests wait for, too.
    pub(crate) fn without_deadline(&self) -> Self {
        Self {
            deadline: None,
            ..*self
        }
    }

    /// Ends at the deadline, with DEADLINE_EXCEEDED; never without one.
    pub async fn passed(&self) -> Failure {
        match self.deadline {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => std::future::pending().await,
        }
        failure::deadline()
    }

    /// Runs `work`, and drops it at the deadline, which cancels it.
    ///
    /// # Errors
    /// DEADLINE_EXCEEDED, and those of `work`.
    pub async fn limit<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match self.deadline {
            None => work.await,
            // A new timer would fire with the next tick only, and the server's may have fired by
            // then.
            Some(deadline) if Instant::now() >= deadline => Err(failure::deadline()),
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), work).await {
                Ok(result) => result,
                Err(_) => Err(failure::deadline()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_failure::Kind;

    use super::*;

    #[tokio::test]
    async fn work_past_its_deadline_is_dropped_with_the_right_code() {
        let arrival = Arrival::now(None).within(Duration::from_millis(5));
        let failure = arrival
            .limit(std::future::pending::<Result<(), Failure>>())
            .await
            .unwrap_err();
        assert_eq!(failure.kind(), Kind::DeadlineExceeded);
        let late = arrival.limit(async { Ok(()) }).await;
        assert_eq!(late.unwrap_err().kind(), Kind::DeadlineExceeded);
        let free = Arrival::now(None);
        assert!(free.limit(async { Ok(()) }).await.is_ok());
    }
}
