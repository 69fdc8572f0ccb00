//! Speculative decoding: tokens that are drafted by n-grams of the text, by a model's MTP head or
//! by a draft model, and checked by the next pass.

pub(crate) mod draft_choice;
pub(crate) mod draft_kv;
pub(crate) mod draft_model;
mod draft_pass;
pub(crate) mod drafts;
pub(crate) mod mtp;
pub(crate) mod mtp_pass;
pub(crate) mod spare_states;
pub(crate) mod state;
