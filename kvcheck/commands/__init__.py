"""The command line: arguments in, a frozen plan to the core, an exit code out."""
