"""A process group that takes as long as a link of choice, for tests, demos and benchmarks without a cluster."""
