"""The data sets that `sopdist prepare` knows, one file each."""
