//! Decides which waiting sequences are admitted, and which sequences go into the next pass of which
//! model.
//!
//! Pure: no clock, thread, channel or device. [`Scheduler`] is a value with methods; the engine
//! thread owns it, keeps channels, samplers and KV pages in a table by [`SeqId`], and goes round:
//!
//! ```text
//!   arrive, end, set_ready, model_unloaded     commands and readers
//!        |
//!   admit(view, now) -> actions                carried out in the order given
//!        |                                     (reused: what an admitted one finds computed)
//!   next(view) -> a pass, or one to go on      a slice of the pass runs
//!        |
//!   took(model, microseconds, ended)           what the slice took
//!        |            \
//!        |             suspend(plan)           not at its end: other models' slices may run
//!        |
//!   pass_ended(model)                          at its end
//!        |
//!   computed(results) or memory_refused(seqs)  then with a smaller budget in the next view
//! ```
//!
//! Time that passes took is told by the engine, in microseconds; deadlines are ticks that are
//! compared and nothing else; sequences' patience is counted in passes. No decision uses floating
//! point, and the same calls give the same answers.
//!
//! *Invariants*, asserted here or held by the simulation in `tests/`:
//! - What runs fits: the KV that is promised to running sequences, the largest segment and the
//!   scratch of a pass, with what is held by others, is at most the budget after every
//!   [`Scheduler::admit`].
//! - If a sequence can go on, a pass is planned or goes on. One that waits for an upload goes on
//!   only if nothing else can.
//! - A model has one pass under way at a time, and all have [`Config::passes_max`] at most. What a
//!   suspended pass has rows of does not yield.
//! - A model whose passes are short waits for slices of others that are as long as what it had
//!   itself, and for one slice more (`turns.rs`).
//! - In a pass of a model each of its sequences that decodes has a row, as far as the pass's limits
//!   go; those left out go first in the next.
//! - Sequences of one client and class are admitted in the order in which they came, unless a
//!   reader is slow.
//! - Where all places are taken, a client that runs fewer sequences than its share waits a bounded
//!   number of passes for one of another client that runs more, if the budget has room for it
//!   (`places.rs`). No sequence is preempted for a lower class.
//! - Where KV alone is short, nobody gives any to a client of its class that would then have more
//!   than the giver (`room.rs`). Batch that yields to interactive, what yields where nobody can go
//!   on, promises that do not fit any more, KV that goes with a place and terms do not ask for
//!   that.
//! - A client or model that runs nothing, and has no room, waits until those that have it had their
//!   terms: a time that is long beside what it costs to bring them back (`terms.rs`).
//! - What is admitted ends, unless the budget becomes too small for it alone.
//! - Everyone who waits has his turn after a bounded number of passes; where his client has its
//!   share of KV, and others with less come again and again, when its other sequences have ended.
//!
//! Cost: [`Scheduler::next`] looks at each running sequence a few times, [`Scheduler::admit`] also
//! at the first of each queue, and where all places are taken or KV is short once more at what runs
//! for each of those.

#![forbid(unsafe_code)]

mod admission;
mod config;
mod demand;
mod error;
mod pass;
mod places;
mod plan;
mod pressure;
mod promise;
mod promised;
mod queues;
mod room;
mod scheduler;
mod sequence;
mod suspended;
mod terms;
mod turns;
mod view;

pub use config::Config;
pub use error::{Demand, NotTaken, Refusal};
pub use plan::{Action, Next, PassPlan, SpanPlan, SpanResult};
pub use pressure::shrunk_budget;
pub use promise::{CannotHold, Promise, Share, TooShort, least_gap, slack_us, slice_is_over};
pub use scheduler::{Scheduler, are_left_to_others};
pub use sequence::{Arrival, Class, ClientId, Kind, ModelId, SeqId, SequenceStatus, Tick};
pub use view::{Costs, ModelView, View};
