//! Models whose rows attend both ways: encoders. All rows of a text are in one pass, and what comes
//! of it is a row of the text, or the mean of all, which the device makes, or each of its rows.

use std::ops::Range;

use rocmforge_model::Pooling;
use rocmforge_ops::MEAN_OF_SPAN;

use crate::api::error::Error;
use crate::model::loaded::LoadedModel;

/// The output rows of a text whose rows of the pass these are.
pub(crate) fn wanted(pooling: Pooling, rows: Range<usize>) -> impl Iterator<Item = u32> + Clone {
    let (first, end) = (rows.start as u32, rows.end as u32);
    let (rows, mark) = match pooling {
        Pooling::None => (first..end, 0),
        Pooling::First => (first..first + 1, 0),
        Pooling::Last => (end - 1..end, 0),
        Pooling::Mean => (end - 1..end, MEAN_OF_SPAN),
    };
    rows.map(move |row| row | mark)
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
    fn a_text_comes_to_its_first_row_its_last_the_mean_or_all() {
        let of = |pooling| wanted(pooling, 5..9).collect::<Vec<_>>();
        assert_eq!(of(Pooling::First), [5]);
        assert_eq!(of(Pooling::Last), [8]);
        assert_eq!(of(Pooling::Mean), [8 | MEAN_OF_SPAN]);
        assert_eq!(of(Pooling::None), [5, 6, 7, 8]);
    }
}
