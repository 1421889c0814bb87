"""The verbs of the `coflash` command, one module each; see `coflash.cli`."""
