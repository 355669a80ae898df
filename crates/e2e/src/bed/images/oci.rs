//! Images: layers with a configuration and a manifest; packed as an archive for containerd, or pushed to the bed's registry.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use reqwest::{Response, StatusCode, header};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::layer::Layer;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// What runs in a container of the image, if the pod doesn't say otherwise.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub user: &'static str,
    pub command: Vec<String>,
    pub env: Vec<String>,
    pub folder: &'static str,
}

/// An image, ready to be packed or pushed.
#[derive(Debug, Clone)]
pub struct Image {
    layers: Vec<Layer>,
    config: Vec<u8>,
    manifest: Vec<u8>,
    /// Names the manifest as one for an architecture. None: the manifest is all there is.
    index: Option<Vec<u8>>,
}

impl Image {
    #[must_use]
    pub fn new(layers: Vec<Layer>, settings: &Settings) -> Self {
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "User": settings.user,
                "Cmd": settings.command,
                "Env": settings.env,
                "WorkingDir": settings.folder,
            },
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| layer.content.as_str()).collect::<Vec<_>>()},
        })
        .to_string()
        .into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest(&config), "size": config.len()},
            "layers": layers.iter().map(|layer| json!({"mediaType": LAYER, "digest": layer.digest, "size": layer.size})).collect::<Vec<_>>(),
        })
        .to_string()
        .into_bytes();
        Self { layers, config, manifest, index: None }
    }

    /// The same, said to be for nodes of this architecture and no others.
    #[must_use]
    pub fn only_for(mut self, architecture: &str) -> Self {
        let index = json!({
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [{
                "mediaType": MANIFEST, "digest": digest(&self.manifest), "size": self.manifest.len(),
                "platform": {"os": "linux", "architecture": architecture},
            }],
        });
        self.index = Some(index.to_string().into_bytes());
        self
    }

    /// What a reference `name@sha256:...` names.
    #[must_use]
    pub fn digest(&self) -> String {
        digest(self.index.as_ref().unwrap_or(&self.manifest))
    }

    /// Of its layers, compressed.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.layers.iter().map(|layer| layer.size).sum()
    }

    /// An archive that `ctr images import` takes, in which the image is called `name`.
    pub fn pack(&self, name: &str, file: &Path) -> anyhow::Result<()> {
        let index = json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": MANIFEST, "digest": digest(&self.manifest), "size": self.manifest.len(),
                "annotations": {"io.containerd.image.name": name},
            }],
        });
        let mut tar = tar::Builder::new(File::create(file).with_context(|| format!("{} can't be written", file.display()))?);
        let mut add = |path: &str, bytes: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(bytes.len() as u64);
            tar.append_data(&mut header, path, bytes)
        };
        add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        add("index.json", index.to_string().as_bytes())?;
        for bytes in [&self.config, &self.manifest] {
            add(&blob_path(&digest(bytes)), bytes)?;
        }
        for layer in &self.layers {
            add(&blob_path(&layer.digest), &std::fs::read(&layer.file)?)?;
        }
        tar.into_inner()?.flush()?;
        Ok(())
    }
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// A registry that takes images.
#[derive(Debug, Clone)]
pub struct Registry {
    pub http: reqwest::Client,
    /// `https://host`.
    pub url: String,
    pub user: String,
    pub password: String,
}

impl Registry {
    /// Pushes what of the image is not there yet, and returns `<host>/<repository>@<digest>`.
    pub async fn push(&self, image: &Image, repository: &str, tag: &str) -> anyhow::Result<String> {
        for layer in &image.layers {
            if self.lacks(repository, &layer.digest).await? {
                let file = tokio::fs::File::open(&layer.file).await?;
                self.upload(repository, &layer.digest, layer.size, file.into()).await?;
            }
        }
        let config = digest(&image.config);
        if self.lacks(repository, &config).await? {
            self.upload(repository, &config, image.config.len() as u64, image.config.clone().into()).await?;
        }
        let (manifest, whole) = (digest(&image.manifest), image.digest());
        let mut puts = vec![(manifest.as_str(), MANIFEST, &image.manifest)];
        puts.extend(image.index.iter().map(|index| (whole.as_str(), INDEX, index)));
        puts.extend(puts.last().map(|&(_, kind, bytes)| (tag, kind, bytes)));
        for (reference, kind, bytes) in puts {
            let url = format!("{}/v2/{repository}/manifests/{reference}", self.url);
            let put = self.http.put(url).header(header::CONTENT_TYPE, kind).body(bytes.clone());
            self.send(put, &format!("the manifest of {repository}:{tag}")).await?;
        }
        Ok(format!("{}/{repository}@{}", self.url.trim_start_matches("https://"), image.digest()))
    }

    async fn lacks(&self, repository: &str, digest: &str) -> anyhow::Result<bool> {
        let head = self.http.head(format!("{}/v2/{repository}/blobs/{digest}", self.url)).timeout(Duration::from_secs(10));
        let found = head.basic_auth(&self.user, Some(&self.password)).send().await?.status();
        ensure!(found.is_success() || found == StatusCode::NOT_FOUND, "the registry answered {found} when asked for {repository}@{digest}");
        Ok(found == StatusCode::NOT_FOUND)
    }

    async fn upload(&self, repository: &str, digest: &str, size: u64, body: reqwest::Body) -> anyhow::Result<()> {
        let what = format!("{repository}@{digest}");
        let begun = self.send(self.http.post(format!("{}/v2/{repository}/blobs/uploads/", self.url)), &what).await?;
        let place = begun.headers().get(header::LOCATION).context("the registry named no place for an upload")?.to_str()?;
        let mut place = reqwest::Url::parse(&self.url)?.join(place)?;
        place.query_pairs_mut().append_pair("digest", digest);
        let put =
            self.http.put(place).header(header::CONTENT_LENGTH, size).header(header::CONTENT_TYPE, "application/octet-stream").body(body);
        self.send(put, &what).await.map(drop)
    }

    async fn send(&self, request: reqwest::RequestBuilder, what: &str) -> anyhow::Result<Response> {
        let answer = request
            .basic_auth(&self.user, Some(&self.password))
            .timeout(Duration::from_secs(120))
            .send()
            .await
            .with_context(|| format!("{what} could not be sent to the registry"))?;
        let status = answer.status();
        if !status.is_success() {
            anyhow::bail!("the registry answered {status} to {what}: {}", answer.text().await.unwrap_or_default());
        }
        Ok(answer)
    }
}
