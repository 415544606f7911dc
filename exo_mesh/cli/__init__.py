"""The command line: one module per verb, with `add_arguments(parser)` and `run(args) -> exit code`."""
