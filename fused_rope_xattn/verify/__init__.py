"""What tests, benchmarks and the command line share: a reference, a budget and an enumerator."""
