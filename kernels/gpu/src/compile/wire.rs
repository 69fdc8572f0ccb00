//! What goes over the child's standard input: a job as length-prefixed fields.

use std::io::{Error, ErrorKind, Result};

use super::{Language, OBJECT_BYTES_MAX, Request};

/// A job as the child reads it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) language: Language,
    /// An empty one stands for the usual names.
    pub(super) library: String,
    /// What to compile; `None` asks for the version only.
    pub(super) unit: Option<Unit>,
}

/// An owned request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub(super) name: String,
    pub(super) source: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) target: String,
    pub(super) options: Vec<String>,
}

/// Headers and options that one job may have.
const COUNT_MAX: usize = 1024;

fn put(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

/// The bytes of a job.
pub(super) fn encode(language: Language, library: &str, request: Option<&Request<'_>>) -> Vec<u8> {
    let mut bytes = vec![
        match language {
            Language::Hip => 0,
            Language::Cuda => 1,
        },
        u8::from(request.is_some()),
    ];
    put(&mut bytes, library);
    if let Some(request) = request {
        for text in [request.name, request.source, request.target] {
            put(&mut bytes, text);
        }
        bytes.extend((request.headers.len() as u64).to_le_bytes());
        for (name, text) in request.headers {
            put(&mut bytes, name);
            put(&mut bytes, text);
        }
        bytes.extend((request.options.len() as u64).to_le_bytes());
        for option in request.options {
            put(&mut bytes, option);
        }
    }
    bytes
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8]> {
        let (head, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or_else(|| Error::new(ErrorKind::UnexpectedEof, "the job ends too early"))?;
        self.0 = rest;
        Ok(head)
    }

    fn number(&mut self, max: usize) -> Result<usize> {
        let mut word = [0; 8];
        word.copy_from_slice(self.take(8)?);
        usize::try_from(u64::from_le_bytes(word))
            .ok()
            .filter(|&number| number <= max)
            .ok_or_else(|| Error::new(ErrorKind::InvalidData, "a length beyond its maximum"))
    }

    fn text(&mut self) -> Result<String> {
        let bytes = self.number(OBJECT_BYTES_MAX)?;
        String::from_utf8(self.take(bytes)?.to_vec())
            .map_err(|_| Error::new(ErrorKind::InvalidData, "text that is not UTF-8"))
    }
}

/// The job in these bytes.
pub(super) fn decode(bytes: &[u8]) -> Result<Job> {
    let mut fields = Fields(bytes);
    let language = match fields.take(1)?[0] {
        0 => Language::Hip,
        1 => Language::Cuda,
        _ => return Err(Error::new(ErrorKind::InvalidData, "an unknown language")),
    };
    let has_unit = fields.take(1)?[0] != 0;
    let library = fields.text()?;
    let mut unit = None;
    if has_unit {
        let (name, source, target) = (fields.text()?, fields.text()?, fields.text()?);
        let mut headers = Vec::new();
        for _ in 0..fields.number(COUNT_MAX)? {
            headers.push((fields.text()?, fields.text()?));
        }
        let mut options = Vec::new();
        for _ in 0..fields.number(COUNT_MAX)? {
            options.push(fields.text()?);
        }
        unit = Some(Unit {
            name,
            source,
            headers,
            target,
            options,
        });
    }
    Ok(Job {
        language,
        library,
        unit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_survives_the_pipe_and_a_cut_one_is_an_error() {
        let request = Request {
            name: "n",
            source: "s\n",
            headers: &[("a.h", "1"), ("b.h", "2")],
            target: "gfx1100",
            options: &["-O3"],
        };
        let bytes = encode(Language::Cuda, "lib", Some(&request));
        let job = decode(&bytes).unwrap();
        assert_eq!(
            (job.language, job.library.as_str()),
            (Language::Cuda, "lib")
        );
        let unit = job.unit.unwrap();
        assert_eq!((unit.name.as_str(), unit.source.as_str()), ("n", "s\n"));
        assert_eq!(unit.headers[1], ("b.h".to_owned(), "2".to_owned()));
        assert_eq!(
            (unit.target.as_str(), unit.options),
            ("gfx1100", vec!["-O3".to_owned()])
        );
        for cut in 0..bytes.len() {
            assert!(decode(&bytes[..cut]).is_err(), "{cut}");
        }
        assert_eq!(decode(&encode(Language::Hip, "", None)).unwrap().unit, None);
    }
}
