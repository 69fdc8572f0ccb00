//! A forward pass of a model over rows of some sequences, and the measured times of passes.

pub(crate) mod backlog;
pub(crate) mod costs;
pub(crate) mod experts;
pub(crate) mod found;
pub(crate) mod given;
pub(crate) mod inputs;
pub(crate) mod interleave;
pub(crate) mod lookahead;
pub(crate) mod member;
pub(crate) mod pace;
pub(crate) mod pieces;
pub(crate) mod prepared;
pub(crate) mod price;
pub(crate) mod row_threads;
pub(crate) mod run;
pub(crate) mod share;
pub(crate) mod slices;
pub(crate) mod space;
pub(crate) mod spec;
pub(crate) mod stepwise;
pub(crate) mod suspended;
pub(crate) mod times;
pub(crate) mod work;
