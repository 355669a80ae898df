//! The one bed that the tests of a program share: the one that is up already (`make bed`), or one of their own, which is
//! ended when the program has ended, however it ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Bed, default_folder, missing};
use crate::wait_for;

/// A file in the folder of a bed that ends with the program which started it: that program's process id.
const OWNED: &str = "owned";
/// How long the bed of a program that lives is waited for.
const PATIENCE: Duration = Duration::from_secs(900);
/// How long it may take to go once that program has ended.
const FAREWELL: Duration = Duration::from_secs(90);

/// A bed with every image in its registry.
pub struct Shared {
    pub bed: Bed,
    /// `host/repository@digest` by repository.
    pub images: BTreeMap<String, String>,
    calm: RwLock<()>,
    /// Waits for the end of this program on the other end of a pipe.
    _guard: Mutex<Option<Child>>,
    /// As long as it is held nobody starts or ends a bed.
    _held: Option<std::fs::File>,
}

impl Shared {
    /// For a test that wants nothing to go wrong: those with faults wait.
    pub async fn calm(&self) -> RwLockReadGuard<'_, ()> {
        self.calm.read().await
    }

    /// For a test that makes something go wrong for everybody.
    pub async fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.calm.write().await
    }

    /// An image that was pushed, the way a pod names it.
    pub fn image(&self, repository: &str) -> anyhow::Result<&str> {
        self.images.get(repository).map(String::as_str).with_context(|| format!("there is no image {repository}"))
    }
}

/// None, and a line that says why, on a machine that can't have a bed; on CI that is a failure.
pub async fn shared() -> anyhow::Result<Option<&'static Shared>> {
    static SHARED: OnceCell<Shared> = OnceCell::const_new();
    let why = match (missing(), std::env::var("RLMESH_BED_TOOLS"), crate::tools()) {
        (None, Ok(tools), Some(ours)) => {
            return SHARED.get_or_try_init(async || start(&tools, &ours.bin, &ours.root).await).await.map(Some);
        }
        (Some(why), _, _) => why,
        (None, Err(_), _) => "RLMESH_BED_TOOLS is not set: `make test` sets it to what scripts/bed-tools.sh prints".to_owned(),
        (None, Ok(_), None) => "the programs to test are not built".to_owned(),
    };
    crate::tools::skip(&why);
    Ok(None)
}

async fn start(tools: &str, bin: &Path, root: &Path) -> anyhow::Result<Shared> {
    let folder = default_folder();
    let owned = folder.join(OWNED);
    let wait = async |what, limit, over: &(dyn Fn() -> bool + Sync)| wait_for(what, limit, async || Ok(over().then_some(()))).await;
    // A bed of another program goes with it, maybe at this moment. One that outlived its guard is cleared away by the start.
    let _ = wait("the program with the bed to end", PATIENCE, &|| !owner_lives(&owned)).await;
    let gone = wait("the bed of another program to go", FAREWELL, &|| !owned.exists()).await;
    let found = if gone.is_ok() { Bed::attach(&folder) } else { Err(anyhow::anyhow!("its owner is gone")) };
    let (bed, guard, held) = match found {
        Ok(bed) => {
            bed.api_ready().await.context("a bed is there that doesn't answer; end it by `make bed-down`")?;
            (bed, None, None)
        }
        Err(_) => {
            let program = bin.join("bed");
            let (bed, held) = Bed::up_alone(&folder, tools, &program).await?;
            std::fs::write(&owned, std::process::id().to_string())?;
            let guard = guard(&program, &folder, &bed.layout.id)?;
            (bed, Some(guard), Some(held))
        }
    };
    let images = bed.publish(bin, root).await?;
    Ok(Shared { bed, images, calm: RwLock::new(()), _guard: Mutex::new(guard), _held: held })
}

/// Where the file says nothing: as long as it is there.
fn owner_lives(owned: &Path) -> bool {
    match std::fs::read_to_string(owned).map(|text| text.trim().parse::<u32>()) {
        Ok(Ok(owner)) => crate::processes::runs(owner),
        Ok(Err(_)) => true,
        Err(_) => false,
    }
}

fn guard(program: &PathBuf, folder: &Path, id: &str) -> anyhow::Result<Child> {
    Command::new(program)
        .arg("--folder")
        .arg(folder)
        .args(["guard", id])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("{} can't be started", program.display()))
}
