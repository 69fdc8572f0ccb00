// Where the rows and the recurrent states of a batch's sequences are. A sequence's drafts are rows
// behind its own; the state is kept behind its rows and behind each draft, since which of the
// drafts are right is known later.
#pragma once
#include "compat.h"

struct SequencePlace {
    u32 first_row, n_rows;  // rows are consecutive positions; none for the place of a draft
    u32 first_position;     // at 0 the state begins as zeros, whatever memory holds
    u32 drafts;             // rows behind these, each with its own place behind this one
    u64 state;              // address of the sequence's state
    u64 state_out;          // where the state behind the rows goes, or behind the draft
    u32 last;               // the last position that rows attend to where they attend ahead; 0: no further than their own
    u32 reserved;
};
