"""The command line: one module a verb, with a dataclass of its flags and a function `run`.

A verb imports torch and transformers only when it runs, so that `--help` is fast.
"""
