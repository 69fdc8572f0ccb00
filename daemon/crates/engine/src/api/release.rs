//! Release of device memory until the next request: settings and result.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::api::Command;
use crate::api::error::Error;
use crate::api::handle::EngineHandle;

/// Configuration of idle release: when memory of an idle device is given back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IdleRelease {
    /// Time without requests after which memory is released; `None` for never.
    pub after: Option<Duration>,
    /// Whether each release also gives host memory back: KV pages, and weights that the CPU
    /// computes with.
    pub host: bool,
}

/// What a release of the device's memory did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// Bytes of device memory that were given back, by the driver's count if it has one.
    pub freed_bytes: u64,
    /// Bytes of device memory that stay, by the driver's count if it has one: pinned weights, and
    /// what the device keeps for itself.
    pub kept_bytes: u64,
    /// The budget that the next request restores.
    pub budget_bytes: u64,
    /// Bytes of host memory that were given back.
    pub host_freed_bytes: u64,
}

impl EngineHandle {
    /// Gives the device's memory back until the next request; with `host`, host memory as well.
    ///
    /// # Errors
    /// [`Error::Precondition`] while requests run or wait, or the command could not be
    /// sent.
    pub async fn release(&self, host: bool) -> Result<Released, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Release { host, reply })?;
        self.answered(answer).await?
    }

    /// Changes when the device's memory is given back without a command.
    ///
    /// # Errors
    ///
    /// The command could not be sent.
    pub async fn set_idle_release(&self, config: IdleRelease) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::SetIdleRelease { config, reply })?;
        self.answered(answer).await?
    }
}
