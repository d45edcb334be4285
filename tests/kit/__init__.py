"""The test kit: worker processes, a float64 oracle, generators of inputs, comparisons and recorders."""
