"""Making label sets: noise draws, files of users, comparisons."""
