//! Waiting for the device, with a watchdog: work that has not ended in time
//! means that the device hangs.

use std::time::{Duration, Instant};

use rocmforge_device::{Error, Loss, LossKind};
use rocmforge_gpu_driver::Event;

use super::errors::failed;

/// How long an event is asked for without a pause: most waits end in it.
const SPIN: Duration = Duration::from_millis(20);

/// Waits until the event has passed.
///
/// # Errors
/// [`Error::Lost`] if it takes longer than `patience`, or the work before it failed for good.
pub(super) fn until_passed(event: &Event, patience: Duration) -> Result<(), Error> {
    let begin = Instant::now();
    loop {
        for _ in 0..16 {
            if event
                .is_passed()
                .map_err(|e| failed("waiting for the device", e))?
            {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let waited = begin.elapsed();
        if waited > patience {
            let reason = format!(
                "a kernel or copy has not ended after {} s",
                waited.as_secs()
            );
            return Err(Error::Lost(Loss::new(LossKind::Hang, reason)));
        }
        if waited > SPIN {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
