"""The command line: flags and files to options, errors to one line."""
