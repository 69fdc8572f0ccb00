//! Hit ratio in bytes of the default policy, plain LRU and offline Belady over traces of passes.

fn main() {}
