//! LoRA adapters of a model: read when the model is loaded, and placed in memory behind the ranges
//! of its files, so that uploads read them like the model's tensors.
//!
//! The matrices of all adapters for one matrix of the model are one pair
//! ([`rocmforge_model::AdapterSet`]), so that a pass takes two products more for it, however many
//! adapters its rows have. The files are read once, whole: a change of one later has no effect.
//!
//! *Invariant:* all elements are finite and below [`ELEMENT_MAX`], so a row of zeros in the place
//! of scales is a row that adapters do not change, whatever their files hold.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use half::f16;
use rocmforge_gguf::{Gguf, MappedFile, TensorInfo};
use rocmforge_kernels_cpu::reference;
use rocmforge_model::{Adapter, AdapterRange, AdapterSet};
use rocmforge_ops::WeightType;
use sha2::{Digest, Sha256};

use crate::api::error::{Error, chain, from_gguf, from_model};

/// Largest absolute value of an element: the largest number of f16.
const ELEMENT_MAX: f32 = 65504.0;

/// Largest absolute scale that a request may ask for.
pub const ADAPTER_SCALE_MAX: f32 = 1000.0;

/// Number of rows of a matrix that are converted at a time.
const ROWS: usize = 256;

/// A model's adapters may take one part in this many of the available memory.
const MEMORY_PART: u64 = 2;

/// The load request's field for adapters, as error messages name it.
const FIELD: &str = "lora";

/// An adapter that a model is to be loaded with.
#[derive(Debug)]
pub struct AdapterFile {
    /// Name of the adapter in requests.
    pub name: String,
    /// The adapter's open file.
    pub file: MappedFile,
    /// Default scale of the adapter in requests.
    pub scale: f32,
}

/// An adapter of a loaded model.
#[derive(Debug)]
pub struct LoadedAdapter {
    /// Name of the adapter in requests.
    pub name: String,
    /// The adapter's file, links resolved.
    pub path: PathBuf,
    /// Default scale of the adapter.
    pub scale: f32,
    /// The adapter's largest rank.
    pub rank: u64,
    /// Task that the adapter was trained for, if its file names it.
    pub task_name: String,
    /// Text that the adapter's prompts begin with, if its file names one.
    pub prompt_prefix: String,
    /// Factor of the adapter's products at a scale of 1.
    factor: f32,
    range: AdapterRange,
    /// SHA-256 of the adapter's content.
    digest: [u8; 32],
}

/// The adapters of a loaded model.
#[derive(Debug, Default)]
pub struct LoadedAdapters {
    list: Vec<LoadedAdapter>,
    /// Number of elements in a row of scales: the sum of all adapters' ranks.
    width: usize,
    ty: Option<WeightType>,
    /// Default scale of each adapter, for requests that do not set scales.
    defaults: RwLock<Vec<f32>>,
}

/// A request's adapters: the scale of each.
#[derive(Debug, PartialEq)]
pub struct AppliedAdapters {
    /// The request's row of scales as bytes, f32.
    row: Box<[u8]>,
    key: AdapterKey,
}

/// Digest of a request's adapters and scales; equal digests may share cached prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct AdapterKey(pub(crate) [u8; 32]);

impl AppliedAdapters {
    /// The digest of adapters and scales; it differs for other adapters or other scales.
    pub fn digest(&self) -> [u8; 32] {
        self.key.0
    }

    /// The request's row of scales as bytes, f32.
    pub(crate) fn row(&self) -> &[u8] {
        &self.row
    }

    pub(crate) fn key(&self) -> AdapterKey {
        self.key
    }
}

impl LoadedAdapters {
    /// The model's adapters, in the order in which the load listed them.
    pub fn list(&self) -> &[LoadedAdapter] {
        &self.list
    }

    /// The default scale of each adapter, for requests that do not set scales.
    pub fn defaults(&self) -> Vec<f32> {
        let defaults = self.defaults.read().unwrap_or_else(PoisonError::into_inner);
        defaults.clone()
    }

    /// Sets the default scales, for requests that do not set theirs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number of scales other than that of adapters, or
    /// an invalid scale.
    pub fn set_defaults(&self, scales: &[f32]) -> Result<(), Error> {
        self.check(scales)?;
        let mut defaults = self
            .defaults
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        defaults.copy_from_slice(scales);
        Ok(())
    }

    /// The adapters at these scales, one scale for each adapter; `None` where all are 0.
    ///
    /// # Errors
    /// As [`LoadedAdapters::set_defaults`].
    pub fn at(&self, scales: &[f32]) -> Result<Option<Arc<AppliedAdapters>>, Error> {
        self.check(scales)?;
        if scales.iter().all(|scale| *scale == 0.0) {
            return Ok(None);
        }
        let mut row = vec![0f32; self.width];
        let mut hasher = Sha256::new();
        hasher.update((self.width as u64).to_le_bytes());
        hasher.update(self.ty.map_or("", WeightType::name));
        for (adapter, scale) in self.list.iter().zip(scales) {
            if *scale == 0.0 {
                continue;
            }
            let AdapterRange { first, rank } = adapter.range;
            let factor = scale * adapter.factor;
            if !factor.is_finite() {
                return Err(invalid(format!(
                    "the scale {scale} of adapter '{}' is too large beside that of its file; give a smaller one",
                    adapter.name
                )));
            }
            row[first as usize..][..rank as usize].fill(factor);
            // Where its products stand among others' decides how they are rounded.
            hasher.update(first.to_le_bytes());
            hasher.update(adapter.digest);
            hasher.update(adapter.factor.to_le_bytes());
            hasher.update(scale.to_le_bytes());
        }
        Ok(Some(Arc::new(AppliedAdapters {
            row: row.iter().flat_map(|scale| scale.to_le_bytes()).collect(),
            key: AdapterKey(hasher.finalize().into()),
        })))
    }

    fn check(&self, scales: &[f32]) -> Result<(), Error> {
        if scales.len() != self.list.len() {
            return Err(invalid(format!(
                "{} scales are given, and the model has {} adapters",
                scales.len(),
                self.list.len()
            )));
        }
        scales.iter().try_for_each(|scale| check_scale(*scale))
    }

    /// Whether both have the same adapters, by content and name.
    pub(crate) fn are_same_as(&self, other: &Self) -> bool {
        let of = |all: &Self| {
            let list = all.list.iter();
            let each = list.map(|a| (a.name.clone(), a.path.clone(), a.digest));
            each.collect::<Vec<_>>()
        };
        of(self) == of(other)
    }

    /// Whether the model has no adapters.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

fn invalid(message: String) -> Error {
    Error::InvalidArgument {
        field: FIELD,
        message,
    }
}

/// Checks that a scale is finite and within [`ADAPTER_SCALE_MAX`].
///
/// # Errors
///
/// [`Error::InvalidArgument`] if it is not.
pub fn check_scale(scale: f32) -> Result<(), Error> {
    if scale.abs() <= ADAPTER_SCALE_MAX {
        return Ok(());
    }
    Err(invalid(format!(
        "a scale is {scale}; give a number from -{ADAPTER_SCALE_MAX} to {ADAPTER_SCALE_MAX}"
    )))
}

/// A model's file with its adapters' matrices appended in memory, their places, and the adapters'
/// properties.
pub(crate) struct Joined {
    pub(crate) file: MappedFile,
    pub(crate) set: AdapterSet,
    pub(crate) loaded: LoadedAdapters,
}

/// Reads adapters for the model of a file with this header, and appends their matrices to it in
/// memory.
///
/// # Errors
/// What is wrong with one of the adapters; [`Error::InvalidArgument`] for adapters that do
/// not fit, names that are taken twice, and invalid scales.
pub(crate) fn join(
    name: &str,
    file: MappedFile,
    base: &Gguf,
    adapters: Vec<AdapterFile>,
) -> Result<Joined, Error> {
    check_names(&adapters)?;
    let read = |given: &AdapterFile| {
        let path = given.file.path();
        check_scale(given.scale)?;
        let gguf = Gguf::open(&given.file).map_err(|e| from_gguf(name, path, e))?;
        Adapter::from_gguf(&gguf, base).map_err(|e| from_model(path, e))
    };
    let headers: Vec<Adapter> = adapters.iter().map(read).collect::<Result<_, _>>()?;
    let start = file
        .memory_start()
        .ok_or_else(|| Error::Internal("no room behind a model's files".to_owned()))?;
    let set = AdapterSet::new(&headers, start).map_err(|e| from_model(file.path(), e))?;
    check_memory(set.bytes)?;
    let mut making = Making {
        sources: adapters.iter().zip(&headers).zip(&set.ranges).collect(),
        digests: adapters.iter().map(|_| Sha256::new()).collect(),
        set: &set,
        failed: None,
    };
    let file = file.with_memory(|out| making.write(out));
    let (failed, digests) = (making.failed.take(), making.digests);
    if let Some(error) = failed {
        return Err(error);
    }
    let file = file.map_err(|error| Error::Exhausted {
        message: format!(
            "there is no memory for {} bytes of adapters: {}",
            set.bytes,
            chain(&error)
        ),
        retry_after: std::time::Duration::from_secs(1),
    })?;
    let list = adapters.into_iter().zip(headers).zip(digests);
    let list = list.zip(&set.ranges);
    let list: Vec<LoadedAdapter> = list
        .map(|(((given, header), digest), range)| LoadedAdapter {
            factor: header.scale(),
            rank: header.rank,
            task_name: header.task_name,
            prompt_prefix: header.prompt_prefix,
            range: *range,
            digest: digest.finalize().into(),
            path: given.file.path().to_owned(),
            name: given.name,
            scale: given.scale,
        })
        .collect();
    let loaded = LoadedAdapters {
        width: set.width as usize,
        ty: Some(set.ty),
        defaults: RwLock::new(list.iter().map(|adapter| adapter.scale).collect()),
        list,
    };
    Ok(Joined { file, set, loaded })
}

fn check_names(adapters: &[AdapterFile]) -> Result<(), Error> {
    for (i, adapter) in adapters.iter().enumerate() {
        let is_word = |name: &str| name.chars().all(|c| crate::is_name_char(c) && c != '+');
        let name = &adapter.name;
        if name.is_empty() || name.len() > crate::MODEL_NAME_MAX || !is_word(name) {
            return Err(invalid(format!(
                "{name:?} is no adapter name: 1 to {} bytes of letters, digits and any of . _ - : / @; rename \
                 the file, or name it over gRPC",
                crate::MODEL_NAME_MAX
            )));
        }
        if adapters[..i].iter().any(|before| before.name == *name) {
            return Err(invalid(format!(
                "two adapters are called '{name}'; rename one of the files, or name it over gRPC"
            )));
        }
    }
    Ok(())
}

/// Checks that adapters of `bytes` bytes do not take too much of the available memory.
fn check_memory(bytes: u64) -> Result<(), Error> {
    match rocmforge_device::host_available_bytes() {
        0 => Ok(()),
        available if bytes <= available / MEMORY_PART => Ok(()),
        available => Err(Error::Exhausted {
            message: format!(
                "the adapters take {bytes} bytes of host memory, and a half of the {available} bytes available is for \
                 them; give fewer, or adapters of a smaller rank"
            ),
            retry_after: std::time::Duration::from_secs(1),
        }),
    }
}

/// Writes the combined matrices of all adapters, read from the adapters' tensors.
struct Making<'a> {
    sources: Vec<((&'a AdapterFile, &'a Adapter), &'a AdapterRange)>,
    digests: Vec<Sha256>,
    set: &'a AdapterSet,
    /// Why a tensor could not be read; `None` so far.
    failed: Option<Error>,
}

impl Making<'_> {
    fn write(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let set = self.set;
        for (name, matrices) in &set.matrices {
            self.write_a(name, matrices.a.cols as usize, out)?;
            let rows = matrices.b.rows as usize;
            for first in (0..rows).step_by(ROWS) {
                self.write_b(name, first, ROWS.min(rows - first), out)?;
            }
        }
        Ok(())
    }

    /// Writes the rows of the `A` matrices of all adapters for one matrix of the model.
    fn write_a(&mut self, name: &str, cols: usize, out: &mut dyn Write) -> io::Result<()> {
        let mut written = 0;
        for at in 0..self.sources.len() {
            let ((given, header), range) = self.sources[at];
            let mut rows = vec![0f32; cols * range.rank as usize];
            if let Some(pair) = header.pairs.get(name) {
                let n = pair.rank() as usize;
                self.read(at, given, &pair.a, 0, &mut rows[..n * cols])?;
            }
            written += range.rank as usize;
            self.put(&rows, out)?;
        }
        let left = self.set.width as usize - written;
        self.put(&vec![0.0; left * cols], out)
    }

    /// Writes rows of the `B` matrices, with the columns of all adapters side by side.
    fn write_b(
        &mut self,
        name: &str,
        first: usize,
        n: usize,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let width = self.set.width as usize;
        let mut rows = vec![0f32; n * width];
        for at in 0..self.sources.len() {
            let ((given, header), range) = self.sources[at];
            let Some(pair) = header.pairs.get(name) else {
                continue;
            };
            let (rank, factor) = (pair.rank() as usize, header.relative_scale(pair));
            let mut part = vec![0f32; n * rank];
            self.read(at, given, &pair.b, first, &mut part)?;
            let places = rows.chunks_exact_mut(width);
            for (row, part) in places.zip(part.chunks_exact(rank)) {
                let place = &mut row[range.first as usize..][..rank];
                place
                    .iter_mut()
                    .zip(part)
                    .for_each(|(p, x)| *p = x * factor);
            }
        }
        self.put(&rows, out)
    }

    fn put(&self, values: &[f32], out: &mut dyn Write) -> io::Result<()> {
        let bytes: Vec<u8> = match self.set.ty {
            WeightType::F16 => {
                let bytes = values.iter().map(|x| f16::from_f32(*x).to_le_bytes());
                bytes.flatten().collect()
            }
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        out.write_all(&bytes)
    }

    /// Reads rows of an adapter's tensor as f32, and records an error in `failed`.
    fn read(
        &mut self,
        at: usize,
        given: &AdapterFile,
        tensor: &TensorInfo,
        first: usize,
        rows: &mut [f32],
    ) -> io::Result<()> {
        read_rows(&given.file, tensor, first, rows).map_err(|error| {
            self.failed = Some(error);
            io::Error::other("an adapter's tensor")
        })?;
        let digest = &mut self.digests[at];
        digest.update(tensor.name.as_bytes());
        digest.update((first as u64).to_le_bytes());
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        digest.update(&bytes);
        Ok(())
    }
}

fn read_rows(
    file: &MappedFile,
    tensor: &TensorInfo,
    first: usize,
    rows: &mut [f32],
) -> Result<(), Error> {
    let path = file.path();
    let bad = |message: String| Error::BadModel {
        path: path.to_owned(),
        message: format!("tensor '{}' {message}", tensor.name),
    };
    let ty = tensor
        .ty
        .weight_type()
        .ok_or_else(|| bad("has a type that is not supported".to_owned()))?;
    let row_bytes = tensor.bytes / tensor.dims[1];
    let n = (rows.len() as u64) / tensor.dims[0];
    let start = tensor.offset + first as u64 * row_bytes;
    let read = file.with_range(start..start + n * row_bytes, |bytes| {
        reference::dequantize(ty, bytes, rows)
    });
    read.map_err(|error| from_gguf("", path, error))?
        .map_err(|error| bad(format!("cannot be read: {error}")))?;
    let fits = |x: &f32| x.abs() <= ELEMENT_MAX;
    match rows.iter().find(|x| !fits(x)) {
        None => Ok(()),
        Some(x) => Err(bad(format!(
            "holds {x}, where finite numbers of at most {ELEMENT_MAX} are expected; the file is damaged, or its \
             training diverged"
        ))),
    }
}

/// The name of an adapter that was given without one: its file name without `.gguf`.
pub fn adapter_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let suffix = name.len().saturating_sub(".gguf".len());
    match name.get(suffix..) {
        Some(end) if end.eq_ignore_ascii_case(".gguf") => name[..suffix].to_owned(),
        _ => name.into_owned(),
    }
}
