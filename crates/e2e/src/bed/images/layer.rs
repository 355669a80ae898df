//! Layers: the same files give the same bytes. Everything belongs to root, is as old as the epoch and comes in the order of
//! its path.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

/// What lies at a path of a layer.
#[derive(Debug, Clone)]
enum Entry {
    Folder { mode: u32 },
    File { from: PathBuf, mode: u32 },
    Bytes { bytes: Vec<u8>, mode: u32 },
    Link { to: PathBuf },
}

/// Files by their path in the image, without the leading slash.
#[derive(Debug, Clone, Default)]
pub struct Files {
    entries: BTreeMap<PathBuf, Entry>,
}

impl Files {
    #[must_use]
    pub fn program(mut self, at: &str, from: &Path) -> Self {
        self.parents(Path::new(at));
        self.entries.insert(PathBuf::from(at), Entry::File { from: from.to_owned(), mode: 0o755 });
        self
    }

    #[must_use]
    pub fn bytes(mut self, at: &str, bytes: Vec<u8>) -> Self {
        self.parents(Path::new(at));
        self.entries.insert(PathBuf::from(at), Entry::Bytes { bytes, mode: 0o644 });
        self
    }

    #[must_use]
    pub fn folder(mut self, at: &str, mode: u32) -> Self {
        self.parents(Path::new(at));
        self.entries.insert(PathBuf::from(at), Entry::Folder { mode });
        self
    }

    /// Everything below `from`, without what Python leaves there by itself.
    pub fn tree(mut self, at: &str, from: &Path) -> anyhow::Result<Self> {
        self.parents(&Path::new(at).join("x"));
        self.add(Path::new(at), from)?;
        Ok(self)
    }

    fn add(&mut self, at: &Path, from: &Path) -> anyhow::Result<()> {
        for entry in std::fs::read_dir(from).with_context(|| format!("{} can't be read", from.display()))? {
            let entry = entry?;
            let (name, path) = (at.join(entry.file_name()), entry.path());
            let meta = std::fs::symlink_metadata(&path)?;
            let mode = meta.permissions().mode() & 0o7777;
            if meta.is_symlink() {
                self.entries.insert(name, Entry::Link { to: std::fs::read_link(&path)? });
            } else if meta.is_file() {
                self.entries.insert(name, Entry::File { from: path, mode });
            } else if meta.is_dir() {
                if entry.file_name() != "__pycache__" {
                    self.entries.insert(name.clone(), Entry::Folder { mode });
                    self.add(&name, &path)?;
                }
            } else {
                bail!("{} is neither file, folder nor link: no layer can hold it", path.display());
            }
        }
        Ok(())
    }

    fn parents(&mut self, at: &Path) {
        for parent in at.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            self.entries.entry(parent.to_owned()).or_insert(Entry::Folder { mode: 0o755 });
        }
    }

    /// Writes the layer to `file`, by way of a file beside it: what lies there is whole.
    pub fn write(&self, file: &Path) -> anyhow::Result<Layer> {
        let aside = file.with_extension("new");
        let output = Counted::new(io::BufWriter::new(File::create(&aside).with_context(|| format!("{}", aside.display()))?));
        // No name and no time in the head of the compressed file. Fast: it is for a network inside this machine.
        let packed = Counted::new(GzBuilder::new().write(output, Compression::fast()));
        let mut tar = tar::Builder::new(packed);
        for (path, entry) in &self.entries {
            append(&mut tar, path, entry).with_context(|| format!("/{} of a layer", path.display()))?;
        }
        let (zip, content, _) = tar.into_inner()?.finish();
        let (mut writer, digest, size) = zip.finish()?.finish();
        writer.flush()?;
        std::fs::rename(&aside, file)?;
        Ok(Layer { file: file.to_owned(), digest, content, size })
    }
}

fn append(tar: &mut tar::Builder<impl Write>, path: &Path, entry: &Entry) -> anyhow::Result<()> {
    let mut header = Header::new_gnu();
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    match entry {
        Entry::Folder { mode } => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(*mode);
            tar.append_data(&mut header, path.join(""), io::empty())?;
        }
        Entry::File { from, mode } => {
            let file = File::open(from).with_context(|| format!("{} can't be read", from.display()))?;
            header.set_mode(*mode);
            header.set_size(file.metadata()?.len());
            tar.append_data(&mut header, path, file)?;
        }
        Entry::Bytes { bytes, mode } => {
            header.set_mode(*mode);
            header.set_size(bytes.len() as u64);
            tar.append_data(&mut header, path, bytes.as_slice())?;
        }
        Entry::Link { to } => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            tar.append_link(&mut header, path, to)?;
        }
    }
    Ok(())
}

/// A layer that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub file: PathBuf,
    /// Of the file.
    pub digest: String,
    /// Of what is in it, unpacked: the image's configuration names layers so.
    pub content: String,
    pub size: u64,
}

/// Passes on what is written, and knows its digest and length.
struct Counted<W> {
    to: W,
    hash: Sha256,
    length: u64,
}

impl<W> Counted<W> {
    fn new(to: W) -> Self {
        Self { to, hash: Sha256::new(), length: 0 }
    }

    fn finish(self) -> (W, String, u64) {
        (self.to, format!("sha256:{}", hex::encode(self.hash.finalize())), self.length)
    }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.length += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(folder: &Path, order: [&str; 2]) -> Files {
        let tree = folder.join("tree");
        std::fs::create_dir_all(tree.join("sub/__pycache__")).unwrap();
        for name in order {
            std::fs::write(tree.join("sub").join(name), name).unwrap();
        }
        std::fs::write(tree.join("sub/__pycache__/a.pyc"), order[0]).unwrap();
        if !tree.join("link").is_symlink() {
            std::os::unix::fs::symlink("sub/a", tree.join("link")).unwrap();
        }
        Files::default().tree("usr/lib", &tree).unwrap().bytes("etc/name", b"bed".to_vec()).folder("tmp", 0o1777)
    }

    #[test]
    fn the_same_files_are_the_same_layer_wherever_and_whenever_they_were_written() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let one = sample(first.path(), ["a", "b"]).write(&first.path().join("one.gz")).unwrap();
        let two = sample(second.path(), ["b", "a"]).write(&second.path().join("two.gz")).unwrap();
        assert_eq!((&one.digest, &one.content, one.size), (&two.digest, &two.content, two.size));
        let bytes = std::fs::read(&one.file).unwrap();
        assert_eq!(one.digest, format!("sha256:{}", hex::encode(Sha256::digest(&bytes))));

        let mut other = tar::Archive::new(flate2::read::GzDecoder::new(bytes.as_slice()));
        let names: Vec<String> = other.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect();
        assert_eq!(
            names,
            ["etc/", "etc/name", "tmp/", "usr/", "usr/lib/", "usr/lib/link", "usr/lib/sub/", "usr/lib/sub/a", "usr/lib/sub/b"]
        );

        let third = sample(second.path(), ["b", "a"]).bytes("etc/name", b"other".to_vec()).write(&second.path().join("three.gz")).unwrap();
        assert_ne!(third.digest, one.digest);
    }
}
