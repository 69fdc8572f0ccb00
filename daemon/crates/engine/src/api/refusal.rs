//! What stands in the way of a request that waiting alone does not mend, one variant
//! a cause, with the numbers.
//!
//! Programs tell the causes apart by [`Refusal::reason`] and read [`Refusal::numbers`]; people read
//! `Display`, which says what to do.

/// Why the engine rejects a call in its present state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The most models are loaded.
    #[error("{max} models are loaded, the most there can be; unload one")]
    TooManyModels {
        /// The maximum number of loaded models.
        max: u64,
    },
    /// A model that requests use is to be unloaded.
    #[error(
        "model '{model}' has {requests} requests that run or wait; let them end, or unload with force"
    )]
    Busy {
        /// The model.
        model: String,
        /// The model's requests.
        requests: u64,
    },
    /// A model that is pinned is to be unloaded.
    #[error("model '{model}' is pinned; unpin it, or unload with force")]
    Pinned {
        /// The model.
        model: String,
        /// Bytes of the model's pinned segments.
        pinned_bytes: u64,
    },
    /// The model went before the request came to the engine, or while it waited or ran.
    #[error(
        "model '{model}' was unloaded under the request; load it again (over HTTP declared models and those of model \
         directories are loaded by the next request)"
    )]
    Unloaded {
        /// The model.
        model: String,
    },
    /// The name was given to another model in the meantime.
    #[error("model '{model}' was unloaded and loaded again meanwhile; send the request again")]
    Reloaded {
        /// The model.
        model: String,
    },
    /// The pins would leave too little to run.
    #[error(
        "these pins of '{model}' leave too little to run: with the largest segment that stays unpinned {need} bytes \
         are needed, the budget is {budget}; pin less, or raise the budget"
    )]
    PinTooLarge {
        /// The model.
        model: String,
        /// Bytes that pins, running work and the largest segment beside them need.
        need: u64,
        /// The budget.
        budget: u64,
    },
    /// The model, or the request, is larger than the budget can ever hold.
    #[error("{message}")]
    NeverFits {
        /// What needs how much, and what to do.
        message: String,
        /// Bytes needed.
        need: u64,
        /// The budget.
        budget: u64,
        /// Pinned bytes of the budget.
        pinned: u64,
    },
    /// The device's driver refuses memory that the request cannot do without.
    #[error("{message}")]
    NoDeviceMemory {
        /// Which memory was refused, and what to do.
        message: String,
        /// Bytes needed.
        need: u64,
        /// The budget that would be left.
        budget: u64,
    },
    /// No such budget can be had.
    #[error(
        "a budget of {asked} bytes is not possible: the minimum is {min}, and the device's memory is {max}; choose \
         a value between them"
    )]
    BudgetOutOfRange {
        /// Bytes asked for.
        asked: u64,
        /// The least.
        min: u64,
        /// The device's memory.
        max: u64,
    },
    /// A budget in which no request could run beside what the device keeps for itself.
    #[error(
        "a budget of {asked} bytes is too small: the device keeps {staging} bytes of it for uploads and passes, and the \
         least in which a loaded model can run is {min}; choose {min} or more, or start the daemon with a smaller budget"
    )]
    BudgetTooSmall {
        /// Bytes asked for.
        asked: u64,
        /// The least.
        min: u64,
        /// Bytes that the device keeps for itself, by the budget at the start.
        staging: u64,
    },
    /// A model's pieces are held, which passes in a moment.
    #[error("{message}")]
    InUse {
        /// What uses the memory, as text.
        message: String,
    },
    /// A setting of the environment that cannot be used.
    #[error("{message}")]
    Setting {
        /// Name of the environment variable, and what to do.
        message: String,
    },
}

impl Refusal {
    /// The cause in capitals, for programs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooManyModels { .. } => "TOO_MANY_MODELS",
            Self::Busy { .. } => "MODEL_BUSY",
            Self::Pinned { .. } => "MODEL_PINNED",
            Self::Unloaded { .. } => "MODEL_UNLOADED",
            Self::Reloaded { .. } => "MODEL_RELOADED",
            Self::PinTooLarge { .. } => "PIN_TOO_LARGE",
            Self::NeverFits { .. } => "NEVER_FITS",
            Self::NoDeviceMemory { .. } => "NO_DEVICE_MEMORY",
            Self::BudgetOutOfRange { .. } | Self::BudgetTooSmall { .. } => "BUDGET_OUT_OF_RANGE",
            Self::InUse { .. } => "IN_USE",
            Self::Setting { .. } => "SETTING",
        }
    }

    /// The model that the refusal is about, if it is about one.
    pub fn model(&self) -> Option<&str> {
        match self {
            Self::Busy { model, .. }
            | Self::Pinned { model, .. }
            | Self::Unloaded { model }
            | Self::Reloaded { model }
            | Self::PinTooLarge { model, .. } => Some(model),
            Self::TooManyModels { .. }
            | Self::NeverFits { .. }
            | Self::NoDeviceMemory { .. }
            | Self::BudgetOutOfRange { .. }
            | Self::BudgetTooSmall { .. }
            | Self::InUse { .. }
            | Self::Setting { .. } => None,
        }
    }

    /// The numbers by name; those that count bytes say so.
    pub fn numbers(&self) -> Vec<(&'static str, u64)> {
        match *self {
            Self::TooManyModels { max } => vec![("max", max)],
            Self::Busy { requests, .. } => vec![("requests", requests)],
            Self::Pinned { pinned_bytes, .. } => vec![("pinned_bytes", pinned_bytes)],
            Self::PinTooLarge { need, budget, .. } | Self::NoDeviceMemory { need, budget, .. } => {
                vec![("need_bytes", need), ("budget_bytes", budget)]
            }
            Self::NeverFits {
                need,
                budget,
                pinned,
                ..
            } => vec![
                ("need_bytes", need),
                ("budget_bytes", budget),
                ("pinned_bytes", pinned),
            ],
            Self::BudgetOutOfRange { asked, min, max } => vec![
                ("asked_bytes", asked),
                ("min_bytes", min),
                ("max_bytes", max),
            ],
            Self::BudgetTooSmall {
                asked,
                min,
                staging,
            } => vec![
                ("asked_bytes", asked),
                ("min_bytes", min),
                ("staging_bytes", staging),
            ],
            Self::Unloaded { .. }
            | Self::Reloaded { .. }
            | Self::InUse { .. }
            | Self::Setting { .. } => Vec::new(),
        }
    }
}
