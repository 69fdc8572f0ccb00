//! The quantization of a file as a whole (`general.file_type`): the mixture of types that it was
//! made with, by ggml's name.

/// The name of a value of llama.cpp's `enum llama_ftype`; `None` for unknown and removed values.
pub(crate) fn name(file_type: u32) -> Option<&'static str> {
    Some(match file_type {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        // Ollama's name; llama.cpp's own has `_MOE` behind it.
        38 => "MXFP4",
        39 => "NVFP4",
        40 => "Q1_0",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn what_is_no_number_of_a_file_type_has_no_name() {
        assert_eq!(name(15), Some("Q4_K_M"));
        // Taken out, llama.cpp's "guessed", and none at all.
        for none in [4, 33, 1024, u32::MAX] {
            assert_eq!(name(none), None, "{none}");
        }
    }
}
