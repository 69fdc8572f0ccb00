// Where the experts' tensors are: a table of the experts' addresses, and the tensors' places in
// each.
#pragma once
#include "compat.h"
#include "act.h"

#define NO_TENSOR (~(u64)0)

struct ExpertTensors {
    const u64* table;  // [n_expert]: address of an expert's tensors, or 0 for one that is not here
    // Bytes from there to the matrices [rows][cols], their biases [rows] f32 and one factor f32,
    // or NO_TENSOR. With a second matrix the products become act(first) * second, else
    // act(first); the factor comes last.
    u64 first, second, first_bias, second_bias, scale;
    u32 n_expert;
    u32 rows, cols;
    u32 reserved;
    ActSpec act;
};

// Address of the expert of that whole number; 0 for one that is not here.
FORCE const u8* expert_at(const ExpertTensors& e, float id) {
    const bool is = id >= 0.0f && id < (float)e.n_expert;
    return device_memory(is ? e.table[(u32)id] : 0);
}
FORCE float tensor_value(const u8* expert, u64 tensor, u32 i, float other) {
    return tensor == NO_TENSOR ? other : ((const float*)(expert + tensor))[i];
}
// What a row's products become.
FORCE float finish_expert(const ExpertTensors& e, const u8* expert, u32 row, float first, float second) {
    first += tensor_value(expert, e.first_bias, row, 0.0f);
    float v;
    if (e.second != NO_TENSOR) v = gate_of(e.act, first, second + tensor_value(expert, e.second_bias, row, 0.0f));
    else v = act_of(e.act, first);
    return v * tensor_value(expert, e.scale, 0, 1.0f);
}
