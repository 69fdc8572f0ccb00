//! Keys of KV pages and states in the store, derived from everything that determines their bytes.
//!
//! ```text
//!   root  = SHA-256(format, model, layout, device, rotation, adapters)
//!   page  = SHA-256(name of the page before or root, its 32 tokens)
//!   scope = SHA-256(client), or of "shared"
//! ```
//!
//! A name stands for all tokens up to its page. A page with an image and the pages after it have no
//! name: the numbers that stand for images differ between processes.

use rocmforge_kv_disk::Key;
use rocmforge_ops::Plan;
use sha2::{Digest, Sha256};

use crate::features::prefix_cache::Realm;
use crate::model::adapters::AdapterKey;
use crate::request::images::IMAGE;

/// Version of the content of pages and states. It changes when kernels store them differently.
const CONTENT_VERSION: u32 = 1;

/// The name of a prefix: a digest from which the keys of its last page are derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chain {
    scope: [u8; 16],
    digest: [u8; 32],
}

/// Digest of a list of byte strings, each with its length.
pub(super) fn digest_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// Digest of the shape of a model's pages and states.
pub(super) fn layout_digest(plan: &Plan) -> [u8; 32] {
    // The debug form has every field, also those that come later.
    let groups = format!("{:?}", plan.kv);
    let states = plan.state_elements.to_le_bytes();
    digest_of([groups.as_bytes(), &states])
}

impl Chain {
    /// The name of the empty prefix of a realm.
    pub(super) fn root(
        realm: Realm,
        is_shared: bool,
        (model, layout): ([u8; 32], [u8; 32]),
        device: &str,
    ) -> Self {
        let client = realm.asker.to_le_bytes();
        let scope = match is_shared {
            true => digest_of([b"shared".as_slice()]),
            false => digest_of([b"client".as_slice(), &client]),
        };
        // No part for none, so that what was written before there were adapters is found.
        let has_adapters = realm.adapters != AdapterKey::default();
        let adapters = has_adapters.then_some(&realm.adapters.0[..]);
        let parts = [
            b"rocmforge KV".as_slice(),
            &CONTENT_VERSION.to_le_bytes(),
            &model,
            &layout,
            device.as_bytes(),
            &[u8::from(realm.long)],
        ];
        let digest = digest_of(parts.into_iter().chain(adapters));
        let mut of_client = [0; 16];
        of_client.copy_from_slice(&scope[..16]);
        Self {
            scope: of_client,
            digest,
        }
    }

    /// The name of the prefix extended by one page of tokens; `None` if the page has an image.
    pub(crate) fn next(&self, tokens: &[u32]) -> Option<Self> {
        if tokens.iter().any(|&token| token & IMAGE != 0) {
            return None;
        }
        let mut hasher = Sha256::new();
        hasher.update(self.digest);
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        Some(Self {
            digest: hasher.finalize().into(),
            ..*self
        })
    }

    /// The store's key of a slot of the prefix's last page.
    pub(super) fn key(&self, slot: usize) -> Key {
        Key {
            scope: self.scope,
            digest: self.digest,
            // Plans have few groups.
            slot: slot as u16,
        }
    }
}
