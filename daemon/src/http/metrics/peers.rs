//! What each peer has under way and has taken, and what its limits refused.

use rocmforge_engine::api::Snapshot;
use rocmforge_service::limits::{Limit, PeerUse};

use super::text::Text;

/// The label by which peers are told apart: `user:UID`, `token:NAME` or `local`.
const PEER: &str = "peer";

/// Writes all of it. `peers` are those that asked within the last minutes, and some before them.
pub(super) fn write(peers: &[PeerUse], snapshot: &Snapshot, text: &mut Text) {
    let requests = |used: &PeerUse| {
        let client = used.peer.client();
        let found = snapshot.clients.iter().find(|c| c.client == client);
        found.map_or((0, 0), |c| (c.running, c.queued))
    };
    type Value<'f> = &'f dyn Fn(&PeerUse) -> f64;
    let rows: [(&str, &str, &str, Value<'_>); 4] = [
        (
            "rocmforge_peer_requests_running",
            "gauge",
            "Requests of a user or token that run",
            &|used| f64::from(requests(used).0),
        ),
        (
            "rocmforge_peer_requests_queued",
            "gauge",
            "Requests of a user or token that wait",
            &|used| f64::from(requests(used).1),
        ),
        (
            "rocmforge_peer_prompt_bytes",
            "gauge",
            "Bytes of the prompts of its requests under way",
            &|used| used.prompt_bytes as f64,
        ),
        (
            "rocmforge_peer_tokens_total",
            "counter",
            "Tokens of its prompts and answers",
            &|used| used.tokens as f64,
        ),
    ];
    for (name, kind, help, value) in rows {
        text.head(name, kind, help);
        for used in peers {
            text.value(name, &[(PEER, &used.peer.to_string())], value(used));
        }
    }
    let name = "rocmforge_peer_refused_total";
    text.head(name, "counter", "Requests that a limit of the peer refused");
    for used in peers {
        let peer = used.peer.to_string();
        for (limit, n) in Limit::ALL.iter().zip(used.refused) {
            let labels = [(PEER, peer.as_str()), ("limit", limit.key())];
            text.value(name, &labels, n as f64);
        }
    }
}
