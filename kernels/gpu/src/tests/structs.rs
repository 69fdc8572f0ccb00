//! Structs of arguments against their twins in the sources.

use super::*;

/// Field names of a struct in a source, arrays without their length.
fn fields(source: &str, name: &str) -> Vec<String> {
    let start = format!("struct {name} {{");
    let body = &source[source.find(&start).unwrap_or_else(|| panic!("no {name}")) + start.len()..];
    let body = &body[..body.find("};").unwrap()];
    body.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .filter(|line| line.contains(';'))
        .flat_map(|line| {
            let line = line.split(';').next().unwrap_or_default();
            line.split(',')
                .map(|item| {
                    let name = item.split_whitespace().last().unwrap_or_default();
                    name.split('[').next().unwrap_or_default().to_owned()
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn structs_of_arguments_have_the_fields_of_the_source() {
    macro_rules! check {
        ($($file:literal: $($module:ident)::+),* $(,)?) => { $(
            let source = units::file($file).unwrap();
            let name = stringify!($($module)::+).rsplit("::").next().unwrap().trim();
            assert_eq!(fields(source, name), $($module)::+::FIELDS, "{name}");
        )* };
    }
    check!(
        "matvec.hip": ops::matvec::MatvecMatrix,
        "matvec.hip": ops::matvec::MatvecArgs,
        "matvec_float.h": ops::matvec::MatvecFloatArgs,
        "matmat_q8.h": ops::matmat::MatmatArgs,
        "matmat_f16.h": ops::matmat::MmaMatrix,
        "matmat_f16.h": ops::matmat::MatmatMmaArgs,
        "matmat_few.h": ops::matmat::MatmatFewArgs,
        "matmat_floats.h": ops::matmat::FloatMatrix,
        "matmat_floats.h": ops::matmat::MatmatFloatsArgs,
        "act.h": ops::activations::ActSpec,
        "adapters.hip": ops::adapters::AdapterMatrix,
        "adapters.hip": ops::adapters::AdaptersDownArgs,
        "adapters.hip": ops::adapters::AdaptersUpArgs,
        "activations.hip": ops::activations::ActivationsArgs,
        "elements.hip": ops::elements::ElementsArgs,
        "elements.hip": ops::elements::ColumnPlace,
        "elements.hip": ops::elements::ColumnsArgs,
        "elements.hip": ops::elements::CombineArgs,
        "elements.hip": ops::elements::ProductTransposedArgs,
        "clamp.hip": ops::elements::ClampArgs,
        "route.hip": ops::route::RouteArgs,
        "recurrent.h": ops::recurrent::SequencePlace,
        "conv.hip": ops::recurrent::ConvArgs,
        "delta_net.hip": ops::recurrent::DeltaNetArgs,
        "ssm.hip": ops::recurrent::SsmArgs,
        "experts.h": ops::experts::ExpertTensors,
        "experts.hip": ops::experts::ExpertsArgs,
        "experts_few.h": ops::experts::ExpertsFewArgs,
        "experts_group.hip": ops::experts::ExpertsGroupArgs,
        "experts_many.hip": ops::experts::ExpertsManyArgs,
        "matmat_heads.hip": ops::heads::MatmatHeadsArgs,
        "matmat_heads.hip": ops::heads::MatmatHeadsFloatArgs,
        "kv.h": ops::kv::KvPlace,
        "kv.h": ops::kv::RopePlace,
        "rope_kv.hip": ops::kv::RopeKvArgs,
        "rope_heads.hip": ops::kv::RopeHeadsArgs,
        "attention_decode.hip": ops::attention::AttentionDecodeArgs,
        "attention_prefill.hip": ops::attention::AttentionPrefillArgs,
        "gather.hip": ops::rows::GatherArgs,
        "gather.hip": ops::rows::GatherOutputsArgs,
        "add_bias.hip": ops::rows::AddBiasArgs,
        "layer_norm.hip": ops::rows::LayerNormArgs,
        "sample.hip": ops::sample::TopKArgs,
        "repack.hip": ops::weights::RepackArgs,
        "dequantize.hip": ops::weights::DequantizeArgs,
    );
}
