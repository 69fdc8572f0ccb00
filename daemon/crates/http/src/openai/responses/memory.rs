//! Stores earlier responses and their items in memory, by the ids that clients refer to
//! (`previous_response_id`, `item_reference`): separately for each client, within bounds.
//!
//! Items have a separate store, since they are small beside their conversation and are referred to
//! for longer: an agent names each of them in every later step.
//!
//! *Invariant:* stored data is JSON text, so that its bytes are its memory; a client sees nothing
//! of another's (tests below).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::peer::Peer;

use crate::refusals;
use serde_json::{Value, json};

use super::super::super::prompt::TextOr;
use super::recent::{Bounds, Recent};

/// Limits on stored responses with their inputs.
const RESPONSES: Bounds = Bounds {
    entries: 1024,
    client_bytes: 16 << 20,
    bytes: 64 << 20,
};
/// Limits on stored items of responses.
const ITEMS: Bounds = Bounds {
    entries: 8192,
    client_bytes: 8 << 20,
    bytes: 32 << 20,
};
/// Maximum number of earlier responses in the chain that a response continues.
const CHAIN_MAX: usize = RESPONSES.entries;

/// A stored response.
#[derive(Debug)]
pub(super) struct Kept {
    /// Id of the response that this one continued.
    pub(super) previous: Option<String>,
    /// The input items that the response answered, a JSON list.
    pub(super) input: Box<str>,
    /// The response as JSON.
    pub(super) whole: Box<str>,
}

/// The stored responses and items of all clients.
#[derive(Debug)]
pub(in super::super::super) struct Memory(Mutex<Stores>);

#[derive(Debug)]
struct Stores {
    responses: Recent<Peer, Arc<Kept>>,
    items: Recent<Peer, Arc<str>>,
}

impl Default for Memory {
    fn default() -> Self {
        Self(Mutex::new(Stores {
            responses: Recent::new(RESPONSES),
            items: Recent::new(ITEMS),
        }))
    }
}

/// The stored data that a request refers to, not yet parsed.
#[derive(Debug)]
pub(super) struct Recalled {
    /// The responses that the request continues, oldest first.
    chain: Vec<Arc<Kept>>,
    /// The request's own items, with references replaced by stored items.
    own: Vec<Own>,
    /// Bytes of stored JSON to be parsed.
    bytes: usize,
}

#[derive(Debug)]
enum Own {
    Item(Value),
    Kept(Arc<str>),
}

impl Memory {
    /// Locks the stores. A poisoned lock is used: they are valid at every moment.
    fn lock(&self) -> MutexGuard<'_, Stores> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a response under its id, and its items under theirs.
    pub(super) fn keep(&self, peer: Peer, id: &str, kept: Kept, items: Vec<(String, String)>) {
        let mut stores = self.lock();
        let bytes = kept.input.len() + kept.whole.len();
        let responses = &mut stores.responses;
        responses.keep(peer, id.to_owned(), Arc::new(kept), bytes);
        for (name, item) in items {
            let bytes = item.len();
            stores.items.keep(peer, name, item.into(), bytes);
        }
    }

    /// A stored response of the client.
    ///
    /// # Errors
    ///
    /// NOT_FOUND if there is none with this id.
    pub(super) fn response(&self, peer: Peer, id: &str) -> Result<Arc<Kept>, Failure> {
        let found = self.lock().responses.get(peer, id);
        found.ok_or_else(|| refusals::unknown_response(id))
    }

    /// Deletes a response. Its items stay for conversations that name them.
    ///
    /// # Errors
    /// NOT_FOUND.
    pub(super) fn forget(&self, peer: Peer, id: &str) -> Result<(), Failure> {
        match self.lock().responses.forget(peer, id) {
            true => Ok(()),
            false => Err(refusals::unknown_response(id)),
        }
    }

    /// Finds the stored data that a request refers to.
    ///
    /// # Errors
    /// Names the field whose reference is unknown.
    pub(super) fn recall(
        &self,
        peer: Peer,
        previous: Option<&str>,
        input: TextOr<Value>,
    ) -> Result<Recalled, Failure> {
        let mut stores = self.lock();
        let mut chain = Vec::new();
        let mut next = previous.map(str::to_owned);
        while let Some(id) = next {
            let kept = stores.responses.get(peer, &id);
            let Some(kept) = kept.filter(|_| chain.len() < CHAIN_MAX) else {
                return Err(refusals::unknown_previous(&id));
            };
            next = kept.previous.clone();
            chain.push(kept);
        }
        chain.reverse();
        let items = match input {
            TextOr::Text(text) => {
                vec![json!({"type": "message", "role": "user", "content": text})]
            }
            TextOr::List(items) => items,
        };
        let mut own = Vec::with_capacity(items.len());
        for (at, item) in items.into_iter().enumerate() {
            own.push(match reference(&item) {
                None => Own::Item(item),
                Some(id) => match stores.items.get(peer, id) {
                    Some(kept) => Own::Kept(kept),
                    None => return Err(refusals::unknown_item(&format!("input[{at}]"), id)),
                },
            });
        }
        let of_chain = chain.iter().map(|kept| kept.input.len() + kept.whole.len());
        let of_items = own.iter().map(|own| match own {
            Own::Item(_) => 0,
            Own::Kept(item) => item.len(),
        });
        let bytes = of_chain.chain(of_items).sum();
        Ok(Recalled { chain, own, bytes })
    }
}

/// The id of the item that an item refers to. A reference may lack its type.
fn reference(item: &Value) -> Option<&str> {
    let id = item["id"].as_str()?;
    let is_bare = || item.as_object().is_some_and(|item| item.len() == 1);
    match item.get("type") {
        Some(Value::String(kind)) if kind == "item_reference" => Some(id),
        None | Some(Value::Null) if is_bare() => Some(id),
        _ => None,
    }
}

/// The input of a request with all references resolved.
#[derive(Debug)]
pub(super) struct Input {
    /// Number of items that come from earlier responses.
    pub(super) earlier: usize,
    /// All items of the conversation, those of earlier responses first.
    pub(super) items: Vec<Value>,
}

impl Recalled {
    /// Bytes of JSON that [`Recalled::read`] reads.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Parses the stored data.
    ///
    /// # Errors
    /// INTERNAL if it is not JSON.
    pub(super) fn read(self) -> Result<Input, Failure> {
        let mut items = Vec::new();
        for kept in &self.chain {
            let list = |value: Value| match value {
                Value::Array(list) => list,
                _ => Vec::new(),
            };
            items.extend(list(parsed(&kept.input)?));
            items.extend(list(parsed(&kept.whole)?["output"].take()));
        }
        let earlier = items.len();
        for own in self.own {
            items.push(match own {
                Own::Item(item) => item,
                Own::Kept(item) => parsed(&item)?,
            });
        }
        Ok(Input { earlier, items })
    }
}

fn parsed(text: &str) -> Result<Value, Failure> {
    serde_json::from_str(text)
        .map_err(|error| failure::bug(&format!("a kept response is no JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(previous: Option<&str>, said: &str, answered: &str) -> Kept {
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        Kept {
            previous: previous.map(str::to_owned),
            input: json!([message("user", said)]).to_string().into(),
            whole: json!({"output": [message("assistant", answered)]})
                .to_string()
                .into(),
        }
    }

    fn texts(input: &Input) -> Vec<&str> {
        let items = input.items.iter();
        items.filter_map(|item| item["content"].as_str()).collect()
    }

    #[test]
    fn a_request_goes_on_from_all_responses_before_it() {
        let memory = Memory::default();
        memory.keep(Peer::Local, "r1", kept(None, "a", "b"), Vec::new());
        memory.keep(Peer::Local, "r2", kept(Some("r1"), "c", "d"), Vec::new());
        let recall = |peer, id| memory.recall(peer, Some(id), TextOr::Text("e".to_owned()));
        let input = recall(Peer::Local, "r2").unwrap().read().unwrap();
        assert_eq!(texts(&input), ["a", "b", "c", "d", "e"]);
        assert_eq!(input.earlier, 4);
        // Another client's, one that never was, and one whose beginning is gone.
        assert!(recall(Peer::User(1), "r2").is_err());
        assert!(recall(Peer::Local, "r3").is_err());
        memory.forget(Peer::Local, "r1").unwrap();
        let gone = recall(Peer::Local, "r2").unwrap_err();
        assert_eq!(gone.fields()[0].0, "previous_response_id");
        assert!(memory.forget(Peer::Local, "r1").is_err());
    }

    #[test]
    fn items_are_known_by_their_names() {
        let memory = Memory::default();
        let item = json!({"id": "m1", "role": "assistant", "content": "b"}).to_string();
        let items = vec![("m1".to_owned(), item)];
        memory.keep(Peer::Local, "r1", kept(None, "a", "b"), items);
        let refer = |peer, item: Value| memory.recall(peer, None, TextOr::List(vec![item]));
        for reference in [
            json!({"type": "item_reference", "id": "m1"}),
            json!({"id": "m1"}),
        ] {
            let input = refer(Peer::Local, reference).unwrap().read().unwrap();
            assert_eq!((texts(&input), input.earlier), (vec!["b"], 0));
        }
        let unknown = json!({"type": "item_reference", "id": "m2"});
        let failure = refer(Peer::Local, unknown).unwrap_err();
        assert_eq!(failure.fields()[0].0, "input[0]");
        assert!(refer(Peer::User(1), json!({"id": "m1"})).is_err());
        // An item that brings all that it says is itself.
        let whole = json!({"id": "m2", "role": "user", "content": "x"});
        let input = refer(Peer::Local, whole).unwrap().read().unwrap();
        assert_eq!(texts(&input), ["x"]);
    }
}
