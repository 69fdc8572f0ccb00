//! Declared models that are being registered; requests for one wait until it is.
//!
//! *Invariant:* a name is in the set only while a registration of it is running: however that ends,
//! its names are removed (test `names_go_with_their_registration`).

use std::collections::HashMap;

use rocmforge_failure::Failure;
use tokio::sync::watch;

use crate::Service;
use crate::arrival::Arrival;

/// For each name, the number of running registrations that will register it.
#[derive(Debug)]
pub(crate) struct Opening(watch::Sender<HashMap<String, usize>>);

impl Default for Opening {
    fn default() -> Self {
        Self(watch::Sender::new(HashMap::new()))
    }
}

/// The names that one registration has not registered yet; removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Begun<'a> {
    opening: &'a Opening,
    left: Vec<String>,
}

impl Opening {
    /// Begins a registration of these models.
    pub(crate) fn begin<'n>(&self, names: impl Iterator<Item = &'n String>) -> Begun<'_> {
        let left: Vec<_> = names.cloned().collect();
        self.0.send_modify(|opening| {
            for name in &left {
                *opening.entry(name.clone()).or_default() += 1;
            }
        });
        Begun {
            opening: self,
            left,
        }
    }

    fn end(&self, names: impl Iterator<Item = String>) {
        self.0.send_modify(|opening| {
            for name in names {
                if let Some(n) = opening.get_mut(&name) {
                    *n -= 1;
                }
            }
            opening.retain(|_, n| *n > 0);
        });
    }
}

impl Begun<'_> {
    /// Records that a model is registered, or cannot be.
    pub(crate) fn done(&mut self, name: &str) {
        if let Some(at) = self.left.iter().position(|left| left == name) {
            self.opening.end(std::iter::once(self.left.swap_remove(at)));
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.opening.end(self.left.drain(..));
    }
}

impl Service {
    /// Waits while the daemon is registering the declared model `name`; returns at once for any
    /// other name.
    ///
    /// # Errors
    /// The request's deadline passed.
    pub async fn opened(&self, name: &str, arrival: &Arrival) -> Result<(), Failure> {
        let mut opening = self.opening.0.subscribe();
        let waits = async {
            let ended = |names: &HashMap<_, _>| !names.contains_key(&*self.meant(name));
            // The sender is the service's own.
            let _ = opening.wait_for(ended).await;
            Ok(())
        };
        arrival.limit(waits).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_with_their_registration() {
        let opening = Opening::default();
        let names = ["a".to_owned(), "b".to_owned()];
        let there = |name: &str| opening.0.borrow().contains_key(name);
        let mut first = opening.begin(names.iter());
        let second = opening.begin(names[..1].iter());
        first.done("a");
        first.done("a");
        assert!(there("a") && there("b"), "another registration comes to it");
        drop(first);
        assert!(there("a") && !there("b"));
        drop(second);
        assert!(opening.0.borrow().is_empty());
    }
}
