//! The units of compilation: one source with its definitions and headers, as one text.
//!
//! `hip/units.txt` lists them. A unit's text needs no include path and no definitions from outside,
//! so it is also what a cache of compiled units is keyed by.

const UNITS: &str = include_str!("../hip/units.txt");

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../hip/", $name)))),*]
    };
}

/// Every source and header.
const FILES: [(&str, &str); 60] = files![
    "compat.h",
    "formats.h",
    "formats_low_bits.h",
    "codebook_iq1.h",
    "codebook_iq2_s.h",
    "codebook_iq2_xs.h",
    "codebook_iq2_xxs.h",
    "codebook_iq3_s.h",
    "codebook_iq3_xxs.h",
    "repack_low_bits.h",
    "act.h",
    "floats.h",
    "tokens.h",
    "matmat_q8.h",
    "matvec_float.h",
    "recurrent.h",
    "experts.h",
    "activations.h",
    "f16_pair.h",
    "kv.h",
    "alibi.h",
    "attention_many.h",
    "attention_mma.h",
    "mma_f16.h",
    "wmma.h",
    "matmat_f16.h",
    "matmat_mma.h",
    "matmat_few.h",
    "matmat_floats.h",
    "matmat_wgmma.h",
    "matmat_wmma.h",
    "attention_wmma.h",
    "attention_plain.h",
    "matvec.hip",
    "matvec_float.hip",
    "matmat.hip",
    "activations.hip",
    "repack.hip",
    "dequantize.hip",
    "rope_kv.hip",
    "rope_heads.hip",
    "attention_decode.hip",
    "attention_prefill.hip",
    "gather.hip",
    "add_bias.hip",
    "layer_norm.hip",
    "elements.hip",
    "clamp.hip",
    "adapters.hip",
    "adapters_mma.h",
    "route.hip",
    "conv.hip",
    "delta_net.hip",
    "ssm.hip",
    "experts.hip",
    "experts_few.h",
    "experts_group.hip",
    "experts_many.hip",
    "matmat_heads.hip",
    "sample.hip",
];

/// A unit of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// The unit's name, the part of [`Launch::kernel`](super::Launch) before the dot.
    pub name: &'static str,
    source: &'static str,
    definitions: &'static str,
}

impl Unit {
    /// The whole text: definitions, headers, source.
    #[must_use]
    pub fn text(&self) -> String {
        self.text_without(&[])
    }

    /// [`Unit::text`] without these headers and what they include.
    pub(crate) fn text_without(&self, headers: &[&str]) -> String {
        let mut text = String::new();
        for definition in self.definitions.split_whitespace() {
            let (name, value) = definition.split_once('=').unwrap_or((definition, "1"));
            text += &format!("#define {name} {value}\n");
        }
        let mut included = headers.iter().map(|&header| header.to_owned()).collect();
        expand(self.source, &mut included, &mut text);
        text
    }
}

/// All units, in the order of the list.
pub fn units() -> impl Iterator<Item = Unit> {
    UNITS
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
            let (source, definitions) = rest.split_once(' ').unwrap_or((rest, ""));
            Unit {
                name,
                source,
                definitions,
            }
        })
}

/// The unit of this name.
#[must_use]
pub fn unit(name: &str) -> Option<Unit> {
    units().find(|unit| unit.name == name)
}

/// A source or header by its file name.
pub(crate) fn file(name: &str) -> Option<&'static str> {
    FILES
        .iter()
        .find(|(n, _)| *n == name)
        .map(|(_, text)| *text)
}

/// Appends a file with the headers that it includes, each once.
fn expand(name: &str, included: &mut Vec<String>, to: &mut String) {
    let text = file(name).expect("every source and header is listed above");
    for line in text.lines() {
        if let Some(header) = line.strip_prefix("#include \"") {
            let header = header.trim_end_matches('"').to_owned();
            if !included.contains(&header) {
                included.push(header.clone());
                expand(&header, included, to);
            }
        } else if line != "#pragma once" {
            to.push_str(line);
            to.push('\n');
        }
    }
}
