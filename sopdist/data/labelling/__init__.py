"""Creating and comparing label sets: synthetic noise, label files, differences."""
