// Where the rows and the recurrent states of a batch's sequences are.
#pragma once
#include "compat.h"

struct SequencePlace {
    u32 first_row, n_rows;  // rows are consecutive positions
    u32 first_position;     // at 0 the state begins as zeros, whatever memory holds
    u32 reserved;
    u64 state;              // address of the sequence's state
};
