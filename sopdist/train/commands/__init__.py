"""The subcommands of training, thin."""
