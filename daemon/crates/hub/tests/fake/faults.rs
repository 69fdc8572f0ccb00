//! What can go wrong with a hub.

/// What goes wrong with the file itself.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fault {
    /// The connection ends after so many bytes of a body.
    CutAfter(usize),
    /// The connection ends before the answer.
    CutHead,
    /// A status, with headers behind it.
    Status(u16, &'static str),
    /// All of the file is sent, whatever was asked for.
    IgnoreRange,
    /// Likewise, and cut.
    IgnoreRangeAndCut(usize),
    /// Another range than was asked for.
    OtherRange(u64),
    /// Status 206 without `Content-Range`.
    NoContentRange,
    /// A `Content-Range` that is none.
    OddContentRange(&'static str),
    /// Another length of the whole file.
    TotalIs(u64),
    /// A body that is announced longer than it is.
    Announces(usize),
    /// A body that is announced shorter than it is.
    AnnouncesLess(usize),
    /// More bytes than were asked for.
    Longer(usize),
    /// Fewer bytes than were asked for, as `Content-Range` says.
    Shorter(u64),
    /// In pieces, without a length.
    Chunked,
    /// In pieces, of which the last never comes.
    ChunkedCut,
    /// Other bytes and another ETag from now on.
    Change,
    /// Other bytes without any sign.
    ChangeSilently,
    /// A shorter file from now on, with another ETag.
    Shrink,
    /// A bit is wrong in each answer.
    WrongBit,
    /// The hub's header tells another checksum.
    LinkedEtag(&'static str),
    /// Leads to this place.
    Lead(String),
    /// Leads to itself.
    LeadForEver,
    /// So many bytes every so many milliseconds.
    Drip(usize, u64),
    /// The head, and nothing behind it.
    StallBody,
    /// Nothing at all.
    StallHead,
    /// Says that the body is compressed.
    Coding(&'static str),
    /// A page for people.
    Html,
    /// No ETag.
    NoEtag,
    /// Another ETag in each answer.
    EtagEachTime,
    /// An ETag that compares weakly.
    WeakEtag,
    /// Bytes that are no HTTP.
    Garbage,
    /// A head that does not end.
    EndlessHead,
    /// An answer without a body.
    Empty,
}

/// What goes wrong with lists.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ListFault {
    /// A status, with headers behind it.
    Status(u16, &'static str),
    /// A text in the place of JSON.
    Text(&'static str),
    /// The answer ends early.
    Cut,
    /// Nothing comes.
    Stall,
    /// Files are listed longer by so much.
    SizeOff(i64),
    /// Another checksum.
    WrongSha,
    /// No checksums.
    NoSha,
    /// More files, of names that lead elsewhere.
    Hostile,
    /// Each page has a next one.
    Endless,
    /// Leads to this place.
    Lead(String),
    /// No files.
    Empty,
    /// A file of no bytes.
    NoBytes,
    /// A file longer than any disk.
    Huge,
}
