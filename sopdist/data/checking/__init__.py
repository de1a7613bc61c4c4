"""`sopdist verify` and `sopdist inspect`: is a split sound, and what is in it?"""
