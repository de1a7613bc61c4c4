"""`sopdist prepare`: converts the images of a source to shards."""
