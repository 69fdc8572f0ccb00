//! How a card was lost, as far as a code of its driver, its bus or the kernel tells.

/// How a card was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LossKind {
    /// Work on the card does not end.
    Hang,
    /// The scheduler in its firmware (MES, HWS) does not answer the kernel.
    SchedulerHang,
    /// The kernel has reset the card.
    Reset,
    /// The card is no longer on the bus, or does not answer there.
    Gone,
    /// A kernel on it did what it may not: an access to memory that is not its own, as a rule.
    Fault,
    /// The card's hardware failed beyond correction: memory or link.
    Hardware,
    /// The cause is unknown.
    Unknown,
}

/// What the kernel and the bus have to say of a card beside its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The kind of loss that it comes to.
    pub kind: LossKind,
    /// For people.
    pub words: String,
}
