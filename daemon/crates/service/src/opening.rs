//! Declared models that are being registered: those who ask for one wait for it.
//!
//! *Invariant:* a name is here only while a registration that will come to it goes on: however that
//! ends, its names go (test `names_go_with_their_registration`).

use std::collections::HashMap;

use rocmforge_failure::Failure;
use tokio::sync::watch;

use crate::Service;
use crate::arrival::Arrival;

/// The names, each with how many registrations will come to it.
#[derive(Debug)]
pub(crate) struct Opening(watch::Sender<HashMap<String, usize>>);

impl Default for Opening {
    fn default() -> Self {
        Self(watch::Sender::new(HashMap::new()))
    }
}

/// The names that one registration has still to come to.
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
    /// The model is there, or cannot be.
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
    /// Waits until a declared model is there, or cannot be, that the daemon registers just now. Any
    /// other name is no reason to wait.
    ///
    /// # Errors
    /// The request's time is over.
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
