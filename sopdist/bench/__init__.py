"""What things cost, each measured beside a peer in the same run: what `sopdist bench` calls."""
