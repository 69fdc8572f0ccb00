//! Reasons for which the engine rejects a call, and which waiting alone does not fix; one variant
//! for each cause, with its numbers.
//!
//! Programs tell the causes apart by [`Refusal::reason`] and read [`Refusal::numbers`]; people read
//! `Display`, which says what to do.

/// Why the engine rejects a call in its present state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// As many models are loaded as the engine allows.
    #[error("{max} models are loaded, the most there can be; unload one")]
    TooManyModels {
        /// The maximum number of loaded models.
        max: u64,
    },
    /// A model cannot be unloaded while requests use it.
    #[error(
        "model '{model}' has {requests} requests that run or wait; let them end, or unload with force"
    )]
    Busy {
        /// The model to unload.
        model: String,
        /// Number of the model's requests.
        requests: u64,
    },
    /// A pinned model cannot be unloaded.
    #[error("model '{model}' is pinned; unpin it, or unload with force")]
    Pinned {
        /// The model to unload.
        model: String,
        /// Bytes of the model's pinned segments.
        pinned_bytes: u64,
    },
    /// The model was unloaded before the request reached the engine, or while it waited or ran.
    #[error(
        "model '{model}' was unloaded under the request; load it again (over HTTP declared models and those of model \
         directories are loaded by the next request)"
    )]
    Unloaded {
        /// The unloaded model.
        model: String,
    },
    /// The model was unloaded, and another one has its name now.
    #[error("model '{model}' was unloaded and loaded again meanwhile; send the request again")]
    Reloaded {
        /// The model's name.
        model: String,
    },
    /// The pins would leave too little memory for requests to run.
    #[error(
        "these pins of '{model}' leave too little to run: with the largest segment that stays unpinned {need} bytes \
         are needed, the budget is {budget}; pin less, or raise the budget"
    )]
    PinTooLarge {
        /// The model whose segments were to be pinned.
        model: String,
        /// Bytes that pins, running work and the largest unpinned segment need together.
        need: u64,
        /// The budget in bytes.
        budget: u64,
    },
    /// The model, or the request, is larger than the budget can ever hold.
    #[error("{message}")]
    NeverFits {
        /// What needs how much memory, and what to do about it.
        message: String,
        /// Bytes that the model or the request needs.
        need: u64,
        /// The budget in bytes.
        budget: u64,
        /// Bytes of the budget that pinned segments take.
        pinned: u64,
    },
    /// The device's driver refuses memory that the request cannot do without.
    #[error("{message}")]
    NoDeviceMemory {
        /// Which memory was refused, and what to do.
        message: String,
        /// Bytes that the request needs.
        need: u64,
        /// The budget, in bytes, that would be left.
        budget: u64,
    },
    /// The budget asked for is below the minimum or above the device's memory.
    #[error(
        "a budget of {asked} bytes is not possible: the minimum is {min}, and the device's memory is {max}; choose \
         a value between them"
    )]
    BudgetOutOfRange {
        /// The budget asked for, in bytes.
        asked: u64,
        /// The smallest possible budget, in bytes.
        min: u64,
        /// The device's memory in bytes.
        max: u64,
    },
    /// No request could run in the budget asked for, beside the memory that the device keeps for
    /// itself.
    #[error(
        "a budget of {asked} bytes is too small: the device keeps {staging} bytes of it for uploads and passes, and the \
         least in which a loaded model can run is {min}; choose {min} or more, or start the daemon with a smaller budget"
    )]
    BudgetTooSmall {
        /// The budget asked for, in bytes.
        asked: u64,
        /// The smallest possible budget, in bytes.
        min: u64,
        /// Bytes that the device keeps for itself (staging and workspace), by the budget at the
        /// start.
        staging: u64,
    },
    /// Memory is in use by requests, segments or uploads, which ends soon.
    #[error("{message}")]
    InUse {
        /// What uses the memory, as a message.
        message: String,
    },
    /// An environment variable has a value that cannot be used.
    #[error("{message}")]
    Setting {
        /// Name of the environment variable, and what to do.
        message: String,
    },
}

impl Refusal {
    /// The name of the cause in capitals, for programs.
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

    /// The model that the refusal concerns, if there is one.
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

    /// The refusal's numbers by name; names of byte counts end in `bytes`.
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
