//! Limits per peer: running and queued requests, bytes of prompts, and tokens per minute.
//!
//! ```text
//! both skins -> Service::enter -> Ticket -+-> prompt bytes: counted until the ticket is dropped
//!                                         +-> tokens: what was spent flows off at the limit's rate
//!                                         +-> Ticket::asker: the engine counts what runs and waits
//! ```
//!
//! Tokens are those of prompts and outputs. A peer may spend a minute's tokens at once, and then
//! waits until enough of them have drained; a generation that has begun is never cut for it.
//!
//! *Invariants:* the lock of all peers is held to find, list or forget them; that of one peer for a
//! few sums, and never across an await. What a ticket counts is taken off when it is dropped (test
//! `bytes_count_while_their_request_is_under_way`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rocmforge_engine::Error;
use rocmforge_engine::api::{Asker, Class};
use rocmforge_failure::Failure;

use crate::Service;
use crate::arrival::Arrival;
use crate::peer::{Peer, TokenName};
use crate::refusals;
use crate::roles::Who;

/// Maximum number of rules of a configuration.
pub const RULES_MAX: usize = 256;
/// Number of peers above which those without requests and recently spent tokens are forgotten.
pub const PEERS_KEPT: usize = 1024;
/// Seconds of the period that a limit of tokens refers to.
const MINUTE_S: f64 = 60.0;

/// Limits of one peer; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerLimits {
    /// Maximum number of requests that run at once; further ones are queued.
    pub running: Option<u32>,
    /// Maximum number of queued requests; further ones are rejected.
    pub queued: Option<u32>,
    /// Maximum bytes of the prompts of all unfinished requests.
    pub prompt_bytes: Option<u64>,
    /// Maximum number of prompt and output tokens per minute.
    pub tokens_per_minute: Option<u64>,
}

impl PeerLimits {
    /// These limits, with those of `other` where none is set.
    fn or(self, other: &Self) -> Self {
        Self {
            running: self.running.or(other.running),
            queued: self.queued.or(other.queued),
            prompt_bytes: self.prompt_bytes.or(other.prompt_bytes),
            tokens_per_minute: self.tokens_per_minute.or(other.tokens_per_minute),
        }
    }
}

/// A rule of the configuration: limits, and the clients to which they apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Users and groups that the rule applies to; [`Who::Everyone`] includes clients with tokens.
    pub who: Who,
    /// Names of the tokens that the rule applies to.
    pub tokens: Vec<TokenName>,
    /// The limits of the rule.
    pub limits: PeerLimits,
}

/// All rules. Where several set a limit for a peer, its user's or token's wins over its groups',
/// and that over everyone's; of equals the last.
pub type Rules = Vec<Rule>;

/// The limits of a peer that is in the groups `gids`.
fn limits_of(rules: &[Rule], peer: Peer, gids: &[u32]) -> PeerLimits {
    let mut found = [PeerLimits::default(); 3];
    for rule in rules {
        let place = match (&rule.who, peer) {
            (_, Peer::Token(name)) if rule.tokens.contains(&name) => 0,
            (Who::Listed { users, .. }, Peer::User(uid)) if users.contains(&uid) => 0,
            (Who::Listed { groups, .. }, Peer::User(_))
                if gids.iter().any(|gid| groups.contains(gid)) =>
            {
                1
            }
            (Who::Everyone, _) => 2,
            (Who::Listed { .. }, _) => continue,
        };
        found[place] = rule.limits.or(&found[place]);
    }
    found[0].or(&found[1]).or(&found[2])
}

/// Current use of the limits by one peer.
#[derive(Debug)]
struct Used {
    peer: Peer,
    sums: Mutex<Sums>,
    tokens: AtomicU64,
    refused: [AtomicU64; Limit::ALL.len()],
}

#[derive(Debug)]
struct Sums {
    prompt_bytes: u64,
    /// Tokens that were spent and had not drained at the time `at`.
    spent: f64,
    at: Instant,
}

impl Sums {
    /// Drains the tokens for the time that has passed.
    fn flow(&mut self, per_minute: u64, now: Instant) {
        let passed_s = now.saturating_duration_since(self.at).as_secs_f64();
        self.spent = (self.spent - passed_s * per_minute as f64 / MINUTE_S).max(0.0);
        self.at = now;
    }
}

/// A limit that can reject a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The limit of queued requests.
    Queued,
    /// The limit of bytes of prompts.
    PromptBytes,
    /// The limit of tokens per minute.
    Tokens,
}

impl Limit {
    /// All limits.
    pub const ALL: [Self; 3] = [Self::Queued, Self::PromptBytes, Self::Tokens];

    /// The limit's key in the configuration.
    pub fn key(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::PromptBytes => "prompt_bytes",
            Self::Tokens => "tokens_per_minute",
        }
    }
}

impl Used {
    fn new(peer: Peer) -> Arc<Self> {
        let sums = Sums {
            prompt_bytes: 0,
            spent: 0.0,
            at: Instant::now(),
        };
        Arc::new(Self {
            peer,
            sums: Mutex::new(sums),
            tokens: AtomicU64::new(0),
            refused: Default::default(),
        })
    }

    /// Locks the sums. A poisoned lock is used: they are valid at every moment.
    fn sums(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_refused(&self, limit: Limit) {
        self.refused[limit as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Use of the limits by one peer, for `/metrics`.
#[derive(Debug, Clone)]
pub struct PeerUse {
    /// The peer that the numbers belong to.
    pub peer: Peer,
    /// Bytes of the prompts of the peer's unfinished requests.
    pub prompt_bytes: u64,
    /// Number of the peer's prompt and output tokens.
    pub tokens: u64,
    /// Number of the peer's requests that each limit rejected, in the order of [`Limit::ALL`].
    pub refused: [u64; Limit::ALL.len()],
}

/// The rules in force, and the use by each peer.
#[derive(Debug, Default)]
pub(crate) struct LimitBook {
    rules: RwLock<Arc<Rules>>,
    peers: Mutex<HashMap<Peer, Arc<Used>>>,
}

impl LimitBook {
    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn used(&self, peer: Peer) -> Arc<Used> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(used) = peers.get(&peer) {
            return Arc::clone(used);
        }
        if peers.len() >= PEERS_KEPT {
            // Whoever has nothing under way, and spent nothing within a minute, is forgotten.
            peers.retain(|_, used| {
                let idle = used.sums().at.elapsed().as_secs_f64() > MINUTE_S;
                Arc::strong_count(used) > 1 || !idle
            });
        }
        let used = Used::new(peer);
        peers.insert(peer, Arc::clone(&used));
        used
    }
}

/// A request that the limits admitted. Its prompt bytes count until it is dropped.
#[derive(Debug)]
pub struct Ticket {
    used: Arc<Used>,
    limits: PeerLimits,
    prompt_bytes: u64,
}

impl Ticket {
    fn new(used: Arc<Used>, limits: PeerLimits, bytes: u64) -> Result<Self, Failure> {
        {
            let mut sums = used.sums();
            if let Some(max) = limits.prompt_bytes
                && sums.prompt_bytes.saturating_add(bytes) > max
            {
                used.note_refused(Limit::PromptBytes);
                let peer = used.peer.to_string();
                return Err(refusals::prompts_held(&peer, max, sums.prompt_bytes, bytes));
            }
            sums.prompt_bytes += bytes;
        }
        let ticket = Self {
            used,
            limits,
            prompt_bytes: bytes,
        };
        // Before the work on its text: there has to be room for a token at least.
        ticket.spend(1, false)?;
        Ok(ticket)
    }

    /// Spends the tokens of a prompt.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED above the limit, with the time after which they would fit, if
    /// ever.
    pub fn take_prompt(&self, tokens: u32) -> Result<(), Failure> {
        self.spend(u64::from(tokens), true)
    }

    fn spend(&self, tokens: u64, take: bool) -> Result<(), Failure> {
        if let Some(max) = self.limits.tokens_per_minute {
            let mut sums = self.used.sums();
            sums.flow(max, Instant::now());
            let over = sums.spent + tokens as f64 - max as f64;
            if over > 0.0 {
                let wait = Duration::from_secs_f64(over * MINUTE_S / max.max(1) as f64);
                let retry_after = (tokens <= max).then_some(wait);
                let what = match retry_after {
                    Some(_) => format!(
                        "{tokens} tokens are more than are left of this minute, of which {} were used",
                        sums.spent.ceil()
                    ),
                    None => format!("this prompt has {tokens} tokens, more than a minute's"),
                };
                drop(sums);
                self.used.note_refused(Limit::Tokens);
                let peer = self.used.peer.to_string();
                let limit = (Limit::Tokens.key(), max);
                return Err(refusals::peer_limit(&peer, limit, &what, retry_after));
            }
            if take {
                sums.spent += tokens as f64;
            }
        }
        if take {
            self.used.tokens.fetch_add(tokens, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Spends tokens of the output.
    pub fn note_generated(&self, tokens: usize) {
        let tokens = tokens as u64;
        self.used.tokens.fetch_add(tokens, Ordering::Relaxed);
        if let Some(max) = self.limits.tokens_per_minute {
            let mut sums = self.used.sums();
            sums.flow(max, Instant::now());
            sums.spent += tokens as f64;
        }
    }

    /// Counts an error of the engine as a rejection, if a limit caused it.
    pub fn note_failed(&self, error: &Error) {
        if let Error::AskerLimit { .. } = error {
            self.used.note_refused(Limit::Queued);
        }
    }

    /// Converts an error of the engine, and counts it if a limit caused it.
    pub fn failure(&self, error: &Error) -> Failure {
        self.note_failed(error);
        refusals::from_engine(error)
    }

    /// The client for the engine, with the number of requests that it may run at once.
    pub fn asker(&self, class: Class) -> Asker {
        Asker {
            client: self.used.peer.client(),
            class,
            running_max: self.limits.running,
            queued_max: self.limits.queued,
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.used.sums().prompt_bytes -= self.prompt_bytes;
    }
}

impl Service {
    /// Admits a request with a prompt of `prompt_bytes` bytes, if its client's limits allow.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED with the limit that was reached.
    pub async fn enter(
        &self,
        arrival: &Arrival,
        prompt_bytes: usize,
    ) -> Result<Arc<Ticket>, Failure> {
        let peer = arrival.peer();
        let rules = self.limit_book.rules();
        let by_group = |rule: &Rule| rule.who.has_groups();
        let gids = match arrival.caller {
            Some(caller) if rules.iter().any(by_group) => self.roles.groups(caller).await,
            _ => Arc::default(),
        };
        let limits = limits_of(&rules, peer, &gids);
        let used = self.limit_book.used(peer);
        Ticket::new(used, limits, prompt_bytes as u64).map(Arc::new)
    }

    /// Sets the rules of limits for requests from now on.
    pub fn set_limits(&self, rules: Rules) {
        let place = self.limit_book.rules.write();
        *place.unwrap_or_else(PoisonError::into_inner) = Arc::new(rules);
    }

    /// Name of the client with this number, or the number if its name is no longer known.
    pub(crate) fn client_name(&self, client: u64) -> String {
        let peers = self.limit_book.peers.lock();
        let peers = peers.unwrap_or_else(PoisonError::into_inner);
        let found = peers.keys().find(|peer| peer.client() == client);
        found.map_or_else(|| format!("client {client}"), ToString::to_string)
    }

    /// Use of the limits by each peer, in the order of the peers.
    pub fn peers(&self) -> Vec<PeerUse> {
        let peers = self.limit_book.peers.lock();
        let all: Vec<Arc<Used>> = peers
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect();
        let mut all: Vec<PeerUse> = all
            .iter()
            .map(|used| PeerUse {
                peer: used.peer,
                prompt_bytes: used.sums().prompt_bytes,
                tokens: used.tokens.load(Ordering::Relaxed),
                refused: used.refused.each_ref().map(|n| n.load(Ordering::Relaxed)),
            })
            .collect();
        all.sort_by_key(|used| used.peer);
        all
    }
}

#[cfg(test)]
#[path = "limits_tests.rs"]
mod tests;
