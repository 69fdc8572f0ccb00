//! What the host keeps for its answers, and how it comes there.

use super::*;

/// Bytes of a range that the system has given memory for.
fn resident(range: &[u8]) -> u64 {
    use std::io::{Read, Seek, SeekFrom};
    const PAGE: u64 = 4096;
    let first = range.as_ptr() as u64 / PAGE;
    let mut map = std::fs::File::open("/proc/self/pagemap").unwrap();
    map.seek(SeekFrom::Start(first * 8)).unwrap();
    let mut entries = vec![0; range.len() / PAGE as usize * 8];
    map.read_exact(&mut entries).unwrap();
    // Bit 63: the page is there; bit 62: it was swapped out.
    let taken = entries.chunks_exact(8).filter(|entry| entry[7] >> 6 != 0);
    taken.count() as u64 * PAGE
}

#[test]
fn segments_are_brought_at_once_and_a_damaged_one_does_not_hold_the_others_up() {
    let (file, tensors) = segments(3, &[1]);
    let (file, mut answers, layouts) = opened(&file, &tensors);
    let all: Vec<&SegmentLayout> = layouts.iter().collect();
    let mut brought = Brought::default();
    let error = answers.kept(&file, (1, &[0, 1, 2]), &all, &mut brought);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("t1"), "{error}");
    let has = |answers: &Answers| [0, 1, 2].map(|s| answers.keeps(1, s));
    assert_eq!(has(&answers), [true, false, true]);
    // Two experts of a segment ask for it twice.
    let mut brought = Brought::default();
    let some = [all[0], all[2], all[2]];
    let kept = answers.kept(&file, (1, &[0, 2, 2]), &some, &mut brought);
    let kept = kept.unwrap();
    let each = layouts[0].bytes;
    assert_eq!(
        (brought.kept_bytes, brought.bytes, brought.file_bytes),
        (3 * each, 0, 0)
    );
    let slab = |kept: &Option<Kept>| kept.as_ref().unwrap().1;
    assert_eq!(slab(&kept[1]), slab(&kept[2]));
    assert_ne!(slab(&kept[0]), slab(&kept[1]));
    answers.forget(1);
    let mut brought = Brought::default();
    answers
        .kept(&file, (1, &[0, 2, 2]), &some, &mut brought)
        .unwrap();
    assert_eq!(
        (brought.kept_bytes, brought.bytes, brought.file_bytes),
        (each, 2 * each, 0)
    );
    // What lies there is what one thread makes of it.
    let alone = packed_alone(&answers, &file, &tensors[2]);
    let (_, slab) = answers.store.find((1, 2)).unwrap();
    let at = slab + layouts[2].tensors[0].at;
    assert_eq!(answers.host.arena.bytes(at, alone.len()), alone);
}

/// Segments of a matrix of Q8_0 each, one after another in a file; the scales of those in
/// `damaged` are no numbers.
fn segments(n: u64, damaged: &[usize]) -> (tempfile::NamedTempFile, Vec<TensorDesc>) {
    const ROWS: u64 = 64;
    const COLS: u64 = 256;
    // A scale in f16 and 32 codes a block.
    const BYTES: u64 = ROWS * COLS / 32 * 34;
    let mut bytes: Vec<u8> = (0..n * BYTES).map(|i| (i * 31 % 251) as u8).collect();
    for block in bytes.chunks_exact_mut(34) {
        block[..2].copy_from_slice(&0x2000u16.to_le_bytes());
    }
    for segment in damaged {
        let at = segment * BYTES as usize + 34;
        bytes[at..][..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    let tensors = (0..n).map(|i| TensorDesc {
        name: format!("t{i}"),
        ty: rocmforge_ops::WeightType::Q8_0,
        rows: ROWS,
        cols: COLS,
        role: Role::Matrix,
        offset: i * BYTES,
        bytes: BYTES,
    });
    (file, tensors.collect())
}

/// A host that may keep 32 MB, with the layouts of segments of a tensor each.
fn opened(
    file: &tempfile::NamedTempFile,
    tensors: &[TensorDesc],
) -> (Arc<MappedFile>, Answers, Vec<SegmentLayout>) {
    let file = Arc::new(MappedFile::open(file.path()).unwrap());
    let answers = Answers::new(NonZeroUsize::new(2), |_| 32 << 20).unwrap();
    let layouts = tensors
        .iter()
        .map(|t| answers.host.layout(std::slice::from_ref(t)));
    let layouts = layouts.map(Result::unwrap).collect();
    (file, answers, layouts)
}

/// A matrix in the kernels' form, as one thread makes it.
fn packed_alone(answers: &Answers, file: &MappedFile, tensor: &TensorDesc) -> Vec<u8> {
    let matrix = crate::packed(tensor, answers.host.isa).unwrap();
    let mut alone = vec![0; matrix.packed_bytes()];
    let range = tensor.offset..tensor.offset + tensor.bytes;
    let packed = file.with_range(range, |bytes| {
        matrix.pack(bytes, 0..matrix.row_groups(), &mut alone)
    });
    packed.unwrap().unwrap();
    alone
}

#[test]
fn what_is_kept_later_is_what_an_answer_would_have_brought() {
    let (file, tensors) = segments(4, &[1]);
    let (file, mut answers, layouts) = opened(&file, &tensors);
    let later = |answers: &mut Answers, segment: u32| {
        let layout = &layouts[segment as usize];
        answers.keep_later(&file, (1, segment), layout).unwrap();
    };
    let coming = |answers: &Answers| {
        let mut coming: Vec<u32> = answers.coming.iter().map(|(key, ..)| key.1).collect();
        coming.sort_unstable();
        coming
    };
    // Those that come are waited for before a place moves.
    later(&mut answers, 0);
    later(&mut answers, 0);
    answers.limit_kept(16 << 20);
    assert_eq!((coming(&answers), answers.keeps(1, 0)), (vec![], true));
    later(&mut answers, 0);
    assert_eq!(coming(&answers), [], "kept already");
    // A damaged one is not kept, and its place is free again.
    let used = answers.kept_bytes();
    later(&mut answers, 1);
    answers.settle(None);
    assert!(!answers.keeps(1, 1));
    // Few at a time.
    while coming(&answers).len() < COMING_MAX {
        later(&mut answers, 2);
        later(&mut answers, 3);
        if answers.keeps(1, 2) && answers.keeps(1, 3) {
            break;
        }
    }
    assert!(coming(&answers).len() <= COMING_MAX);
    // An answer that needs one that comes waits for it.
    let all: Vec<&SegmentLayout> = layouts.iter().collect();
    let some = [all[0], all[2], all[3]];
    let mut brought = Brought::default();
    let kept = answers.kept(&file, (1, &[0, 2, 3]), &some, &mut brought);
    let kept = kept.unwrap();
    let each = layouts[0].bytes;
    assert_eq!((brought.kept_bytes, brought.bytes), (3 * each, 0));
    assert_eq!(
        answers.kept_bytes() - used,
        2 * each.next_multiple_of(rocmforge_device::ALIGNMENT)
    );
    // Each lies there as one thread makes it.
    for (tensor, kept) in [0, 2, 3].map(|i| &tensors[i]).into_iter().zip(kept) {
        let alone = packed_alone(&answers, &file, tensor);
        let (layout, slab) = kept.unwrap();
        let at = slab + layout.tensors[0].at;
        assert_eq!(answers.host.arena.bytes(at, alone.len()), alone);
    }
    // Nothing comes for a model that is gone.
    later(&mut answers, 1);
    answers.forget(1);
    assert_eq!((coming(&answers), answers.kept_bytes()), (vec![], 0));
}

#[test]
fn memory_beyond_a_smaller_bound_goes_back_to_the_system() {
    const EACH: u64 = (5 << 20) + rocmforge_device::ALIGNMENT;
    const MOST: u64 = 32 << 20;
    let mut answers = Answers::new(NonZeroUsize::new(1), |_| MOST).unwrap();
    assert_eq!(answers.store.most(), MOST, "the machine is too small");
    answers.host.set_capacity(MOST).unwrap();
    answers.capacity = MOST;
    let layout = Arc::new(SegmentLayout {
        tensors: Vec::new(),
        bytes: EACH,
    });
    for segment in 0..6 {
        let slab = answers.store.room(EACH).unwrap();
        let place = answers.host.arena.bytes_mut(slab, EACH as usize);
        place.fill(segment as u8 + 1);
        answers.store.keep((1, segment), Arc::clone(&layout), slab);
    }
    // The first is idle, all others are asked for.
    for segment in (1..6).cycle().take(60) {
        assert!(answers.store.find((1, segment)).is_some());
    }
    let held = |answers: &Answers| resident(answers.host.arena.bytes(0, MOST as usize));
    assert!(held(&answers) >= 6 * EACH);
    answers.limit_kept(MOST / 2 + 1);
    assert!(answers.kept_bytes() <= MOST / 2);
    assert!(held(&answers) <= MOST / 2, "{} bytes", held(&answers));
    let kept: Vec<u32> = (0..6).filter(|s| answers.keeps(1, *s)).collect();
    assert_eq!(kept, [1, 2, 5], "the last one moved to where the first was");
    for segment in kept {
        let (_, slab) = answers.store.find((1, segment)).unwrap();
        let bytes = answers.host.arena.bytes(slab, EACH as usize);
        assert!(bytes.iter().all(|b| *b == segment as u8 + 1), "{segment}");
    }
    answers.limit_kept(0);
    assert_eq!((answers.kept_bytes(), held(&answers)), (0, 0));
    answers.limit_kept(MOST);
    assert!(answers.has_room(MOST) && !answers.has_room(MOST + 1));
}
