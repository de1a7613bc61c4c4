"""`sopdist prepare`: from the images of a source to shards."""
