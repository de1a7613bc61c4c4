"""The subcommands about data: thin calls into sopdist.data."""
