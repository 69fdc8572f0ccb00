//! Hyperparameters, weight map and execution plan; one file per architecture.
