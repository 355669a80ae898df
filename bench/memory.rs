//! Idle memory of server and agent: resident, half a minute after the agent has joined.

use std::time::Duration;

use anyhow::Context as _;
use rlm_bench::{Goal, figure, memory_mib};
use rlm_e2e::processes::Component;
use rlm_e2e::stack::{Options, Stack};

const SETTLED: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    if rlm_bench::only_tested() {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(measure())
}

async fn measure() -> anyhow::Result<()> {
    let tools = rlm_e2e::tools::tools().context("the programs are not built")?;
    let stack = Stack::start(&tools, Options::default()).await?;
    tokio::time::sleep(SETTLED).await;
    for (component, name, goal) in [(Component::Agent, "agent_idle_mib", 32.0), (Component::Server, "server_idle_mib", 64.0)] {
        let pid = stack.process_id(component).with_context(|| format!("{component:?} does not run"))?;
        figure(name, memory_mib(pid, "VmRSS").context("no memory figure")?, Goal::AtMost(goal));
    }
    stack.end().await
}
