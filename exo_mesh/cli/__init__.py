"""The command line: a module per verb with `add_arguments(parser)` and `run(args) -> exit code`; lazy heavy imports."""
