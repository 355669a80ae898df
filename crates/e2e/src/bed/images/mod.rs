//! The images of the bed, built without a container engine: the same input gives the same digest.

pub mod debian;
pub mod layer;
pub mod oci;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::process::Command;

pub use layer::{Files, Layer};
pub use oci::{Image, Registry, Settings};

use super::names::{COREDNS_IMAGE, Node, PAUSE_IMAGE, REGISTRY_HOST, REGISTRY_PASSWORD, REGISTRY_USER};
use super::{Bed, Place, run};

const COMPILE: Duration = Duration::from_secs(60);
/// Nobody in particular.
const USER: &str = "10001:10001";

/// What runs beside the pods of others, on each node from the start: nobody could pull it, since its puller runs on it.
pub async fn system(coredns: &Path) -> anyhow::Result<[(&'static str, Image); 2]> {
    Ok([(PAUSE_IMAGE, pause().await?), (COREDNS_IMAGE, dns(coredns)?)])
}

async fn pause() -> anyhow::Result<Image> {
    let source = include_str!("../../../../../testbed/images/pause.c");
    let folder = tempfile::tempdir()?;
    let (text, program) = (folder.path().join("pause.c"), folder.path().join("pause"));
    std::fs::write(&text, source)?;
    let layer = match kept(source)? {
        Kept::There(layer) => layer,
        Kept::Missing(place) => {
            run(Command::new("cc").args(["-Os", "-static", "-s", "-o"]).arg(&program).arg(&text), COMPILE).await?;
            place.keep(&Files::default().program("pause", &program))?
        }
    };
    Ok(Image::new(vec![layer], &Settings { user: "65535:65535", command: vec!["/pause".to_owned()], ..Settings::default() }))
}

fn dns(coredns: &Path) -> anyhow::Result<Image> {
    // The folder's name has the hash of the program's sources.
    let layer = match kept(&coredns.display().to_string())? {
        Kept::There(layer) => layer,
        Kept::Missing(place) => place.keep(&Files::default().program("coredns", coredns))?,
    };
    Ok(Image::new(vec![layer], &Settings { user: "0:0", command: vec!["/coredns".to_owned()], ..Settings::default() }))
}

/// Images as they are pushed: repository to image.
pub async fn ours(bin: &Path, layers: &Path) -> anyhow::Result<BTreeMap<String, Image>> {
    std::fs::create_dir_all(layers)?;
    let base = folder_layer("", &debian::packages(&debian::BASE).await?)?;
    let mut images = BTreeMap::new();
    for program in ["rlmesh-cluster-agent", "rlmesh-cluster-controller", "rlmesh-gpu-discovery", "rlmesh-runner"] {
        let file = bin.join(program);
        if file.is_file() {
            let own = Files::default().folder("tmp", 0o1777).program(&format!("usr/bin/{program}"), &file);
            let own = own.write(&layers.join(format!("{program}.tar.gz")))?;
            let settings = Settings { user: USER, command: vec![format!("/usr/bin/{program}")], ..Settings::default() };
            images.insert(format!("rlmesh/{program}"), Image::new(vec![base.clone(), own], &settings));
        }
    }
    Ok(images)
}

/// What images with Python in them have in common.
struct Python {
    system: Layer,
    packages: Layer,
}

impl Python {
    async fn new(root: &Path) -> anyhow::Result<Self> {
        let names: Vec<&str> = debian::BASE.iter().chain(&debian::PYTHON).copied().collect();
        let system = folder_layer("", &debian::packages(&names).await?)?;
        let wheels = debian::wheels(&root.join("scripts/python/requirements.txt")).await?;
        let packages = folder_layer("usr/local/lib/python3.11/dist-packages", &wheels)?;
        Ok(Self { system, packages })
    }

    /// One that serves what `arguments` name; `more` is one more variable.
    fn image(&self, own: &Layer, user: &'static str, arguments: &[&str], more: &str) -> Image {
        let command = ["python3", "-m", "rlmesh.serve"].iter().chain(arguments).map(|&word| word.to_owned()).collect();
        let env = ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONPATH=/app", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"];
        let env = env.into_iter().chain(Some(more).filter(|more| !more.is_empty())).map(ToOwned::to_owned).collect();
        let settings = Settings { user, command, env, folder: "/app" };
        Image::new(vec![self.system.clone(), self.packages.clone(), own.clone()], &settings)
    }
}

/// Images as a user would build them: an environment and a model of `examples/quickstart`, and one that names root.
pub async fn users(root: &Path, layers: &Path) -> anyhow::Result<BTreeMap<String, Image>> {
    std::fs::create_dir_all(layers)?;
    let python = Python::new(root).await?;
    let own =
        Files::default().folder("tmp", 0o1777).tree("app", &root.join("examples/quickstart"))?.write(&layers.join("quickstart.tar.gz"))?;
    Ok([
        (ENVIRONMENT, python.image(&own, USER, &["--env", "envs:CartPole"], "")),
        ("user/quickstart-model", python.image(&own, USER, &["policies:Balancer"], "")),
        ("user/root-env", python.image(&own, "root", &["--env", "envs:CartPole"], "")),
    ]
    .map(|(name, image)| (name.to_owned(), image))
    .into())
}

const ENVIRONMENT: &str = "user/quickstart-env";

/// Images of faults, by tag: environment and model of `examples/misbehaving`; models that no node has pulled, one for each of
/// `unseen`; one for another architecture, and one that says it is for this one and is not.
pub async fn faulty(root: &Path, layers: &Path, unseen: &[&'static str]) -> anyhow::Result<BTreeMap<&'static str, Image>> {
    const MODEL: [&str; 1] = ["policies:Misbehaving"];
    let python = Python::new(root).await?;
    let own = Files::default()
        .folder("tmp", 0o1777)
        .tree("app", &root.join("examples/misbehaving"))?
        .write(&layers.join("misbehaving.tar.gz"))?;
    let mut images = BTreeMap::from([
        ("env", python.image(&own, USER, &["--env", "envs:Misbehaving"], "")),
        ("model", python.image(&own, USER, &MODEL, "")),
        ("foreign", python.image(&own, USER, &MODEL, "FOR=arm64").only_for("arm64")),
    ]);
    images.extend(unseen.iter().map(|&tag| (tag, python.image(&own, USER, &MODEL, &format!("UNSEEN={tag}")))));
    // The head of an executable file for arm64, which is as far as a kernel reads it.
    let mut program = b"\x7fELF\x02\x01\x01".to_vec();
    program.resize(64, 0);
    (program[16], program[18], program[20], program[52]) = (2, 183, 1, 64);
    let file = layers.join("alien");
    std::fs::write(&file, program)?;
    let alien = Files::default().program("usr/bin/alien", &file).write(&layers.join("alien.tar.gz"))?;
    let settings = Settings { user: USER, command: vec!["/usr/bin/alien".to_owned()], ..Settings::default() };
    images.insert("alien", Image::new(vec![python.system.clone(), alien], &settings));
    Ok(images)
}

/// A layer with everything in a folder of the cache, whose name has the hash of what is in it.
fn folder_layer(at: &str, folder: &Path) -> anyhow::Result<Layer> {
    match kept(&format!("{at} {}", folder.display()))? {
        Kept::There(layer) => Ok(layer),
        Kept::Missing(place) => place.keep(&Files::default().tree(at, folder)?),
    }
}

/// A layer of the cache.
enum Kept {
    There(Layer),
    Missing(Keeping),
}

struct Keeping {
    file: PathBuf,
    note: PathBuf,
}

fn kept(key: &str) -> anyhow::Result<Kept> {
    let name = format!("layer-{}", &hex::encode(Sha256::digest(key))[..16]);
    let folder = debian::cache()?;
    let (file, note) = (folder.join(format!("{name}.tar.gz")), folder.join(format!("{name}.json")));
    // The note is written last.
    let Ok(text) = std::fs::read(&note) else { return Ok(Kept::Missing(Keeping { file, note })) };
    let said: Value = serde_json::from_slice(&text).with_context(|| format!("{} is damaged: remove it", note.display()))?;
    let field = |field: &str| said[field].as_str().map(ToOwned::to_owned).with_context(|| format!("{} says no {field}", note.display()));
    let size = said["size"].as_u64().context("no size")?;
    Ok(Kept::There(Layer { file, digest: field("digest")?, content: field("content")?, size }))
}

impl Keeping {
    fn keep(self, files: &Files) -> anyhow::Result<Layer> {
        let layer = files.write(&self.file)?;
        std::fs::write(&self.note, json!({"digest": layer.digest, "content": layer.content, "size": layer.size}).to_string())?;
        Ok(layer)
    }
}

impl Bed {
    /// The bed's registry, spoken to from this machine.
    pub fn registry(&self) -> anyhow::Result<Registry> {
        let authority = reqwest::Certificate::from_pem(&std::fs::read(self.layout.pki("private-ca.crt"))?)?;
        let http = reqwest::Client::builder()
            .proxy(reqwest::Proxy::all(format!("http://{}", self.layout.gate))?)
            .tls_certs_only([authority])
            .connect_timeout(Duration::from_secs(5))
            .build()?;
        Ok(Registry {
            http,
            url: format!("https://{REGISTRY_HOST}"),
            user: REGISTRY_USER.to_owned(),
            password: REGISTRY_PASSWORD.to_owned(),
        })
    }

    /// Puts the images that nobody pulls on both nodes.
    pub(super) async fn import_system_images(&self) -> anyhow::Result<()> {
        let coredns = self.layout.tool("coredns", "coredns");
        for (name, image) in system(Path::new(&coredns)).await? {
            let file = self.layout.folder.join("image.tar");
            image.pack(name, &file)?;
            for node in Node::ALL {
                self.shell(Place::Node(node), &format!("ctr --namespace k8s.io images import '{}' >&2", file.display())).await?;
            }
            std::fs::remove_file(&file)?;
        }
        Ok(())
    }

    /// Builds and pushes every image: repository to `host/repository@digest`, the way a pod names it. `bin` has our programs,
    /// `root` is the source tree.
    pub async fn publish(&self, bin: &Path, root: &Path) -> anyhow::Result<BTreeMap<String, String>> {
        let registry = self.registry()?;
        let layers = self.layout.folder.join("layers");
        let mut images = ours(bin, &layers).await?;
        images.extend(users(root, &layers).await?);
        let mut references = BTreeMap::new();
        for (repository, image) in &images {
            references.insert(repository.clone(), registry.push(image, repository, "test").await?);
        }
        Ok(references)
    }

    /// Builds and pushes [`faulty`] images: tag to `host/repository@digest`. Their layers are in that repository already.
    pub async fn publish_faulty(&self, root: &Path, unseen: &[&'static str]) -> anyhow::Result<BTreeMap<&'static str, String>> {
        let registry = self.registry()?;
        let mut references = BTreeMap::new();
        for (tag, image) in faulty(root, &self.layout.folder.join("layers"), unseen).await? {
            references.insert(tag, registry.push(&image, ENVIRONMENT, tag).await?);
        }
        Ok(references)
    }
}
