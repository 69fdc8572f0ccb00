//! Probes this machine's GPUs for clients that ask.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use rocmforge_failure::Failure;
use rocmforge_service::machine::{FoundDriver, Machine, Told};

use crate::devices::Devices;
use crate::self_test::SelfTest;

/// The machine that the daemon runs on.
#[derive(Debug, Default)]
pub(crate) struct ThisMachine {
    devices: Arc<Devices>,
    self_test: SelfTest,
}

impl Machine for ThisMachine {
    fn drivers(&self) -> BoxFuture<'_, Arc<[FoundDriver]>> {
        Box::pin(self.devices.list())
    }

    fn self_test(&self, device: String) -> BoxFuture<'_, Result<Vec<Told>, Failure>> {
        Box::pin(self.self_test.run(device))
    }
}
