//! Operation vocabulary, the Device trait and its devices.
