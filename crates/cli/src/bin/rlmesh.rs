fn main() -> std::process::ExitCode {
    rlm_cli::main()
}
