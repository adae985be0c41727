"""The command line: one file a verb, each with `add_arguments` and `run`."""
