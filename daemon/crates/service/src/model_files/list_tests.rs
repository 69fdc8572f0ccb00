//! Tests of the list of files.

use std::fs;
use std::os::unix::fs::symlink;

use rocmforge_gguf::TensorType;
use rocmforge_gguf::write::GgufWriter;

use super::*;

fn names(dirs: &ModelDirs) -> Vec<String> {
    let (files, is_whole) = dirs.list(&Looks::default());
    assert!(is_whole);
    let files = files.iter().filter(|file| file.unserved.is_none());
    let name = |file: &ModelFile| file.path.file_name().unwrap().to_str().unwrap().to_owned();
    files.map(name).collect()
}

#[test]
fn links_count_by_what_they_lead_to_and_their_directories_are_not_entered() {
    let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (inside, outside) = (inside.path(), outside.path());
    fs::create_dir(inside.join("below")).unwrap();
    fs::write(inside.join("below/real.gguf"), "x").unwrap();
    fs::write(outside.join("secret.gguf"), "x").unwrap();
    symlink(inside.join("below/real.gguf"), inside.join("link.gguf")).unwrap();
    symlink(outside.join("secret.gguf"), inside.join("out.gguf")).unwrap();
    symlink(outside.join("absent.gguf"), inside.join("dangling.gguf")).unwrap();
    symlink(outside, inside.join("dir.gguf")).unwrap();
    // A walk that entered this one would not end.
    symlink(inside, inside.join("below/loop")).unwrap();
    let dirs = ModelDirs::new(&[inside.to_owned()]).unwrap();
    assert_eq!(names(&dirs), ["real.gguf", "link.gguf"]);
    // It counts where the other directory is one of models, too.
    let dirs = ModelDirs::new(&[inside.to_owned(), outside.to_owned()]).unwrap();
    let mut names = names(&dirs);
    names.sort();
    assert_eq!(names, ["link.gguf", "out.gguf", "real.gguf", "secret.gguf"]);
}

#[test]
fn a_directory_that_cannot_be_read_is_told_from_an_empty_one() {
    let (gone, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dirs = ModelDirs::new(&[empty.path().to_owned(), gone.path().to_owned()]).unwrap();
    let looks = Looks::default();
    assert_eq!(dirs.list(&looks), (Vec::new(), true));
    assert!(dirs.refused(&looks).is_none());
    // As without a right to read it, which root would have.
    let root = gone.path().canonicalize().unwrap();
    gone.close().unwrap();
    assert_eq!(dirs.list(&looks), (Vec::new(), false));
    let (dir, why) = dirs.refused(&looks).unwrap();
    assert!(dir == root && why.contains("No such file"), "{why}");
}

#[test]
fn the_walk_looks_at_a_bounded_number_of_entries() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..5 {
        let below = dir.path().join(format!("d{i}"));
        fs::create_dir(&below).unwrap();
        fs::write(below.join("m.gguf"), "x").unwrap();
    }
    let dirs = ModelDirs::new(&[dir.path().to_owned()]).unwrap();
    let found = dirs.walk(dir.path(), 10);
    assert!(found.is_whole && found.files.len() == 5, "{found:?}");
    // The directories themselves, and the files of two of them.
    let found = dirs.walk(dir.path(), 7);
    assert!(!found.is_whole && found.files.len() == 2, "{found:?}");
}

/// Writes a file with such metadata and a tensor.
fn write(path: &Path, keys: &[(&str, &str)]) {
    let writer = keys.iter().fold(GgufWriter::new(), |writer, (key, value)| {
        writer.key(key, *value)
    });
    let writer = writer.zeros("t", &[4], TensorType::F32);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    writer.write_to(path).unwrap();
}

const LLAMA: (&str, &str) = ("general.architecture", "llama");

/// What is said of each file that is not offered, by its name below the directory.
fn unserved(root: &Path) -> Vec<(String, String)> {
    let dirs = ModelDirs::new(&[root.to_owned()]).unwrap();
    let (files, _) = dirs.unserved();
    let told = files.iter().map(|file| {
        let below = file
            .path
            .strip_prefix(root.canonicalize().unwrap())
            .unwrap();
        let why = file.unserved.as_ref().unwrap().to_string();
        (below.display().to_string(), why)
    });
    told.collect()
}

/// Vision models come with an mmproj file beside them, and it was offered as a model.
#[test]
fn files_that_are_no_models_are_listed_apart() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write(&root.join("model.gguf"), &[LLAMA]);
    for (name, keys) in [
        ("adapter.gguf", [LLAMA, ("general.type", "adapter")]),
        ("clip.gguf", [("general.architecture", "clip"), ("x", "")]),
        (
            "control.gguf",
            [("general.architecture", "controlvector"), ("x", "")],
        ),
        ("image.gguf", [("general.architecture", "flux"), ("x", "")]),
        ("imatrix.gguf", [("general.type", "imatrix"), ("x", "")]),
        (
            "mmproj.gguf",
            [("general.architecture", "clip"), ("general.type", "mmproj")],
        ),
        (
            "speech.gguf",
            [("general.architecture", "whisper"), ("x", "")],
        ),
    ] {
        write(&root.join(name), &keys);
    }
    let vocabulary = GgufWriter::new().key(LLAMA.0, LLAMA.1);
    vocabulary.write_to(&root.join("vocab.gguf")).unwrap();
    // Hidden, as macOS keeps beside a file, and what waits in a trash.
    write(&root.join("._model.gguf"), &[LLAMA]);
    write(&root.join(".Trash-1000/files/old.gguf"), &[LLAMA]);
    let dirs = ModelDirs::new(&[root.to_owned()]).unwrap();
    assert_eq!(names(&dirs), ["model.gguf"]);
    let told = unserved(root);
    let words = [
        "LoRA",
        "images",
        "control vector",
        "images",
        "importance matrix",
        "images",
        "speech",
        "without weights",
    ];
    assert_eq!(told.len(), words.len(), "{told:?}");
    for ((name, why), word) in told.iter().zip(words) {
        assert!(why.contains(word), "{name}: {why}");
    }
    assert!(
        dirs.troubles_of_files().is_empty(),
        "nobody has to do anything"
    );
    // What a clone or a download left in the place of a file is no model, either, and is told.
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    fs::write(root.join("pointer.gguf"), pointer).unwrap();
    fs::write(
        root.join("page.gguf"),
        "<!DOCTYPE html><title>Not found</title>",
    )
    .unwrap();
    assert_eq!(names(&dirs), ["model.gguf"]);
    let told = dirs.troubles_of_files().join("\n");
    assert!(
        told.contains("page.gguf is not offered as a model: it is a web page"),
        "{told}"
    );
    assert!(told.contains("git lfs pull"), "{told}");
    // A file that becomes another is looked at anew.
    write(
        &root.join("clip.gguf"),
        &[LLAMA, ("general.name", "another")],
    );
    assert_eq!(names(&dirs), ["clip.gguf", "model.gguf"]);
}

/// Where the link leads was not said anywhere: the model was not there.
#[test]
fn links_that_lead_out_are_told_with_the_directory_to_allow() {
    let ground = tempfile::tempdir().unwrap();
    let ground = ground.path().canonicalize().unwrap();
    let (inside, nvme) = (ground.join("in"), ground.join("nvme"));
    fs::create_dir_all(&inside).unwrap();
    write(&nvme.join("m.gguf"), &[LLAMA]);
    symlink(nvme.join("m.gguf"), inside.join("file.gguf")).unwrap();
    symlink(nvme.join("none.gguf"), inside.join("nothing.gguf")).unwrap();
    symlink("../nvme", inside.join("whole")).unwrap();
    symlink("gone.gguf", inside.join("broken.gguf")).unwrap();
    let told = unserved(&inside);
    let told: Vec<_> = told.iter().map(|(name, why)| (&**name, why)).collect();
    let [(_, broken), (_, file), (_, nothing), (_, whole)] = &told[..] else {
        panic!("{told:?}")
    };
    let allow = format!("--model-dir {}", nvme.display());
    for why in [file, nothing, whole] {
        assert!(why.contains(&allow), "{why}");
    }
    // What is there and what is not look the same.
    assert_eq!(file.replace("m.gguf", ""), nothing.replace("none.gguf", ""));
    assert!(broken.contains("where nothing is"), "{broken}");
    let dirs = ModelDirs::new(std::slice::from_ref(&inside)).unwrap();
    assert_eq!(dirs.troubles_of_files().len(), 4);
    let dirs = ModelDirs::new(&[inside, nvme]).unwrap();
    assert_eq!(names(&dirs), ["file.gguf", "m.gguf"]);
}

#[test]
fn parts_without_the_others_and_whole_files_with_their_names_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let part = |name: &str, number: u16, count: u16| {
        let writer = GgufWriter::new().key(LLAMA.0, LLAMA.1);
        let writer = writer.zeros("t", &[4], TensorType::F32);
        let writer = writer.part(number - 1, count, i32::from(count));
        writer.write_to(&root.join(name)).unwrap();
    };
    part("all-00001-of-00002.gguf", 1, 2);
    part("all-00002-of-00002.gguf", 2, 2);
    part("cut-00001-of-00003.gguf", 1, 3);
    part("cut-00002-of-00003.gguf", 2, 3);
    part("late-00002-of-00002.gguf", 2, 2);
    write(&root.join("whole-00001-of-00003.gguf"), &[LLAMA]);
    write(&root.join("second-00002-of-00003.gguf"), &[LLAMA]);
    let dirs = ModelDirs::new(&[root.to_owned()]).unwrap();
    assert_eq!(
        names(&dirs),
        [
            "all-00001-of-00002.gguf",
            "second-00002-of-00003.gguf",
            "whole-00001-of-00003.gguf"
        ]
    );
    let told = unserved(root);
    let [(cut, missing), (late, first)] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(
        cut.starts_with("cut-00001")
            && missing.contains("3 parts of a model, of which 2 are there")
    );
    assert!(
        late.starts_with("late-00002") && first.contains("late-00001-of-00002.gguf is not there")
    );
    for name in ["whole-00001-of-00003.gguf", "second-00002-of-00003.gguf"] {
        assert_eq!(
            dirs.open(Path::new(name)).unwrap().parts().len(),
            1,
            "{name}"
        );
    }
}

/// A cache of two revisions of one repository, and its directories.
fn hub() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir
        .path()
        .canonicalize()
        .unwrap()
        .join("hub/models--owner--repo");
    for (blob, title) in [
        ("b1", "one"),
        ("b2", "two"),
        ("b3", "both"),
        ("b4", "part 1"),
        ("b5", "part 2"),
    ] {
        let part = title
            .strip_prefix("part ")
            .map(|number| number.parse::<u16>().unwrap());
        let writer = GgufWriter::new()
            .key(LLAMA.0, LLAMA.1)
            .key("general.name", title);
        let writer = writer.zeros(title, &[4], TensorType::F32);
        let writer = match part {
            Some(number) => writer.part(number - 1, 2, 2),
            None => writer,
        };
        fs::create_dir_all(repo.join("blobs")).unwrap();
        writer.write_to(&repo.join("blobs").join(blob)).unwrap();
    }
    let link = |commit: &str, name: &str, blob: &str| {
        let link = repo.join("snapshots").join(commit).join(name);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        let up = if name.contains('/') {
            "../../../blobs"
        } else {
            "../../blobs"
        };
        symlink(Path::new(up).join(blob), link).unwrap();
    };
    // The hash of the older revision sorts first.
    link("0aaaaaaaaa", "m-Q4.gguf", "b1");
    link("0aaaaaaaaa", "both.gguf", "b3");
    link("1bbbbbbbbb", "m-Q4.gguf", "b2");
    link("1bbbbbbbbb", "both.gguf", "b3");
    link("1bbbbbbbbb", "F16/s-00001-of-00002.gguf", "b4");
    link("1bbbbbbbbb", "F16/s-00002-of-00002.gguf", "b5");
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), "1bbbbbbbbb").unwrap();
    (dir, repo)
}

/// The snapshot of a cache was an empty model directory, since its files lie in the blobs beside
/// it.
#[test]
fn a_hugging_face_cache_works_whichever_of_its_directories_is_given() {
    let (_dir, repo) = hub();
    let all = ["both", "m-Q4", "s", "m-Q4@0aaaaaa"];
    for (given, expected) in [
        (repo.parent().unwrap().to_owned(), &all[..]),
        (
            repo.parent().unwrap().parent().unwrap().to_owned(),
            &all[..],
        ),
        (repo.clone(), &all[..]),
        (repo.join("snapshots"), &all[..]),
        (repo.join("snapshots/1bbbbbbbbb"), &all[..3]),
        (repo.join("snapshots/1bbbbbbbbb/F16"), &["s"][..]),
        (repo.join("snapshots/0aaaaaaaaa"), &["both", "m-Q4"][..]),
    ] {
        let dirs = ModelDirs::new(std::slice::from_ref(&given)).unwrap();
        let (files, is_whole) = dirs.list(&Looks::default());
        assert!(
            is_whole && files.iter().all(|file| file.unserved.is_none()),
            "{files:?}"
        );
        let files = crate::files::named(
            &dirs,
            &crate::declared::Book::default(),
            files,
            &HashMap::new(),
        );
        let mut names: Vec<_> = files.iter().map(|named| &*named.name).collect();
        let mut expected = expected.to_vec();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected, "{}", given.display());
        for named in &files {
            dirs.open(&named.file.path).unwrap();
        }
        // refs/main has the short name, not the hash that sorts first.
        if let Some(main) = files.iter().find(|named| named.name == "m-Q4") {
            let is_older = given.ends_with("0aaaaaaaaa");
            let blob = if is_older { "blobs/b1" } else { "blobs/b2" };
            assert_eq!(main.file.real, repo.join(blob), "{}", given.display());
        }
    }
    // No more than the blobs of that repository.
    let dirs = ModelDirs::new(&[repo.join("snapshots/1bbbbbbbbb")]).unwrap();
    assert!(dirs.open(&repo.join("refs/main")).is_err());
}

#[test]
fn files_of_two_repositories_with_one_name_are_called_by_the_repository() {
    let (_dir, repo) = hub();
    let hub = repo.parent().unwrap();
    for (of, file) in [("models--a--x", "m-Q4.gguf"), ("models--gpt2", "m-Q4.gguf")] {
        write(&hub.join(of).join("snapshots/c/").join(file), &[LLAMA]);
    }
    let dirs = ModelDirs::new(&[hub.to_owned()]).unwrap();
    let (files, _) = dirs.list(&Looks::default());
    let files = crate::files::named(
        &dirs,
        &crate::declared::Book::default(),
        files,
        &HashMap::new(),
    );
    let mut names: Vec<_> = files.iter().map(|named| &*named.name).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "both",
            "gpt2/m-Q4",
            "m-Q4",
            "m-Q4@0aaaaaa",
            "owner/repo/m-Q4",
            "s"
        ]
    );
}
