//! Models whose rows attend both ways: encoders. All rows of a text are in one pass, and what comes
//! of it is one row: a row of the text, or the mean of all, which the device makes.

use std::ops::Range;

use rocmforge_model::Pooling;
use rocmforge_ops::MEAN_OF_SPAN;

use crate::api::error::Error;
use crate::model::loaded::LoadedModel;

/// The output row of a text whose rows of the pass these are.
pub(crate) fn wanted(pooling: Pooling, rows: Range<usize>) -> u32 {
    let (first, last) = (rows.start as u32, rows.end as u32 - 1);
    match pooling {
        Pooling::First => first,
        Pooling::Last => last,
        Pooling::Mean => last | MEAN_OF_SPAN,
    }
}

/// Refuses to generate or score text with an encoder.
pub(crate) fn refuse_text(loaded: &LoadedModel) -> Result<(), Error> {
    if !loaded.model().plan().both_ways {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        field: "model",
        message: format!(
            "'{}' is an encoder ({}), which makes embeddings or rankings and no text; ask a model that generates \
             text",
            loaded.name(),
            loaded.model().info().architecture,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_comes_to_its_first_row_its_last_or_the_mean() {
        let of = |pooling| wanted(pooling, 5..9);
        assert_eq!(of(Pooling::First), 5);
        assert_eq!(of(Pooling::Last), 8);
        assert_eq!(of(Pooling::Mean), 8 | MEAN_OF_SPAN);
    }
}
