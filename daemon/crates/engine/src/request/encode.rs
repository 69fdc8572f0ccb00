//! Requests to encoders, whose rows attend to all others of their text. All rows of a text are in
//! one pass; the result is one row, the mean of all rows (computed by the device), or each row.

use std::ops::Range;

use rocmforge_model::Pooling;
use rocmforge_ops::MEAN_OF_SPAN;

use crate::api::error::Error;
use crate::model::loaded::LoadedModel;

/// Indices of the output rows of a text that has the rows `rows` of the pass.
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

/// Rejects requests to generate or score text with an encoder.
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
