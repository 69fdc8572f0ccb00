//! dots.llm1: the layers of GLM 4.5 with the usual names of norms.
//!
//! Source: rednote-hilab 2025, "dots.llm1 Technical Report" (arXiv 2506.05767).

use super::glm4moe::build_with;
use super::layer::Norms;
use crate::build::PlanBuilder;
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    build_with(b, h, Norms::PRE)
}
