//! Files of Debian packages and of Python wheels, as folders to make layers of. Nothing of a package is run: what a layer
//! holds is decided by the packages alone. Kept outside the checkout, by content.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use sha2::{Digest as _, Sha256};
use tokio::process::Command;

use crate::bed::run;

const DOWNLOAD: Duration = Duration::from_secs(300);
/// Of no use in an image.
const LEFT_OUT: [&str; 6] =
    ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/info", "usr/share/doc-base"];

/// What every program of ours needs.
pub const BASE: [&str; 3] = ["libc6", "libgcc-s1", "ca-certificates"];
/// Python, and enough beside it for a shell in the pod.
pub const PYTHON: [&str; 31] = [
    "python3-minimal",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libexpat1",
    "zlib1g",
    "libssl3",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
    "libsqlite3-0",
    "libncursesw6",
    "libtinfo6",
    "libreadline8",
    "libuuid1",
    "libdb5.3",
    "libcrypt1",
    "libstdc++6",
    "libnsl2",
    "libtirpc3",
    "libgssapi-krb5-2",
    "media-types",
    "tzdata",
    "dash",
    "coreutils",
    "libacl1",
    "libattr1",
    "libgmp10",
    "libselinux1",
    "libpcre2-8-0",
    "base-files",
];

/// The cache, made if need be.
pub fn cache() -> anyhow::Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set: there is no place for images")?)
            .join(".cache"),
    };
    let folder = base.join("rlmesh/images");
    std::fs::create_dir_all(&folder).with_context(|| format!("{} can't be made", folder.display()))?;
    Ok(folder)
}

/// The files of these packages.
pub async fn packages(names: &[&str]) -> anyhow::Result<PathBuf> {
    let mut listed = list(names).await;
    if listed.is_err() {
        run(Command::new("apt-get").args(["update", "-qq"]), DOWNLOAD).await?;
        listed = list(names).await;
    }
    let (list, files) = listed?;
    once("packages", list.as_bytes(), async |folder| {
        let archives = folder.with_extension("archives");
        let _ = std::fs::remove_dir_all(&archives);
        std::fs::create_dir_all(&archives)?;
        let get = ["-qq", "-o", "APT::Sandbox::User=root", "download"];
        run(Command::new("apt-get").args(get).args(names).current_dir(&archives), DOWNLOAD).await?;
        for (file, expected) in &files {
            let archive = archives.join(file);
            let found = hex::encode(Sha256::digest(std::fs::read(&archive).with_context(|| format!("{file} was not downloaded"))?));
            ensure!(found == *expected, "{file} has the digest {found}, Debian's list says {expected}");
            run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(folder), DOWNLOAD).await?;
        }
        std::fs::remove_dir_all(&archives)?;
        for left_out in LEFT_OUT {
            let _ = std::fs::remove_dir_all(folder.join(left_out));
        }
        certificates(folder)
    })
    .await
}

/// Name and digest of each archive, and all of it as one text.
async fn list(names: &[&str]) -> anyhow::Result<(String, Vec<(String, String)>)> {
    let said = run(Command::new("apt-get").args(["-qq", "download", "--print-uris"]).args(names), DOWNLOAD).await?;
    let mut files = Vec::new();
    for line in said.lines() {
        let mut fields = line.split_whitespace().skip(1);
        let (name, digest) = (fields.next().context("no file name")?, fields.nth(1).context("no digest")?);
        let digest = digest.strip_prefix("SHA256:").with_context(|| format!("{name} has no SHA-256"))?;
        files.push((name.to_owned(), digest.to_owned()));
    }
    ensure!(files.len() == names.len(), "apt knows {} of the {} packages {names:?}", files.len(), names.len());
    files.sort();
    Ok((format!("{files:?}{LEFT_OUT:?}"), files))
}

/// The one file that programs look for, which the package would make when it is installed.
fn certificates(folder: &Path) -> anyhow::Result<()> {
    let from = folder.join("usr/share/ca-certificates/mozilla");
    if !from.is_dir() {
        return Ok(());
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(from)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    files.sort();
    let mut all = Vec::new();
    for file in files {
        all.extend(std::fs::read(file)?);
    }
    std::fs::create_dir_all(folder.join("etc/ssl/certs"))?;
    std::fs::write(folder.join("etc/ssl/certs/ca-certificates.crt"), all)?;
    Ok(())
}

/// The Python packages of a locked requirements file, for the Python of [`PYTHON`].
pub async fn wheels(requirements: &Path) -> anyhow::Result<PathBuf> {
    let lock = std::fs::read(requirements).with_context(|| format!("{} can't be read", requirements.display()))?;
    once("wheels", &lock, async |folder| {
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--require-hashes",
            "--no-deps",
            "--no-compile",
        ]);
        pip.args(["--python-version", "3.11", "--only-binary", ":all:"]);
        for platform in ["manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"] {
            pip.args(["--platform", platform]);
        }
        run(pip.arg("--target").arg(folder).arg("-r").arg(requirements), DOWNLOAD).await?;
        // Commands that name the interpreter of this machine.
        let _ = std::fs::remove_dir_all(folder.join("bin"));
        Ok(())
    })
    .await
}

/// The folder `<kind>-<hash of the key>`, made by `make` if it isn't there; two callers don't both make it.
async fn once(kind: &str, key: &[u8], make: impl AsyncFnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<PathBuf> {
    let folder = cache()?.join(format!("{kind}-{}", &hex::encode(Sha256::digest(key))[..16]));
    let lock = std::fs::File::create(folder.with_extension("lock"))?;
    let _held = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock)).await??;
    if !folder.is_dir() {
        let aside = folder.with_extension("new");
        let _ = std::fs::remove_dir_all(&aside);
        std::fs::create_dir_all(&aside)?;
        make(&aside).await?;
        std::fs::rename(&aside, &folder)?;
    }
    Ok(folder)
}
