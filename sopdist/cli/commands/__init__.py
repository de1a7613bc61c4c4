"""The subcommands of `sopdist`, one file each: arguments in, a call into the package, text out."""
