//! What happened, so that a simulation that never reached a case fails.

/// Declares the counters, and that each must have counted.
macro_rules! outcome {
    ($($name:ident: $what:literal,)*) => {
        /// Counts of what happened.
        #[derive(Debug, Default)]
        pub(crate) struct Outcome {
            pub(crate) operations: u64,
            pub(crate) longest_wait_passes: u64,
            $(#[doc = $what] pub(crate) $name: u64,)*
        }

        impl Outcome {
            pub(crate) fn assert_everything_happened(&self) {
                $(assert!(self.$name > 0, "never happened: {}", $what);)*
            }
        }
    };
}

outcome! {
    passes: "a pass",
    passes_of_many: "a pass of several sequences",
    passes_mixed: "a pass with decoding sequences and prompts",
    passes_cut: "a pass that left a decoding sequence out",
    passes_short: "a pass shortened by its scratch",
    suspended: "a pass that stopped between two steps",
    went_on: "a suspended pass that went on",
    waited_for: "a suspended pass that went on although it waits, since nobody else could",
    beside: "a pass beside a suspended one",
    held_back: "a pass that had no room beside a suspended one",
    short_of_room: "a shortage of room that only suspended passes could end",
    passes_long: "a pass longer than the shared one",
    switches: "a pass of another model than the one before",
    next_right: "a right guess of the next pass's model",
    stuck: "no pass, since all readers are slow",
    arrived: "an arrival",
    queue_full: "an arrival at a full queue",
    left_to_others: "an arrival at a queue whose last places are left to others",
    admitted: "an admission",
    readmitted: "an admission after a yield",
    admitted_beside: "an admission while others run",
    before_large_models: "an admission before one whose model has its share",
    yielded_to_model: "KV given to another model of the client",
    bypasses: "an admission before one that came first",
    protected: "an admission of one that waited too long",
    reused: "positions that were there already",
    yielded_for_room: "a yield when KV ran short",
    yielded_greedy: "a yield when KV ran short of another than the newest",
    yielded_to_interactive: "a yield of a batch sequence to an interactive one",
    yielded_blocked: "a yield of a sequence whose reader is slow",
    yielded_share: "a yield of a place to a client with less than its share",
    yielded_room: "a yield of KV to a client with less than its share",
    yielded_term: "all KV given for a while to one who had none",
    yielded_terms_again: "KV given for a while by one that had come back",
    readmitted_from_term: "the return of one that gave its KV for a while",
    yielded_slow: "a yield of a place by a slow reader",
    yielded_forced: "a yield that the engine asked for",
    never_fits: "a refusal of what never fits",
    no_room: "a refusal of what has begun",
    driver_refuses: "a refusal after memory was refused often",
    memory_refused: "a pass that was refused memory",
    expired: "a deadline that was over",
    cancelled: "a cancellation",
    cancelled_in_pass: "a cancellation while a pass ran",
    done: "an end that was due",
    drafts_kept: "a draft that was right",
    drafts_dropped: "a draft that was wrong",
    unloaded: "an unload with sequences",
    budget_shrunk: "a budget that shrank",
    drained: "a drain",
}
