"""The verbs of the command line: a module or package each."""
