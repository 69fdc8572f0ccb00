//! Events of uploads, used again and again: making and destroying one takes calls of the driver,
//! and a layer of experts needs a dozen.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use rocmforge_device::Error;
use rocmforge_gpu_driver::{Context, Event};

use crate::failed;

use super::lock;

/// Most events that are kept for later.
const SPARE_MAX: usize = 256;

/// Where events come from and go back to.
#[derive(Debug)]
pub(super) struct Events {
    context: Context,
    spare: Arc<Mutex<Vec<Event>>>,
}

impl Events {
    pub(super) fn new(context: &Context) -> Self {
        Self {
            context: context.clone(),
            spare: Arc::default(),
        }
    }

    /// An event without a meaningful mark: it is to be recorded before it is waited for.
    pub(super) fn take(&self) -> Result<PooledEvent, Error> {
        let spare = lock(&self.spare).pop();
        let event = match spare {
            Some(event) => event,
            None => Event::new(&self.context, false).map_err(|e| failed("making an event", e))?,
        };
        Ok(PooledEvent {
            event: Some(event),
            spare: Arc::clone(&self.spare),
        })
    }
}

/// An event that goes back on drop. A wait for its mark that a stream has queued still holds:
/// streams wait for what was recorded when they were told to.
#[derive(Debug)]
pub(super) struct PooledEvent {
    event: Option<Event>,
    spare: Arc<Mutex<Vec<Event>>>,
}

impl Deref for PooledEvent {
    type Target = Event;

    fn deref(&self) -> &Event {
        self.event.as_ref().expect("it is there until the drop")
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        let mut spare = lock(&self.spare);
        if spare.len() < SPARE_MAX {
            spare.extend(self.event.take());
        }
    }
}

/// What uploads that began one after another come behind.
#[derive(Debug, Clone)]
pub(super) struct Before(Arc<PooledEvent>);

impl Before {
    pub(super) fn new(event: PooledEvent) -> Self {
        Self(Arc::new(event))
    }

    /// Whether both are the same mark.
    pub(super) fn is(&self, other: &Before) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for Before {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0
    }
}
