"""Measuring attention beside its peers: fairly (interleaved, checked, on random data) and in one run."""
