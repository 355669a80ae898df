//! How a process ended, as the failure taxonomy says it. Pure.

use rlm_core::failure::{Failure, FailureCode};

use crate::executor::run::components::ComponentKind;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Code(i32),
    Signal(i32),
}

impl Ended {
    #[must_use]
    pub fn from_status(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt as _;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            // Neither happens for a process that was waited for.
            (None, None) => Self::Code(-1),
        }
    }

    /// `exited with status 1`, `was killed by signal 11 (SIGSEGV)`.
    #[must_use]
    pub fn sentence(self) -> String {
        match self {
            Self::Code(code) => format!("exited with status {code}"),
            Self::Signal(signal) => match signal_name(signal) {
                Some(name) => format!("was killed by signal {signal} ({name})"),
                None => format!("was killed by signal {signal}"),
            },
        }
    }

    const fn exit_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

const fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => return None,
    })
}

const SIGKILL: i32 = 9;
/// What `exec-child` writes when the program can't be started, and its exit status then.
pub const EXEC_FAILED: &str = "rlmesh-cluster-agent: cannot start";
pub const EXEC_FAILED_STATUS: i32 = 127;

/// What is known about an end that nobody asked for.
#[derive(Debug, Clone, Copy)]
pub struct Exit<'a> {
    pub component: &'a str,
    pub kind: ComponentKind,
    pub ended: Ended,
    /// It had served before.
    pub ready: bool,
    /// The kernel's out-of-memory killer was active in the agent's cgroup since it started.
    pub out_of_memory: bool,
    /// Last lines of its output.
    pub log_lines: &'a [String],
}

/// Who is to blame for the end of a component.
#[must_use]
pub fn classify(exit: Exit<'_>) -> Failure {
    let how = exit.ended.sentence();
    let (code, message) = if exit.ended == Ended::Signal(SIGKILL) && exit.out_of_memory {
        (FailureCode::OutOfMemory, format!("{} {how}: out of memory", exit.component))
    } else if exit.ended == Ended::Signal(SIGKILL) {
        (FailureCode::ProcessKilled, format!("{} {how} from outside", exit.component))
    } else if exit.ready {
        let why = last_exception(exit.log_lines).map(|line| format!(": {line}")).unwrap_or_default();
        (exit.kind.crashed(), format!("{} {how}{why}", exit.component))
    } else {
        start_failure(&exit, &how)
    };
    let mut failure = Failure::new(code, message).of(exit.component);
    failure.exit_code = Some(exit.ended.exit_code());
    failure.log_lines = exit.log_lines.to_vec();
    failure
}

fn start_failure(exit: &Exit<'_>, how: &str) -> (FailureCode, String) {
    let noun = exit.kind.noun();
    let component = exit.component;
    if exit.ended == Ended::Code(EXEC_FAILED_STATUS)
        && let Some(line) = exit.log_lines.iter().rev().find(|line| line.starts_with(EXEC_FAILED))
    {
        let why = line.trim_start_matches(EXEC_FAILED).trim();
        return (FailureCode::InvalidEntrypoint, format!("{component}: the {noun}'s interpreter can't be started: {why}"));
    }
    if let Some(line) = exit.log_lines.iter().rev().find(|line| line.trim_end().ends_with("exec format error")) {
        let advice =
            format!("the {noun}'s program is not built for this machine's architecture; on a cluster, build its image for linux/amd64");
        return (FailureCode::InvalidEntrypoint, format!("{component} {how} before it served: {}; {advice}", line.trim_end()));
    }
    if let Some(line) = exit.log_lines.iter().rev().find(|line| line.contains("No module named 'rlmesh'")) {
        let advice = "install it there, or name an interpreter that has it: `python` in the definition, or `rlmesh up --python FILE`";
        let message = format!("{component} {how} before it served: the {noun}'s interpreter does not have the SDK ({line}); {advice}");
        return (FailureCode::InvalidEntrypoint, message);
    }
    let usage = exit.log_lines.iter().rev().find(|line| line.contains("rlmesh.serve: error:"));
    if let (Ended::Code(2), Some(line)) = (exit.ended, usage) {
        return (FailureCode::InvalidParams, format!("{component} {how} before it served: {line}"));
    }
    match last_exception(exit.log_lines) {
        Some(line) => (blame(line).unwrap_or(exit.kind.start_failed()), format!("{component} {how} before it served: {line}")),
        None => {
            let last = exit.log_lines.iter().rev().find(|line| !line.trim().is_empty());
            let why = last.map(|line| format!(": {line}")).unwrap_or_default();
            (exit.kind.start_failed(), format!("{component} {how} before it served{why}"))
        }
    }
}

/// What Python and the SDK say of arguments that a constructor does not take.
const PARAM_MISFITS: [&str; 4] =
    ["unexpected keyword argument", "required positional argument", "required keyword-only argument", "received construction params"];

/// The request's fault that an exception line names; None: the component's own.
fn blame(line: &str) -> Option<FailureCode> {
    let (name, message) = line.split_once(':').unwrap_or((line, ""));
    let name = name.rsplit('.').next().unwrap_or(name);
    match name {
        "ParamError" | "MissingParamError" | "UnknownParamError" => Some(FailureCode::InvalidParams),
        "TypeError" if PARAM_MISFITS.iter().any(|misfit| message.contains(misfit)) => Some(FailureCode::InvalidParams),
        "ModuleNotFoundError" | "ImportError" | "EntrypointConstructionError" | "SyntaxError" => Some(FailureCode::InvalidEntrypoint),
        "AttributeError" if message.contains("could not resolve") => Some(FailureCode::InvalidEntrypoint),
        "ValueError" if message.contains("must be in module:callable form") => Some(FailureCode::InvalidEntrypoint),
        "TypeError" if message.contains("entrypoint") => Some(FailureCode::InvalidEntrypoint),
        "BootstrapUsageError" => Some(FailureCode::InvalidParams),
        _ => None,
    }
}

/// The last line that looks like the end of a Python traceback: `package.SomeError: message`.
fn last_exception(lines: &[String]) -> Option<&str> {
    lines.iter().rev().map(String::as_str).find(|line| {
        let name = line.split(':').next().unwrap_or("");
        let plain = !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || letter == '_' || letter == '.');
        let last = name.rsplit('.').next().unwrap_or("");
        plain
            && last.starts_with(|letter: char| letter.is_ascii_uppercase())
            && ["Error", "Exception", "Interrupt", "Exit", "StopIteration"].iter().any(|end| last.ends_with(end))
    })
}

/// The component did not serve in time.
#[must_use]
pub fn start_timeout(component: &str, kind: ComponentKind, timeout: std::time::Duration, log_lines: Vec<String>) -> Failure {
    let message = format!(
        "{component} did not serve within {} s; raise the {}'s startupTimeout if it needs longer to load",
        timeout.as_secs_f64(),
        kind.noun()
    );
    let mut failure = Failure::new(kind.start_timeout(), message).of(component);
    failure.log_lines = log_lines;
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(kind: ComponentKind, ended: Ended, ready: bool, lines: &[&str]) -> FailureCode {
        let log_lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        classify(Exit { component: "c", kind, ended, ready, out_of_memory: false, log_lines: &log_lines }).code
    }

    #[test]
    fn starts_are_blamed_by_what_python_said() {
        use ComponentKind::{Environment, Model};
        let one = Ended::Code(1);
        let table: &[(ComponentKind, Ended, &[&str], FailureCode)] = &[
            (
                Model,
                one,
                &["Traceback (most recent call last):", "rlmesh.params._resolve.UnknownParamError: unknown parameter(s): x"],
                FailureCode::InvalidParams,
            ),
            (Model, one, &["TypeError: CartPole.make() got an unexpected keyword argument 'x'"], FailureCode::InvalidParams),
            (
                Model,
                one,
                &["TypeError: Follower received construction params (x) but does not override load(...) to apply them"],
                FailureCode::InvalidParams,
            ),
            (Model, one, &["ModuleNotFoundError: No module named 'nosuch'", "  trailing hint"], FailureCode::InvalidEntrypoint),
            (Environment, one, &["AttributeError: env entrypoint 'envs:Nope' could not resolve 'Nope'"], FailureCode::InvalidEntrypoint),
            (Environment, one, &["ValueError: env entrypoint must be in module:callable form"], FailureCode::InvalidEntrypoint),
            (Environment, one, &["AttributeError: 'NoneType' object has no attribute 'x'"], FailureCode::EnvironmentStartFailed),
            (Model, one, &["RuntimeError: weights are broken"], FailureCode::ModelStartFailed),
            (Model, one, &["TypeError: can't multiply sequence by non-int of type 'float'"], FailureCode::ModelStartFailed),
            (
                Model,
                Ended::Code(2),
                &["python -m rlmesh.serve: error: RLMESH_MAKE_KWARGS: must be a JSON object"],
                FailureCode::InvalidParams,
            ),
            (
                Model,
                Ended::Code(127),
                &["rlmesh-cluster-agent: cannot start /no/python: No such file or directory"],
                FailureCode::InvalidEntrypoint,
            ),
            (Model, one, &["exec /usr/bin/serve: exec format error"], FailureCode::InvalidEntrypoint),
            (Environment, Ended::Code(0), &[], FailureCode::EnvironmentStartFailed),
            (Model, Ended::Signal(9), &[], FailureCode::ProcessKilled),
            (Environment, Ended::Signal(11), &["Error: not python"], FailureCode::EnvironmentStartFailed),
        ];
        for (kind, ended, lines, expected) in table {
            assert_eq!(code(*kind, *ended, false, lines), *expected, "{lines:?}");
        }
    }

    #[test]
    fn an_interpreter_without_the_sdk_is_named_with_what_to_do() {
        let line =
            "/usr/bin/python3: Error while finding module specification for 'rlmesh.serve' (ModuleNotFoundError: No module named 'rlmesh')";
        let log_lines = [line.to_owned()];
        let failure = classify(Exit {
            component: "model-0",
            kind: ComponentKind::Model,
            ended: Ended::Code(1),
            ready: false,
            out_of_memory: false,
            log_lines: &log_lines,
        });
        assert_eq!(failure.code, FailureCode::InvalidEntrypoint);
        assert!(failure.message.contains(line) && failure.message.contains("rlmesh up --python FILE"), "{}", failure.message);
    }

    #[test]
    fn ends_while_serving_are_crashes_whatever_the_status() {
        let exit = Exit {
            component: "env-0-1",
            kind: ComponentKind::Environment,
            ended: Ended::Code(0),
            ready: true,
            out_of_memory: false,
            log_lines: &[],
        };
        let failure = classify(exit);
        assert_eq!(failure.code, FailureCode::EnvironmentCrashed);
        assert_eq!(failure.message, "env-0-1 exited with status 0");
        assert_eq!(classify(Exit { ended: Ended::Signal(11), ..exit }).message, "env-0-1 was killed by signal 11 (SIGSEGV)");
        assert_eq!(classify(Exit { ended: Ended::Signal(9), ..exit }).code, FailureCode::ProcessKilled);
        assert_eq!(classify(Exit { ended: Ended::Signal(9), out_of_memory: true, ..exit }).code, FailureCode::OutOfMemory);
        assert_eq!(classify(Exit { kind: ComponentKind::Model, ended: Ended::Code(3), ..exit }).code, FailureCode::ModelCrashed);
    }
}
